"""Figure 1: the first token of short and long requests together, LoongServe and Medha on 16 A100,
under load."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.figures import Claim, Figure, Panel, Row, Rows, ratio, typical
from experiments.medha.figure import MedhaSettings
from experiments.medha.systems import (
    COSTED,
    LOADS,
    OBJECTIVES_MS,
    OURS_MS,
    SHARED,
    SMALL,
    Run,
    at,
    paced,
    sweep_of,
    under,
)
from experiments.papers import main

LOONGSERVE = {"loongserve": "LoongServe", COSTED: "LoongServe with its costs"}


def runs() -> Iterator[Run]:
    for ms in OBJECTIVES_MS:
        for name in ("medha", *LOONGSERVE):
            yield from ((name, paced(qps, 5, ms), SMALL) for qps in LOADS)
    for name in LOONGSERVE:
        yield from ((name, paced(qps, 0), SMALL) for qps in LOADS)


def sweep(settings: MedhaSettings) -> Iterator[Row]:
    yield from sweep_of(runs(), settings)


def _medians(rows: Rows) -> str:
    told = []
    for name in LOONGSERVE:
        found = (typical(rows, "ttft_s", **at(name, 0.75, long_percent=long)) for long in (0, 5))
        told.append("{} {:.3g} and {:.3g} s".format(name, *found))
    return f"medians without and with long ones: {', '.join(told)}"


FIGURE = Figure(
    "fig1",
    "TTFT with and without 5 % long requests, Llama-3 8B, 16 A100",
    "simulated",
    sweep,
    mechanisms=(SHARED,),
    seeded=True,
    claims=(
        *(
            Claim(
                f"median TTFT, {label} / Medha, 0.75 q/s, 5 % long{under(ms)}",
                30,
                lambda rows, name=name, ms=ms: ratio(
                    rows, "ttft_s", at(name, 0.75, ms=ms), at("medha", 0.75, ms=ms)
                ),
                "5.2",
                better="higher",
                counted_in="figure 15",
            )
            for ms in OBJECTIVES_MS
            for name, label in LOONGSERVE.items()
        ),
        *(
            Claim(
                f"median TTFT, {label}, 5 % long / none, 0.75 q/s",
                1,
                lambda rows, name=name: ratio(
                    rows, "ttft_s", at(name, 0.75), at(name, 0.75, long_percent=0)
                ),
                "figure 1: 'sharp latency spikes'",
                better="higher",
                limit=True,
                cause=_medians,
            )
            for name, label in LOONGSERVE.items()
        ),
    ),
    panels=(
        *(
            Panel(
                f"5 % long, {label}",
                "qps",
                "ttft_s",
                "system",
                (("long_percent", 5), ("percent", percent), ("objective_ms", OURS_MS)),
                "y",
            )
            for percent, label in ((50, "median"), (90, "P90"))
        ),
        Panel(
            "0.75 q/s, 5 % long",
            "ttft_s",
            "percent",
            "system",
            (("long_percent", 5), ("qps", 0.75), ("objective_ms", OURS_MS)),
            "x",
        ),
    ),
)

if __name__ == "__main__":
    main(FIGURE, "medha")
