"""Figure 23: what a pool reserved for short prompts costs LoongServe's long ones, within a
run."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.figures import Claim, Figure, Panel, Row, ratio
from experiments.medha.figure import MedhaSettings
from experiments.medha.systems import SHARED, LoadCase, rows_of, run
from experiments.papers import main

SYSTEMS = ("medha", "loongserve", "loongserve-reserved")
LOADS = (0.25, 0.75, 1.25)


def sweep(settings: MedhaSettings) -> Iterator[Row]:
    """completed: share of the long requests that arrived within the run."""
    for qps in LOADS:
        for name in SYSTEMS:
            case = LoadCase(qps)
            records = [
                record for record in run(name, case, settings).records if record.kind == "long"
            ]
            completed = sum(record.reason == "length" for record in records) / max(1, len(records))
            yield from (
                row | {"completed": completed} for row in rows_of(name, case, settings, kind="long")
            )


def _row(system: str, percent: int = 50) -> Row:
    return dict(system=system, qps=0.75, percent=percent)


FIGURE = Figure(
    "fig23",
    "Long requests with a pool reserved for short ones, Llama-3 8B, 16 A100",
    "simulated",
    sweep,
    mechanisms=(SHARED,),
    seeded=True,
    claims=(
        Claim(
            "completed long requests, LoongServe reserved / Medha, 0.75 q/s",
            0.8,
            lambda rows: ratio(rows, "completed", _row("loongserve-reserved"), _row("medha")),
            "5.4: up to 20 % lower",
            remark="six instances are too few for the long prompts of 0.75 q/s. Our LoongServe "
            "moves KV between pools at no cost",
        ),
        Claim(
            "completed long requests, LoongServe reserved / LoongServe, 0.75 q/s",
            0.9,
            lambda rows: ratio(rows, "completed", _row("loongserve-reserved"), _row("loongserve")),
            "5.4: 10 % lower",
        ),
        Claim(
            "median TPOT of long requests, LoongServe reserved / LoongServe, 0.75 q/s",
            1,
            lambda rows: ratio(rows, "tpot_s", _row("loongserve-reserved"), _row("loongserve")),
            "5.4: 'slightly lower'",
            better="lower",
            limit=True,
            remark="fewer long requests end within the run, so other requests are compared",
        ),
        Claim(
            "median TPOT of long requests, LoongServe / Medha, 0.75 q/s",
            1,
            lambda rows: ratio(rows, "tpot_s", _row("loongserve"), _row("medha")),
            "5.4: Medha 'lower'",
            better="higher",
            limit=True,
            remark="Medha's decodes share steps that are packed up to the objective of 100 ms; "
            "LoongServe's have a pool to themselves",
        ),
    ),
    panels=(
        Panel("completed", "qps", "completed", "system", (("percent", 50),)),
        Panel("decode latency at 0.75 q/s", "tpot_s", "percent", "system", (("qps", 0.75),)),
    ),
)

if __name__ == "__main__":
    main(FIGURE, "medha")
