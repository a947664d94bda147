"""Figure 10: how evenly instances are accessed, in windows of ten seconds, near the rate that the
pool bears; by the length of a segment too.

An access is a token of KV that an instance reads in a step. The coefficient of variation over N
instances of n equal segments by hash is about sqrt((N - 1) / n): 15 % on four takes some 130
segments that are read at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from experiments.figures import Claim, Figure, Panel, Row, Rows, matching
from experiments.papers import main
from experiments.tokenlake.fig9 import SETS
from experiments.tokenlake.figure import TokenLakeSettings
from experiments.tokenlake.systems import (
    ADAPTIVE,
    HASHED,
    P1D3,
    P3D1,
    ROUTER,
    SEGMENT,
    STRIPED,
    SYSTEMS,
    WINDOW,
    Result,
    check_pooled,
    hashed,
    simulated,
)

# requests per second, some nine tenths of what the hashed pool bears
RATES = {"loogle": 2.8, "scbench": 0.3, "sharegpt-o3": 10.0}
SEGMENTS = (128, 512, 1024, 2048, 4096, 8192)
DOCUMENTS = ("loogle", "scbench")
BY_SEGMENT = f"{HASHED}, by segment"
PAPER = {HASHED: 0.11, ROUTER: 0.99, P1D3: 0.62, P3D1: 1.22}  # 7.2, mean
REMARKS = {
    ROUTER: "the fewer and the longer the prompts, the more: see SCBench",
    P1D3: "58 % if decodes alone read, evenly, whatever the workload",
    P3D1: "173 % if decodes alone read",
}


def sweep(settings: TokenLakeSettings) -> Iterator[Row]:
    for workload, qps in RATES.items():
        for name, spec in SYSTEMS.items():
            yield from _windows(name, workload, SEGMENT, simulated(spec, workload, qps, settings))
    pools = []
    for workload in DOCUMENTS:
        for segment in SEGMENTS:
            result = simulated(hashed(segment), workload, RATES[workload], settings)
            pools.append(result)
            yield from _windows(BY_SEGMENT, workload, segment, result)
    check_pooled(pools, settings, copies=True)


def _windows(system: str, workload: str, segment: int, result: Result) -> Iterator[Row]:
    for place, value in enumerate(result.variation.tolist()):
        yield {
            "workload": workload,
            "system": system,
            "segment": segment,
            "second": place * WINDOW,
            "cv": value,
            "in_time": result.in_time,
            "input_ms": 1e3 * result.input_s,
            "output_ms": 1e3 * result.output_s,
            "copies": result.copies,
        }


def _values(rows: Rows, workload: str, system: str, segment: int = SEGMENT) -> list[float]:
    found = matching(rows, workload=workload, system=system, segment=float(segment))
    return [float(row["cv"]) for row in found]


def mean(rows: Rows, workload: str, system: str, segment: int = SEGMENT) -> float:
    """Returns the mean coefficient of variation of a run; NaN without one."""
    values = _values(rows, workload, system, segment)
    return float(np.mean(values)) if values else float("nan")


def _claims() -> Iterator[Claim]:
    for system, value in PAPER.items():
        for workload in RATES:
            yield Claim(
                f"mean CV, {SETS[workload]}, {system}",
                value,
                lambda rows, workload=workload, system=system: mean(rows, workload, system),
                "7.2, of a workload that is not named",
                "%",
                "lower" if system == HASHED else "equal",
                remark=REMARKS.get(system, ""),
            )
    for workload in RATES:
        yield Claim(
            f"mean CV, {SETS[workload]}, {STRIPED}",
            0.11,
            lambda rows, workload=workload: mean(rows, workload, STRIPED),
            "7.2",
            "%",
            "lower",
            remark="not in the paper: dealt out evenly, no hash",
        )
    for workload in DOCUMENTS:
        yield Claim(
            f"95th percentile of CV, {SETS[workload]}, {HASHED}",
            0.15,
            lambda rows, workload=workload: float(
                np.percentile(_values(rows, workload, HASHED) or [np.nan], 95)
            ),
            "7.2: steadily below 15 %",
            "%",
            "lower",
            limit=True,
        )
        for other in (ROUTER, ADAPTIVE):
            yield Claim(
                f"mean CV, {SETS[workload]}, {other} / {HASHED}",
                9.0,
                lambda rows, workload=workload, other=other: (
                    mean(rows, workload, other) / mean(rows, workload, HASHED)
                ),
                "7.2",
                better="higher",
                remark="on LooGLE four instances share many documents, and routing by load evens "
                "them out",
            )
        for segment in SEGMENTS:
            yield Claim(
                f"mean CV, {SETS[workload]}, segments of {segment}",
                0.15,
                lambda rows, workload=workload, segment=segment: mean(
                    rows, workload, BY_SEGMENT, segment
                ),
                "7.2: steadily below 15 %",
                "%",
                "lower",
                limit=True,
                remark="about sqrt((N - 1) / n) with n segments read at once",
            )


FIGURE = Figure(
    "fig10",
    "Balance of accesses, Llama-2-7B, 8 A100",
    "simulated",
    sweep,
    claims=tuple(_claims()),
    panels=tuple(
        Panel(title, "second", "cv", "system", (("workload", workload), ("segment", SEGMENT)))
        for workload, title in SETS.items()
    )
    + tuple(
        Panel(
            f"{SETS[workload]}, by segment",
            "second",
            "cv",
            "segment",
            (("workload", workload), ("system", BY_SEGMENT)),
        )
        for workload in DOCUMENTS
    ),
)

if __name__ == "__main__":
    main(FIGURE, "tokenlake")
