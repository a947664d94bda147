"""Sensitivity of the planners' gains to noise: how much sooner prompts have their first token by
plans of several chunks (Tetris) than by one, and than by groups that never change, when steps take
a drawn factor of what planners predict.

    python -m experiments.noise_sensitivity --json=gains.json

Instances: sixteen A100, which work apart from each other (figures 8 and 13 of Tetris). Lanes: eight
of one virtual replica, through the scheduler that serves (figure 8_served). Gains are the other
planner's mean TTFT over that of plans of several chunks: median of the seeds, least and greatest.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from experiments.script import command_line, keep
from experiments.tetris import fig8_served
from experiments.tetris.figure import TetrisSettings
from experiments.tetris.systems import run as run_instances
from jaxserve.cli.display import table
from jaxserve.lab.simulate.noise import REPEATED, SERVED
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option

SIGMAS = (0.0, REPEATED, SERVED, 2 * SERVED)
MODEL = "llama3-8b"
TRACE = "medium"
LOADS = (2.0, 3.1)  # requests per second
RATE = 0.3  # improvement rate of all plans
OTHERS = ("single-chunk", "fixed-8")
OPTIONS = {
    "what is run": [
        Option("requests", int, 500, "of a run of instances; lanes have 100 at most", 2),
        Option("seeds", int, 3, "of arrivals, lengths and noise", 1),
        Option("json", str, None, "file for all figures"),
    ]
}


def instance_gains(settings: TetrisSettings, load: float) -> dict[str, float]:
    """Gains by the other planner; `several`: share of the plans that have several chunks; `idle`:
    share of the instances' time that groups of plans in one chunk wait for their last member."""
    served = functools.partial(run_instances, settings=settings, rate=RATE)
    ours = served("tetris", MODEL, TRACE, load)
    others = {name: served(name, MODEL, TRACE, load) for name in OTHERS}
    gains = {name: float(other.ttft.mean() / ours.ttft.mean()) for name, other in others.items()}
    several = ours.several / len(ours.ttft)
    return {**gains, "several": several, "idle": others["single-chunk"].idle}


def lane_gains(settings: TetrisSettings) -> dict[str, float]:
    """Gains by the other planner; `several`: prompts whose group of lanes grew, as a share."""
    rows = list(fig8_served.rows_at(fig8_served.LOADS[-1], settings, ("cdsp", "single", "fixed-8")))
    found = {str(row["planner"]): row for row in rows}
    served = {name: float(row["served_s"]) for name, row in found.items()}
    grown = float(found["cdsp"]["grown"]) / min(settings.requests, fig8_served.REQUESTS)
    return {
        "single-chunk": served["single"] / served["cdsp"],
        "fixed-8": served["fixed-8"] / served["cdsp"],
        "several": grown,
    }


def measured(settings: TetrisSettings) -> Iterator[tuple[str, float, list[Mapping[str, float]]]]:
    """Yields what is simulated, sigma, and the gains of each seed."""
    cases = {
        **{
            f"instances, {load:g}/s": functools.partial(instance_gains, load=load) for load in LOADS
        },
        f"lanes, {fig8_served.LOADS[-1]:g}/s": lane_gains,
    }
    for name, gains in cases.items():
        for sigma in SIGMAS:
            noisy = replace(settings, noise=sigma)
            yield name, sigma, [gains(one) for one in noisy.each_seed()]


def shown(found: Sequence[Mapping[str, float]], name: str) -> str:
    """A gain: the median of the seeds, and their ends."""
    values = [gains[name] for gains in found if name in gains]
    if not values:
        return ""
    return f"{np.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def run(values: dict[str, Any]) -> int:
    settings = TetrisSettings(requests=values["requests"], seeds=values["seeds"])
    results = list(measured(settings))
    columns = (*OTHERS, "several", "idle")
    head = ["", "sigma", *(f"{name} / cdsp" for name in OTHERS), *columns[len(OTHERS) :]]
    rows = [
        [name, f"{sigma:g}", *(shown(found, column) for column in columns)]
        for name, sigma, found in results
    ]
    print(table(head, rows))
    keep(values, gains=[dict(case=case, sigma=s, seeds=found) for case, s, found in results])
    return 0


COMMAND = Command(OPTIONS, run, __doc__.partition("\n\n")[2])

if __name__ == "__main__":
    name = "noise_sensitivity"
    sys.exit(command_line(name, "the planners' gains under noise", COMMAND, sys.argv[1:]))
