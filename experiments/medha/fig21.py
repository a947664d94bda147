"""Figure 21: active requests over the run, waiting ones included."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from experiments.figures import Claim, Figure, Panel, Row, Rows, matching
from experiments.medha.figure import MedhaSettings
from experiments.medha.systems import SHARED, CaseRun, LoadCase, run
from experiments.papers import main

QPS = 0.75
EVERY = 15.0  # seconds


def sweep(settings: MedhaSettings) -> Iterator[Row]:
    for name in ("medha", "loongserve"):
        result = run(name, LoadCase(QPS), settings)
        for time, active in zip(*active_requests(result)):
            yield {
                "lengths": settings.lengths,
                "system": name,
                "qps": QPS,
                "time_s": float(time),
                "active": int(active),
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


def _ratio(rows: Rows, percent: float) -> float:
    loongserve, medha = (
        np.percentile([row["active"] for row in matching(rows, system=name)], percent)
        for name in ("loongserve", "medha")
    )
    return float(loongserve / medha) if medha else float("nan")


FIGURE = Figure(
    "fig21",
    "Active requests, Llama-3 8B, 16 A100, 5 % long",
    "simulated",
    sweep,
    mechanisms=(SHARED,),
    seeded=True,
    claims=(
        Claim(
            "most active requests, LoongServe / Medha",
            1,
            lambda rows: _ratio(rows, 100),
            "5.4: sawtooth against stable",
            better="higher",
            limit=True,
        ),
        Claim(
            "median of active requests, LoongServe / Medha",
            1,
            lambda rows: _ratio(rows, 50),
            "5.4: sawtooth against stable",
            better="higher",
            limit=True,
        ),
    ),
    panels=(Panel("0.75 q/s", "time_s", "active", "system", marker=""),),
)

if __name__ == "__main__":
    main(FIGURE, "medha")
