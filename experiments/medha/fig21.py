"""Figure 21: active requests over the run, waiting ones included."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from experiments.figures import Claim, Figure, Panel, Row, Rows, matching
from experiments.medha.fig1 import LOONGSERVE
from experiments.medha.figure import MedhaSettings
from experiments.medha.systems import (
    OBJECTIVES_MS,
    OURS_MS,
    SHARED,
    SMALL,
    CaseRun,
    Run,
    paced,
    run,
    under,
)
from experiments.papers import main

QPS = 0.75
EVERY = 15.0  # seconds


def runs() -> Iterator[Run]:
    yield from (("medha", paced(QPS, ms=ms), SMALL) for ms in OBJECTIVES_MS)
    yield from ((name, paced(QPS), SMALL) for name in LOONGSERVE)


def sweep(settings: MedhaSettings) -> Iterator[Row]:
    """waiting, decoding: means over the run."""
    for name, case, system in runs():
        result = run(name, case, settings, system)
        waiting, decoding = result.active()
        for time, active in zip(*active_requests(result)):
            yield {
                "lengths": settings.lengths,
                "run_s": case.span(settings),
                "system": name,
                "objective_ms": round(result.tpot_objective * 1e3),
                "qps": QPS,
                "time_s": float(time),
                "active": int(active),
                "waiting": waiting,
                "decoding": decoding,
                "long_percent": 5,
                "shared_steps": result.counts.shared,
            }


def active_requests(result: CaseRun) -> tuple[np.ndarray, np.ndarray]:
    """Moments, and how many requests had arrived by then and not ended."""
    times = np.arange(EVERY, max(result.end, 2 * EVERY), EVERY)
    began = np.sort([record.arrival for record in result.records])
    ended = np.sort(
        [record.end if record.reason == "length" else np.inf for record in result.records]
    )
    return times, np.searchsorted(began, times) - np.searchsorted(ended, times)


def _percentile(rows: Rows, name: str, percent: float, ms: int = OURS_MS) -> float:
    found = [row["active"] for row in matching(rows, system=name, objective_ms=ms)]
    return float(np.percentile(found, percent)) if found else float("nan")


def _ratio(rows: Rows, name: str, percent: float, ms: int) -> float:
    medha = _percentile(rows, "medha", percent, ms)
    return _percentile(rows, name, percent) / medha if medha else float("nan")


def _held(rows: Rows) -> str:
    """How many wait and how many decode, on average: what a request's time consists of."""
    told = []
    for name, ms in (*(("medha", ms) for ms in OBJECTIVES_MS), *((n, OURS_MS) for n in LOONGSERVE)):
        found = matching(rows, system=name, objective_ms=ms)
        waiting, decoding = (np.mean([row[each] for row in found]) for each in STATES)
        told.append(f"{name}{under(ms)} {waiting:.1f} and {decoding:.1f}")
    return f"on average wait and decode: {'; '.join(told)}"


STATES = ("waiting", "decoding")
FIGURE = Figure(
    "fig21",
    "Active requests, Llama-3 8B, 16 A100, 5 % long",
    "simulated",
    sweep,
    mechanisms=(SHARED,),
    seeded=True,
    claims=tuple(
        Claim(
            f"{what} active requests, {label} / Medha{under(ms)}",
            1,
            lambda rows, name=name, percent=percent, ms=ms: _ratio(rows, name, percent, ms),
            "5.4: sawtooth against stable",
            better="higher",
            limit=True,
            remark="a request is active for its wait and its output times its time per token, "
            "which with Medha is the objective wherever a prompt waits",
            cause=_held,
        )
        for what, percent in (("most", 100), ("median of", 50))
        for ms in OBJECTIVES_MS
        for name, label in LOONGSERVE.items()
    ),
    panels=(
        Panel("0.75 q/s", "time_s", "active", "system", (("objective_ms", OURS_MS),), marker=""),
    ),
)

if __name__ == "__main__":
    main(FIGURE, "medha")
