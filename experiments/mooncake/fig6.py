"""Figures 6 and 7: the load of prefill and of decode nodes over time at overload, with early
rejection by the load of now and by the predicted one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from experiments.figures import Claim, Figure, Panel, Row, Rows, matching
from experiments.mooncake.figure import MooncakeSettings
from experiments.mooncake.overload import SHORT, WORKLOAD, overloaded
from experiments.papers import main

POLICIES = ("early", "predicted")


def sweep(settings: MooncakeSettings) -> Iterator[Row]:
    for policy in POLICIES:
        for sample in overloaded(SHORT, policy, settings).samples:
            yield {
                "lengths": settings.source(WORKLOAD),
                "policy": policy,
                "second": sample.at,
                "prefill_load": sample.prefill,
                "decode_load": sample.decode,
            }


def _loads(rows: Rows, policy: str, column: str) -> np.ndarray:
    return np.array([float(row[column]) for row in matching(rows, policy=policy)])


def _together(rows: Rows, policy: str) -> float:
    """Measures how the loads of the two pools go together: 1 plus their correlation, which is below
    1 where one falls as the other rises."""
    loads = [_loads(rows, policy, column) for column in ("prefill_load", "decode_load")]
    if min(load.std() for load in loads) == 0:
        return 1.0
    return 1 + float(np.corrcoef(*loads)[0, 1])


def _fluctuation(rows: Rows) -> float:
    """Standard deviation of the decode load, predicted over early."""
    early, predicted = (_loads(rows, policy, "decode_load").std() for policy in POLICIES)
    return float(predicted / early) if early else 1.0


FIGURE = Figure(
    "fig6",
    "Load at overload, tool and agent",
    "simulated",
    sweep,
    claims=(
        Claim(
            "early: 1 + correlation of prefill and decode load",
            1.0,
            lambda rows: _together(rows, "early"),
            "4.3.3: 'anti-phase'",
            better="lower",
            limit=True,
            remark="the paper's is a cluster of 20 machines in service; in a replay of minutes "
            "both loads rise from nothing, and bursts of arrivals raise both",
        ),
        Claim(
            "fluctuation of the decode load, predicted / early",
            1.0,
            _fluctuation,
            "Fig. 7b: smaller",
            better="lower",
            limit=True,
        ),
    ),
    panels=tuple(
        Panel(column, "second", column, "policy", marker="")
        for column in ("prefill_load", "decode_load")
    ),
)

if __name__ == "__main__":
    main(FIGURE, "mooncake")
