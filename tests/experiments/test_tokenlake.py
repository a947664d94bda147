"""TokenLake's figures in miniature: rows, claims and panels of each; the systems, the goodput, and
steps by plan."""

from __future__ import annotations

import math

import numpy as np
import pytest

from experiments.tokenlake import __main__ as every
from experiments.tokenlake import fig9, fig10, fig11, fig12, fig13, goodput, roles, systems
from experiments.tokenlake.figure import WORKLOADS, TokenLakeSettings
from experiments.tokenlake.systems import (
    ADAPTIVE,
    HASHED,
    P1D3,
    ROUTER,
    SYSTEMS,
    Result,
)
from jaxserve.lab.simulate.arrival import Arrival
from tests.experiments.figure_checks import made_small

FIGURES = {made.name: made for made in every.PAPER.figures()}
SMALL = TokenLakeSettings(requests=4)
FEW = {name: SYSTEMS[name] for name in (HASHED, P1D3)}


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Systems, rates and sizes enough for a miniature."""
    monkeypatch.setattr(goodput, "MOST_STEPS", 1)
    for figure in (fig9, fig10):
        monkeypatch.setattr(figure, "SYSTEMS", FEW)
    monkeypatch.setattr(fig10, "SEGMENTS", (512,))
    monkeypatch.setattr(fig11, "OTHERS", (P1D3,))
    for sizes in ("TOKENS", "FEW"):
        monkeypatch.setattr(fig11, sizes, (120_000,))
    monkeypatch.setattr(fig12, "TOKENS", (120_000,))
    kept = (fig13.TWO_POOLS, fig13.GROUPS, ROUTER)
    monkeypatch.setattr(fig13, "SPECS", {name: fig13.SPECS[name] for name in kept})


@pytest.mark.parametrize("name", [name for name in FIGURES if name != "fig3"])
def test_a_figure_in_miniature_gives_csv_and_table(name, tmp_path, monkeypatch):
    rows = made_small(FIGURES[name], SMALL, tmp_path, monkeypatch)
    assert any(math.isfinite(claim.ours(rows)) for claim in FIGURES[name].claims)


def test_a_pool_reads_its_lanes_evenly_and_a_router_does_not():
    settings = TokenLakeSettings(requests=30)
    pool, router = (
        systems.simulated(SYSTEMS[name], "loogle", 2.5, settings) for name in (HASHED, ADAPTIVE)
    )
    assert pool.spread > 0.5 and router.spread == 0
    assert pool.variation.mean() < 0.5 * router.variation.mean()
    assert pool.ended == router.ended == 1


def test_a_pool_of_one_lane_is_refused():
    none = Result(1.0, 1.0, 0.5, 0.1, 0.1, 0.1, np.ones((1, 4)), spread=0.0, copies=0)
    with pytest.raises(AssertionError, match="no sequence lay on several lanes"):
        systems.check_pooled([none], SMALL, copies=False)
    one = Result(1.0, 1.0, 0.5, 0.1, 0.1, 0.1, np.ones((1, 4)), spread=1.0, copies=0)
    systems.check_pooled([one], SMALL, copies=True)
    with pytest.raises(AssertionError, match="nothing was copied"):
        systems.check_pooled([one], TokenLakeSettings(), copies=True)


def test_objectives_are_ten_times_a_request_alone():
    short, long = systems.objectives(2000), systems.objectives(24_000)
    assert short.tpot < long.tpot < 2 * short.tpot
    assert long.ttft == pytest.approx(10 * systems.alone().prefill(0, 24_000, systems.CHUNK))
    assert systems.adapted(2000).tpot == pytest.approx(0.9 * short.tpot)


def test_goodput_is_where_the_share_in_time_falls_below_nine_tenths():
    rows = [
        dict(workload="loogle", system="a", qps=qps, in_time=share)
        for qps, share in ((4.0, 0.5), (1.0, 1.0), (2.0, 0.9 + 0.05), (3.0, 0.85))
    ]
    assert goodput.goodput(rows, "loogle", "a") == pytest.approx(2.5)
    assert goodput.goodput(rows[:1], "loogle", "a") == 4.0
    assert math.isnan(goodput.goodput(rows, "loogle", "b"))


def test_rates_go_up_to_the_limit_or_down_to_it(monkeypatch):
    def share(spec, workload, qps, settings):
        return Result(float(qps < limit), 1.0, 0.0, 0.0, 0.0, 0.0, np.ones((1, 1)), 0.0, 0)

    monkeypatch.setattr(goodput, "MOST_STEPS", 10)
    monkeypatch.setattr(goodput, "simulated", share)
    begin = WORKLOADS["loogle"].rate
    for limit in (0.2 * begin, 5 * begin):
        found = goodput.rates(SYSTEMS[ROUTER], "loogle", SMALL)
        tried = [(qps, result.in_time) for qps, result in found]
        assert tried == sorted(tried)
        below = [qps for qps, passed in tried if passed]
        above = [qps for qps, passed in tried if not passed]
        assert max(below) < limit <= min(above) < 1.3 * max(below)


def test_steps_by_plan_serve_every_request_and_more_lanes_are_faster():
    blocks = np.arange(500, dtype=np.int32)
    arrivals = [
        Arrival(0.2 * n, 8016, 8, blocks=blocks + 500 * (n % 2), block=16) for n in range(8)
    ]
    seconds = {
        name: roles.input_seconds(arrivals, policy, 100_000)
        for name, policy in roles.POLICIES.items()
    }
    assert all(value > 0 for value in seconds.values())
    assert seconds["elastic"] < seconds["1P3D"]
    small = roles.input_seconds(arrivals, roles.POLICIES["1P3D"], 16)
    assert small > seconds["1P3D"]
