"""Nodes that change sides with the tide (section 5.1): first long prompts with short answers come,
then short prompts with long answers, to eight nodes with fixed roles and with changing ones.

    python -m experiments.mooncake.tide

Simulated: the nodes of the other experiments, and the controller that a live conductor has. The
paper describes the rule and gives no figure of it. Prints the share of requests within both
objectives in each half, and how many nodes prefilled.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from experiments.mooncake.clusters import disaggregated
from experiments.virtual_cluster.cluster import ClusterReport, ClusterSpec, run
from jaxserve.cluster.roles import RatioLimits
from jaxserve.lab.simulate.arrival import Arrival

NODES = 8
TTFT, TBT = 10.0, 0.1  # seconds
# tokens of prompt and answer, requests per second
PHASES = ((16_000, 64, 2.8), (1_000, 1_600, 14.0))


class Tide(NamedTuple):
    """One run. in_time: share of requests within both objectives, by phase; prefilling: nodes that
    prefilled, at the end of each phase; changes: of sides."""

    name: str
    in_time: tuple[float, ...]
    prefilling: tuple[int, ...]
    changes: int


def arrivals(seconds: float, seed: int = 0) -> list[Arrival]:
    """Requests of the phases, one after the other, each for some seconds, at random times."""
    draw = np.random.default_rng(seed)
    made = []
    for number, (prompt, output, rate) in enumerate(PHASES):
        times = np.sort(draw.uniform(0, seconds, round(rate * seconds))) + number * seconds
        made += [Arrival(float(time), prompt, output) for time in times]
    return made


def specs() -> Iterator[tuple[str, ClusterSpec]]:
    """Fixed roles, and roles that change from an even split on."""
    for prefill in (2, 4, 6):
        spec = disaggregated(prefill, NODES - prefill, ttft=TTFT, tbt=TBT)
        yield f"{prefill}P{NODES - prefill}D", spec
    even = disaggregated(NODES // 2, NODES // 2, ttft=TTFT, tbt=TBT)
    yield "changing", replace(even, ratio=RatioLimits())


def tide(name: str, spec: ClusterSpec, seconds: float) -> Tide:
    """Runs the phases, each of some seconds, through a cluster."""
    report = run(spec, arrivals(seconds))
    ends = [number * seconds for number in range(len(PHASES) + 1)]
    prefilling = tuple(_prefilling(spec, report, end) for end in ends[1:])
    in_time = tuple(_in_time(report, *phase) for phase in zip(ends, ends[1:]))
    return Tide(name, in_time, prefilling, len(report.role_changes))


def _prefilling(spec: ClusterSpec, report: ClusterReport, at: float) -> int:
    before = [change.prefilling for change in report.role_changes if change.at <= at]
    return before[-1] if before else sum(role.prefills for role in spec.roles)


def _in_time(report: ClusterReport, begin: float, end: float) -> float:
    came = [record for record in report.records if begin <= record.arrival < end]
    return replace(report, records=came).effective(TTFT, TBT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="of each phase")
    given = parser.parse_args()
    print("| roles | long prompts in time | long answers in time | prefilling at ends | changes |")
    print("|---|---|---|---|---|")
    for name, spec in specs():
        one = tide(name, spec, given.seconds)
        shares = " | ".join(f"{share:.0%}" for share in one.in_time)
        counts = ", ".join(map(str, one.prefilling))
        print(f"| {one.name} | {shares} | {counts} | {one.changes} |", flush=True)


if __name__ == "__main__":
    main()
