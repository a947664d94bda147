"""The simulator beside a live engine that is stood in for by another simulation: seeds, noise and
what is within its aim."""

from __future__ import annotations

import json

import pytest

from experiments.benchmarks import fidelity
from experiments.benchmarks.fidelity import COMMAND, Live, RequestLatency
from experiments.script import command_line
from jaxserve.costs.coefficients import Costs
from jaxserve.lab.simulate.noise import Noise

COSTS = Costs(layers=1, launch=0.02, linear_token=1e-4)
SIGMA = 0.2


def steps() -> list[tuple[float, float]]:
    """Predicted and taken seconds of steps, of one of which the machine was the cause."""
    draw = Noise(SIGMA, 9).draws()
    return [(1.0, draw()) for _ in range(4000)] + [(0.1, 5.0)]


@pytest.fixture
def stood_in(monkeypatch):
    """Has a simulation with noise of its own stand in for the live engine."""

    def live(config, loads) -> Live:
        found = [
            fidelity.virtual(config, arrivals, COSTS, 1.0, Noise(SIGMA, 100 + number))
            for number, arrivals in enumerate(loads)
        ]
        return Live(found, COSTS, steps())

    monkeypatch.setattr(fidelity, "live", live)


def test_the_spread_of_the_live_steps_is_found_without_what_is_the_machines():
    assert Live([], COSTS, steps()).sigma == pytest.approx(SIGMA, abs=0.01)


def test_the_scale_is_that_of_all_steps_together():
    """Not of the last ones, which may have been of one kind."""
    seen = Live([], COSTS, [(0.5, 1.0)] * 30 + [(0.01, 0.01)] * 300)
    assert seen.scale == pytest.approx(33 / 18)


def test_figures_that_are_off_are_marked():
    seen = [RequestLatency(1.0, 0.1, 2.0)] * 9 + [RequestLatency(3.0, 0.1, 4.0)]
    off = [RequestLatency(1.0, 0.11, 2.0)] * 10
    result = fidelity.compared(seen, off)
    assert result["tpot"]["mean_off"] == pytest.approx(0.1)
    assert result["ttft"]["p99_off"] < -0.15
    assert fidelity.shown(result).count(" no") == 3, "P99 of TPOT is within 15 %"
    assert fidelity.shown(fidelity.compared(seen, seen)).count(" ok") == 4


def test_each_seed_is_simulated_with_and_without_noise(stood_in, capsys, tmp_path):
    file = tmp_path / "fidelity.json"
    flags = ["--requests=40", "--qps=2", "--seeds=2", f"--json={file}"]
    assert command_line("fidelity", "", COMMAND, flags) == 0
    out = capsys.readouterr().out
    assert "2 seeds of 40 requests" in out and "drawn 0.20" in out
    results = json.loads(file.read_text())["results"]
    assert [len(result["seeds"]) for result in results.values()] == [2, 2]
    # factors have a mean of 1, and are not learnt into what steps take
    off = {name: one["pooled"]["tpot"] for name, one in results.items()}
    assert all(abs(one["mean_off"]) < fidelity.AIMS["mean"] for one in off.values())
    assert abs(off["with noise"]["p99_off"]) < abs(off["without noise"]["p99_off"])
