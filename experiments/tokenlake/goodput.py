"""Finds the P90 goodput of a system: the highest rate at which nine of ten requests are in time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from experiments.figures import Row, Rows, matching
from experiments.tokenlake.figure import WORKLOADS, TokenLakeSettings
from experiments.tokenlake.systems import (
    ATTAINED,
    P1D3,
    P3D1,
    POOL,
    Result,
    check_pooled,
    simulated,
)
from experiments.virtual_cluster.cluster import ClusterSpec

FACTOR = 1.5  # between the rates that are tried
MOST_STEPS = 10  # up, or down
# shares of a workload's rate at which the search for systems begins that bear less
BEGIN = {P1D3: 0.22, P3D1: 0.3}


def rates(
    spec: ClusterSpec, workload: str, settings: TokenLakeSettings, begin: float = 1.0
) -> Iterator[tuple[float, Result]]:
    """Yields rates with their results, in the order of the rates: up from the workload's own to the
    first that is too high, or down to the first that is not, and one between the last two. begin:
    at this share of the workload's own."""
    found: dict[float, Result] = {}

    def passes(qps: float) -> bool:
        found[qps] = simulated(spec, workload, qps, settings)
        return found[qps].in_time >= ATTAINED

    qps = begin * WORKLOADS[workload].rate
    up = passes(qps)
    for _ in range(MOST_STEPS):
        before, qps = qps, qps * FACTOR if up else qps / FACTOR
        if passes(qps) != up:
            passes(math.sqrt(before * qps))
            break
    yield from sorted(found.items())


def rows(name: str, spec: ClusterSpec, workload: str, settings: TokenLakeSettings) -> Iterator[Row]:
    """Yields a row for each rate that is tried. Errors: AssertionError for a whole run that never
    comes to its limit, or a pool that is none."""
    found = list(rates(spec, workload, settings, BEGIN.get(name, 1.0)))
    if settings.requests is None:
        shares = [result.in_time for _, result in found]
        assert min(shares) < ATTAINED <= max(shares), f"{name}, {workload}: no limit in {shares}"
    if name.startswith(POOL):
        check_pooled((result for _, result in found), settings, copies=False)
    for qps, result in found:
        yield {
            "lengths": settings.lengths,
            "workload": workload,
            "system": name,
            "qps": qps,
            "in_time": result.in_time,
            "ended": result.ended,
            "input_ms": 1e3 * result.input_s,
            "output_ms": 1e3 * result.output_s,
            "gap_ms": 1e3 * result.gap_s,
            "hit": result.hit,
            "spread": result.spread,
            "copies": result.copies,
        }


def goodput(found: Rows, workload: str, system: str) -> float:
    """Reads the P90 goodput off the rows, in requests per second: between two rates the share in
    time is a straight line. The lowest rate where it is missed there, the highest where it is
    not; NaN without rows."""
    points = curve(found, workload, system, "in_time")
    if not points:
        return math.nan
    before = None
    for qps, share in points:
        if share < ATTAINED:
            if before is None:
                return qps
            part = (before[1] - ATTAINED) / (before[1] - share)
            return before[0] + part * (qps - before[0])
        before = qps, share
    return points[-1][0]


def gain(found: Rows, workload: str, system: str, other: str) -> float:
    """Divides the goodput of a system by another's."""
    return goodput(found, workload, system) / goodput(found, workload, other)


def curve(found: Rows, workload: str, system: str, column: str) -> Sequence[tuple[float, float]]:
    """Returns (qps, value) of a column, in the order of the rates."""
    chosen = matching(found, workload=workload, system=system)
    return sorted((float(row["qps"]), float(row[column])) for row in chosen)
