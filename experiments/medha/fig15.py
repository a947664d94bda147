"""Figure 15: distributions of the time to the first token under load, without and with long
requests; and capacity."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.figures import Claim, Figure, Panel, Row, Rows, capacity, cell, ratio
from experiments.medha.figure import MedhaSettings
from experiments.medha.systems import LOADS, LoadCase, rows_of
from experiments.papers import main

SYSTEMS = {
    "medha": (*LOADS, 2.5, 3.5),
    "loongserve": (0.25, 0.5, 0.75, 1.25, 1.75),
    "fcfs": (0.25, 0.75, 1.75),
    "sarathi-512": (0.25, 0.75),
    "sarathi-2048": (0.75,),
}
# without long requests
SHORT = {"medha": (0.25, 1.75), "loongserve": (0.25, 1.75), "sarathi-512": (1.75,)}
ACCEPTABLE = 2.0  # seconds: the median TTFT up to which a load counts as served


def cases() -> Iterator[tuple[str, LoadCase]]:
    for percent, systems in ((0, SHORT), (5, SYSTEMS)):
        for name, loads in systems.items():
            yield from ((name, LoadCase(qps, percent)) for qps in loads)


def sweep(settings: MedhaSettings) -> Iterator[Row]:
    for name, case in cases():
        yield from rows_of(name, case, settings)


def row(system: str, qps: float, long_percent: int = 5, percent: int = 50) -> Row:
    return dict(system=system, qps=qps, long_percent=long_percent, percent=percent)


def _capacity_ratio(rows: Rows) -> float:
    found = {
        name: capacity(
            [(qps, cell(rows, "ttft_s", **row(name, qps))) for qps in SYSTEMS[name]], ACCEPTABLE
        )
        for name in ("medha", "loongserve", "fcfs", "sarathi-512")
    }
    return found.pop("medha") / max(found.values())


FIGURE = Figure(
    "fig15",
    "TTFT under load, Llama-3 8B, 16 A100",
    "simulated",
    sweep,
    claims=(
        Claim(
            "median TTFT, LoongServe / Medha, 0.75 q/s, 5 % long",
            30,
            lambda rows: ratio(rows, "ttft_s", row("loongserve", 0.75), row("medha", 0.75)),
            "5.2",
            better="higher",
            remark="the abstract prints 30 %, the body 30X: the body is meant",
        ),
        Claim(
            "median TTFT, Sarathi (512) / Medha, 0.75 q/s, 5 % long",
            1,
            lambda rows: ratio(rows, "ttft_s", row("sarathi-512", 0.75), row("medha", 0.75)),
            "5.2: 'quickly degrade'",
            better="higher",
            limit=True,
        ),
        Claim(
            "median TTFT, FCFS / Medha, 0.75 q/s, 5 % long",
            1,
            lambda rows: ratio(rows, "ttft_s", row("fcfs", 0.75), row("medha", 0.75)),
            "5.2: 'quickly degrade'",
            better="higher",
            limit=True,
        ),
        Claim(
            "capacity by median TTFT within 2 s, Medha / best baseline",
            5,
            _capacity_ratio,
            "5.2",
            better="higher",
            remark="the paper's measure: it calls 1.25 q/s acceptable for Medha and 0.25 for "
            "the others, and gives no limit; 2 s is our default objective. Interpolated between "
            "loads; Medha is within it at the highest, 3.5 q/s. It is a median, of which 19 in "
            "20 are short: long prompts alone keep up to about 1.25 q/s, and beyond that the "
            "policy serves the short ones",
        ),
        Claim(
            "median TTFT, LoongServe / Medha, 0.25 q/s, none long",
            1,
            lambda rows: ratio(rows, "ttft_s", row("loongserve", 0.25, 0), row("medha", 0.25, 0)),
            "5.2: 'comparable'",
            remark="a short prompt passes our two stages one after the other; LoongServe gives "
            "it all free instances and an ideal ring",
        ),
        Claim(
            "P90 TTFT of LoongServe, none long, 1.75 / 0.25 q/s",
            2,
            lambda rows: ratio(
                rows, "ttft_s", row("loongserve", 1.75, 0, 90), row("loongserve", 0.25, 0, 90)
            ),
            "5.2: 'increases dramatically', say 2x",
            better="higher",
            limit=True,
            remark="our LoongServe moves KV and scales at no cost, so short prompts alone never "
            "fill it",
        ),
        Claim(
            "median TTFT, Sarathi (512) / Medha, 1.75 q/s, none long",
            1,
            lambda rows: ratio(rows, "ttft_s", row("sarathi-512", 1.75, 0), row("medha", 1.75, 0)),
            "5.2: 'considerably better'",
            better="higher",
            limit=True,
            remark="our Sarathi has sequence pipelining, which the paper's has not: it is our "
            "scheduler with other settings",
        ),
    ),
    panels=(
        *(
            Panel(
                f"none long, {qps:g} q/s",
                "ttft_s",
                "percent",
                "system",
                (("long_percent", 0), ("qps", qps)),
                "x",
            )
            for qps in (0.25, 1.75)
        ),
        *(
            Panel(
                f"5 % long, {qps:g} q/s",
                "ttft_s",
                "percent",
                "system",
                (("long_percent", 5), ("qps", qps)),
                "x",
            )
            for qps in LOADS
        ),
    ),
)

if __name__ == "__main__":
    main(FIGURE, "medha")
