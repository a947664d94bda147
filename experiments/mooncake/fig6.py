"""Figures 6 and 7: the load of prefill and of decode nodes over time at overload, with early
rejection by the load of now and by the predicted one.

The paper's loads swing because what was accepted is decoded, however late it comes (4.3.3). Our
admission checks a request again before its decode: that holds the load of decode nodes at the
objective. So both are run, and the swing must come and go with that check. Few nodes prefill here,
so that a prompt waits for seconds between its acceptance and its decode.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from experiments.figures import Claim, Figure, Mechanism, Panel, Row, Rows, cell, fewest, matching
from experiments.mooncake.clusters import REFUSED, TTFT, disaggregated, simulated
from experiments.mooncake.figure import MooncakeSettings
from experiments.papers import main

WORKLOAD = "conversation"
PREFILL, DECODE = 4, 1  # nodes
TBT = 0.03  # seconds, the objective
SPEED = 3.0  # of the replay
REQUESTS = 1200
COMPLETION = 10.0  # seconds for which a request decodes here: the mean of those that were served
EARLY, PREDICTED = "early, once", "predicted, once"
CHECKED = {EARLY: "early", PREDICTED: "predicted"}  # again before decode
POLICIES = (EARLY, PREDICTED, *CHECKED.values())
TOTAL = "all"  # the second of the row that sums up a run


def sweep(settings: MooncakeSettings) -> Iterator[Row]:
    for policy in POLICIES:
        yield from loads(policy, settings)


def loads(policy: str, settings: MooncakeSettings) -> Iterator[Row]:
    """The loads under a policy of admission, from when the first prompts have been waited for to
    the last arrival; before, both rise from nothing. The last row counts what was refused."""
    spec = disaggregated(
        PREFILL, DECODE, admission=policy, tbt=TBT, completion=COMPLETION, sample_every=1.0
    )
    report = simulated(spec, WORKLOAD, settings, SPEED, REQUESTS)
    row: Row = {"lengths": settings.source(WORKLOAD), "policy": policy}
    last = report.records[-1].arrival
    none: Row = {"prefill_load": "", "decode_load": "", "refused": "", "refused_late": ""}
    for sample in report.samples:
        if TTFT <= sample.at <= last:
            load = {"prefill_load": sample.prefill, "decode_load": sample.decode}
            yield row | {"second": sample.at} | none | load
    yield row | {"second": TOTAL} | none | report.refused


def _loads(rows: Rows, policy: str, column: str) -> np.ndarray:
    found = matching(rows, policy=policy)
    return np.array([float(row[column]) for row in found if row["second"] != TOTAL])


def _together(rows: Rows, policy: str) -> float:
    """Measures how the loads of the two pools go together: 1 plus their correlation, which is below
    1 where one falls as the other rises. NaN where nothing was refused: no policy was at work."""
    both = [_loads(rows, policy, column) for column in ("prefill_load", "decode_load")]
    refused = cell(rows, "refused", policy=policy, second=TOTAL)
    if not refused or min(len(load) for load in both) < 2 or min(load.std() for load in both) == 0:
        return float("nan")
    return 1 + float(np.corrcoef(*both)[0, 1])


def _fluctuation(rows: Rows, policy: str, beside: str) -> float:
    """Quotient of the standard deviations of the decode load."""
    ours, other = (_loads(rows, name, "decode_load") for name in (policy, beside))
    return float(ours.std() / other.std()) if len(ours) and len(other) else float("nan")


FIGURE = Figure(
    "fig6",
    "Load at overload, conversation, 4P1D",
    "simulated",
    sweep,
    mechanisms=(
        Mechanism(REFUSED, fewest("refused", second=TOTAL)),
        Mechanism(
            "requests that were refused before their decode",
            lambda rows: max(
                fewest("refused_late", second=TOTAL, policy=policy)(rows)
                for policy in CHECKED.values()
            ),
        ),
    ),
    claims=(
        Claim(
            "early: 1 + correlation of prefill and decode load",
            1.0,
            lambda rows: _together(rows, EARLY),
            "4.3.3: 'anti-phase'",
            better="lower",
            limit=True,
        ),
        Claim(
            "fluctuation of the decode load, predicted / early",
            1.0,
            lambda rows: _fluctuation(rows, PREDICTED, EARLY),
            "Fig. 7b: smaller",
            better="lower",
            limit=True,
        ),
        Claim(
            "fluctuation of the decode load, early, checked again before decode / early",
            1.0,
            lambda rows: _fluctuation(rows, CHECKED[EARLY], EARLY),
            "4.3.3: by what is accepted and comes late",
            better="lower",
            limit=True,
        ),
        Claim(
            "fluctuation of the decode load, predicted / early, both checked again",
            1.0,
            lambda rows: _fluctuation(rows, CHECKED[PREDICTED], CHECKED[EARLY]),
            "Fig. 7b, had it our second check",
            better="lower",
            limit=True,
            remark="the second check holds the load of early rejection at the objective, at the "
            "price of prefills that are thrown away: there is no swing left to mend",
        ),
    ),
    panels=tuple(
        Panel(column, "second", column, "policy", marker="")
        for column in ("prefill_load", "decode_load")
    ),
)

if __name__ == "__main__":
    main(FIGURE, "mooncake")
