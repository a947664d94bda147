"""An exchange that is added from outside: its device function, and its row of the table."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from prometheus_client import generate_latest

from experiments.context_parallel.work import choose
from jaxserve.lanes import exchange as table
from jaxserve.lanes.choice import ExchangeChooser
from jaxserve.lanes.rates import ExchangeRates, Link
from jaxserve.lanes.work import Heads
from jaxserve.settings.options import options_of
from jaxserve.settings.schema import ConfigError, SchedulerConfig
from jaxserve.sharding import exchange as device
from tests.engine.harness import Runner, engine, shapes_of

LINK = Link(1e-5, 1e9)
RATES = ExchangeRates(1e15, 1e12, 1e-6, Link(1.0, 1e9), LINK, LINK)  # hops are slow
PROMPT = np.random.default_rng(0).integers(3, 500, 150)
SIZES = dict(chunk=32, seqs=2, pages=64, max_len=256)


@pytest.fixture
def twin():
    """A second `gather`, in half the time. Gives the shapes of the queries that it was traced
    with."""
    traced = []

    def attend_all(q, *rest):
        traced.append(q.shape)
        return device.gather(q, *rest)

    gather = table.EXCHANGES["gather"]
    half = lambda *work: gather.seconds(*work) / 2
    table.EXCHANGES["twin"] = dataclasses.replace(gather, name="twin", seconds=half)
    device.EXCHANGES["twin"] = attend_all
    yield traced
    table.EXCHANGES.pop("twin", None)
    del device.EXCHANGES["twin"]


def answer(**settings) -> tuple[list[int], set[str], str]:
    """Tokens after the prompt, exchanges of the shapes of its steps, and the metrics."""
    made = engine(**SIZES, **settings)
    shapes = shapes_of(made)
    runner = Runner(made)
    name = runner.submit(PROMPT, max_tokens=8, ignore_eos=True)
    runner.run()
    used = {shape.exchange for shape in shapes if shape.spread_prefill.rows}
    return runner.ids(name), used, generate_latest(made.metrics_registry).decode()


def counted(metrics: str, exchange: str) -> float:
    """Steps by an exchange, by the metrics."""
    row = f'jaxserve:exchange_steps_total{{exchange="{exchange}"}} '
    return float(next(line for line in metrics.splitlines() if line.startswith(row)).split()[1])


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
def test_it_serves_and_is_counted(twin):
    spread = dict(mesh="kvp=2", lane_tokens=32, placement="striped")
    alone, _, _ = answer()
    ids, used, metrics = answer(exchange="twin", **spread)
    assert ids == alone
    assert used == {"twin"} and counted(metrics, "twin") > 0
    assert counted(metrics, "pass_q") == counted(metrics, "pass_kv") == 0
    assert twin  # the programs of these steps call it


def test_it_is_chosen_where_it_is_faster(twin):
    chooser = ExchangeChooser(2, Heads(4, 2, 16), RATES)
    work = [(10_000, 4)]
    assert choose(chooser, work).strategy == "twin"
    del table.EXCHANGES["twin"]
    assert choose(chooser, work).strategy == "gather"


def test_settings_know_it_as_long_as_it_is_there(twin):
    assert SchedulerConfig(exchange="twin").exchange == "twin"
    assert "twin" in options_of(SchedulerConfig)["exchange"].choices


def test_settings_refuse_it_where_it_is_not():
    with pytest.raises(
        ConfigError, match="'twin' is not one of gather, pass_q, pass_kv, visit, auto"
    ):
        SchedulerConfig(exchange="twin")
