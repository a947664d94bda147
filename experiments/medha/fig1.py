"""Figure 1: the first token of short and long requests together, LoongServe and Medha on 16 A100,
under load."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.figures import Claim, Figure, Panel, Row, ratio
from experiments.medha.figure import MedhaSettings
from experiments.medha.systems import LOADS, SHARED, LoadCase, rows_of
from experiments.papers import main

SYSTEMS = {0: ("loongserve",), 5: ("medha", "loongserve")}  # by percent of long requests


def sweep(settings: MedhaSettings) -> Iterator[Row]:
    for percent, names in SYSTEMS.items():
        for qps in LOADS:
            for name in names:
                yield from rows_of(name, LoadCase(qps, percent), settings)


def _row(system: str, long_percent: int) -> Row:
    return dict(system=system, long_percent=long_percent, qps=0.75, percent=50)


FIGURE = Figure(
    "fig1",
    "TTFT with and without 5 % long requests, Llama-3 8B, 16 A100",
    "simulated",
    sweep,
    mechanisms=(SHARED,),
    seeded=True,
    claims=(
        Claim(
            "median TTFT, LoongServe / Medha, 0.75 q/s, 5 % long",
            30,
            lambda rows: ratio(rows, "ttft_s", _row("loongserve", 5), _row("medha", 5)),
            "5.2",
            better="higher",
            counted_in="figure 15",
        ),
        Claim(
            "median TTFT, LoongServe, 5 % long / none, 0.75 q/s",
            1,
            lambda rows: ratio(rows, "ttft_s", _row("loongserve", 5), _row("loongserve", 0)),
            "figure 1: 'sharp latency spikes'",
            better="higher",
            limit=True,
        ),
    ),
    panels=(
        Panel(
            "5 % long, median",
            "qps",
            "ttft_s",
            "system",
            (("long_percent", 5), ("percent", 50)),
            "y",
        ),
        Panel(
            "5 % long, P90", "qps", "ttft_s", "system", (("long_percent", 5), ("percent", 90)), "y"
        ),
        Panel(
            "0.75 q/s, 5 % long",
            "ttft_s",
            "percent",
            "system",
            (("long_percent", 5), ("qps", 0.75)),
            "x",
        ),
    ),
)

if __name__ == "__main__":
    main(FIGURE, "medha")
