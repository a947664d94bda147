"""Prefill instances under arrivals: by hand, and what load does to policies and improvement
rates."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.noise import NO_NOISE, Noise
from jaxserve.lab.simulate.tetris import PrefillInstances, PrefillOutcome, constant
from jaxserve.lab.simulate.workload import parse
from jaxserve.lanes.cdsp import PLANNERS, Instances, Latency, free_growth
from jaxserve.lanes.improvement import ImprovementRate
from jaxserve.lanes.improvement_search import best_rates
from jaxserve.settings.schema import ConfigError

# A token takes 1 s on one instance; groups share the work, and each one more than doubles what is
# paid once.
SIMPLE = Instances(
    {
        1: Latency(0.0, 1.0, 0.0, 0.0),
        2: Latency(1.0, 0.5, 0.0, 0.0),
        4: Latency(4.0, 0.25, 0.0, 0.0),
    },
    per_node=4,
    growth=free_growth,
)


def play(policy: str, *arrivals: tuple[float, int], rate: float = 0.0, **more) -> np.ndarray:
    """TTFT of requests of (time, tokens) on four instances."""
    server = PrefillInstances(SIMPLE, 4, PLANNERS[policy], constant(rate), **more)
    return server.run([Arrival(time, tokens, 1) for time, tokens in arrivals]).ttft


def test_requests_wait_for_each_other_on_fixed_groups():
    """Two groups of two: 6, 11 and, after the first, 6 - 2 + 3.5 seconds."""
    assert play("fixed-2", (0.0, 10), (0.0, 20), (2.0, 5)) == pytest.approx([6, 11, 7.5])


def test_the_greedy_policy_takes_all_instances_and_delays_the_next():
    """40 tokens: 40, 21 and 14 s; ten more: 14 + 6 s on two of the four then."""
    assert play("single", (0.0, 40), (0.0, 10)) == pytest.approx([14, 20])
    assert play("single", (0.0, 40), (0.0, 10), rate=0.35) == pytest.approx([21, 6]), (
        "14 s does not save 35 % of 21 s"
    )


def test_an_instance_that_decodes_is_not_free():
    assert play("single", (0.0, 40), (14.0, 40)) == pytest.approx([14, 14])
    assert play("single", (0.0, 40), (14.0, 40), held=lambda arrival: 5.0) == pytest.approx(
        [14, 19]
    )


def test_busy_is_what_was_computed():
    served = PrefillInstances(SIMPLE, 4, PLANNERS["fixed-2"], constant(0.0)).run(
        [Arrival(0.0, 10, 1), Arrival(0.0, 20, 1)]
    )
    assert served.busy == pytest.approx(
        (2 * 6 + 2 * 11) / (4 * 11)
    ) and served.tokens_per_s == pytest.approx(30 / 11)
    assert served.idle == 0


def test_idle_is_what_a_group_waits_for_its_last_member():
    """Two tokens run on one instance, then 100 on all four: three wait for 2 s. A chunk before
    fills that time on two of them."""
    waits = lambda policy: PrefillInstances(SIMPLE, 4, PLANNERS[policy], constant(0.0)).run(
        [Arrival(0.0, 2, 1), Arrival(0.0, 100, 1)]
    )
    assert (
        waits("single").idle == pytest.approx(3 * 2 / (4 * 31))
        and waits("cdsp").idle < waits("single").idle
    )


@pytest.mark.parametrize("noise", [NO_NOISE, Noise(1e-9)], ids=["planned", "drawn"])
def test_history_that_moves_delays_a_chunk_on_a_grown_group(noise):
    """As above: two tokens on one instance, the others on all four in 28.5 s, and the moves in
    between; one chunk takes half a second more than these two without any."""

    def grows(seconds: float) -> PrefillOutcome:
        instances = replace(SIMPLE, growth=lambda *grown: seconds)
        served = PrefillInstances(instances, 4, PLANNERS["cdsp"], constant(0.0), noise=noise)
        return served.run([Arrival(0.0, 2, 1), Arrival(0.0, 100, 1)])

    assert grows(0.0).ttft == pytest.approx([2, 30.5]) and grows(0.0).exposed == 0
    slower = grows(0.25)
    assert slower.ttft == pytest.approx([2, 30.75]) and slower.several == 1
    assert slower.exposed == pytest.approx(4 * 0.25 / (4 * 30.75))
    assert grows(0.6).ttft == pytest.approx([2, 31]) and grows(0.6).several == 0


def arrivals(load: float) -> list[Arrival]:
    return parse("poisson:prompt=lognormal:20:0.8:4:100,output=1", qps=load, requests=400)


def test_a_lower_rate_is_best_where_instances_idle_and_a_higher_one_where_they_do_not():
    table = best_rates(SIMPLE, 4, PLANNERS["cdsp"], arrivals, loads=(0.01, 0.12), rates=(0.05, 0.7))
    assert table == {0.01: 0.05, 0.12: 0.7}


def test_a_rate_that_follows_the_load_is_near_the_best_at_every_load():
    loads = (0.01, 0.06, 0.12)
    rates = (0.05, 0.3, 0.7)
    table = best_rates(SIMPLE, 4, PLANNERS["cdsp"], arrivals, loads, rates)
    mean = lambda load, rate: (
        PrefillInstances(SIMPLE, 4, PLANNERS["cdsp"], rate).run(arrivals(load)).ttft.mean()
    )
    for load in loads:
        follows = ImprovementRate(table, window=1000.0, every=100.0)
        assert mean(load, follows.arrived) < 1.15 * min(
            mean(load, constant(rate)) for rate in rates
        )


def test_cdsp_serves_a_loaded_cluster_sooner_than_one_chunk_and_fixed_groups():
    mean = lambda name: (
        PrefillInstances(SIMPLE, 4, PLANNERS[name], constant(0.3)).run(arrivals(0.1)).ttft.mean()
    )
    means = {name: mean(name) for name in ("cdsp", "single", "fixed-4")}
    assert means["cdsp"] <= 1.02 * means["single"] < means["fixed-4"]


def test_errors_are_the_policys():
    with pytest.raises(ConfigError, match="queues"):
        PrefillInstances(SIMPLE, 3, PLANNERS["cdsp"], constant(0.0)).run([Arrival(0.0, 1, 1)])
