"""Figure 23: what a pool reserved for short prompts costs LoongServe's long ones, within a
run."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.figures import Claim, Figure, Panel, Row, Rows, ratio, typical
from experiments.medha.fig1 import LOONGSERVE
from experiments.medha.figure import MedhaSettings
from experiments.medha.systems import (
    OBJECTIVES_MS,
    OURS_MS,
    SHARED,
    SMALL,
    Run,
    at,
    paced,
    rows_of,
    run,
    under,
)
from experiments.papers import main

RESERVED = {name: f"{name}-reserved" for name in LOONGSERVE}
SYSTEMS = ("medha", *LOONGSERVE, *RESERVED.values())
LOADS = (0.25, 0.75, 1.25)
QPS = 0.75


def runs() -> Iterator[Run]:
    for ms in OBJECTIVES_MS:
        for name in SYSTEMS if ms == OURS_MS else ("medha",):
            yield from ((name, paced(qps, ms=ms), SMALL) for qps in LOADS)


def sweep(settings: MedhaSettings) -> Iterator[Row]:
    """completed: share of the long requests that arrived within the run."""
    for name, case, system in runs():
        records = [
            record for record in run(name, case, settings, system).records if record.kind == "long"
        ]
        completed = sum(record.reason == "length" for record in records) / max(1, len(records))
        yield from (
            row | {"completed": completed} for row in rows_of(name, case, settings, kind="long")
        )


def _place(name: str, ms: int = OURS_MS) -> Row:
    """Only Medha is run with several objectives: the others do not look at them."""
    return at(name, QPS, ms=ms if name == "medha" else OURS_MS)


def _ended(rows: Rows) -> str:
    told = []
    for name in SYSTEMS:
        completed, tpot, busy = (
            typical(rows, column, **_place(name)) for column in ("completed", "tpot_s", "busy")
        )
        told.append(f"{name} {completed:.2f}, {1e3 * tpot:.1f} ms, {busy:.2f}")
    return f"completed, median TPOT and share of the time that devices work: {'; '.join(told)}"


FIGURE = Figure(
    "fig23",
    "Long requests with a pool reserved for short ones, Llama-3 8B, 16 A100",
    "simulated",
    sweep,
    mechanisms=(SHARED,),
    seeded=True,
    claims=(
        *(
            Claim(
                f"completed long requests, {label}, reserved / Medha, 0.75 q/s{under(ms)}",
                0.8,
                lambda rows, name=name, ms=ms: ratio(
                    rows, "completed", _place(RESERVED[name]), _place("medha", ms)
                ),
                "5.4: up to 20 % lower",
                remark="six instances are too few for the long prompts of 0.75 q/s",
                cause=_ended,
            )
            for ms in OBJECTIVES_MS
            for name, label in LOONGSERVE.items()
        ),
        *(
            Claim(
                f"completed long requests, {label}, reserved / not reserved, 0.75 q/s",
                0.9,
                lambda rows, name=name: ratio(
                    rows, "completed", _place(RESERVED[name]), _place(name)
                ),
                "5.4: 10 % lower",
                cause=_ended,
            )
            for name, label in LOONGSERVE.items()
        ),
        *(
            Claim(
                f"median TPOT of long requests, {label}, reserved / not reserved, 0.75 q/s",
                1,
                lambda rows, name=name: ratio(rows, "tpot_s", _place(RESERVED[name]), _place(name)),
                "5.4: 'slightly lower'",
                better="lower",
                limit=True,
                remark="fewer long requests end within the run, so other requests are compared",
                cause=_ended,
            )
            for name, label in LOONGSERVE.items()
        ),
        *(
            Claim(
                f"median TPOT of long requests, {label} / Medha, 0.75 q/s{under(ms)}",
                1,
                lambda rows, name=name, ms=ms: ratio(
                    rows, "tpot_s", _place(name), _place("medha", ms)
                ),
                "5.4: Medha 'lower'",
                better="higher",
                limit=True,
                remark="Medha's decodes share steps that are packed up to the objective; "
                "LoongServe's have a pool to themselves",
                cause=_ended,
            )
            for ms in OBJECTIVES_MS
            for name, label in LOONGSERVE.items()
        ),
    ),
    panels=(
        Panel(
            "completed",
            "qps",
            "completed",
            "system",
            (("percent", 50), ("objective_ms", OURS_MS)),
        ),
        Panel(
            "decode latency at 0.75 q/s",
            "tpot_s",
            "percent",
            "system",
            (("qps", QPS), ("objective_ms", OURS_MS)),
        ),
    ),
)

if __name__ == "__main__":
    main(FIGURE, "medha")
