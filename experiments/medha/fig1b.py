"""Figure 1a of Medha's later version (arXiv 2409.17264v5): medians and tails without long requests,
with 1 % and with 5 % of them, and throughput.

It compares with LoongServe, at 0.75 queries per second on 16 A100. Its abstract gives 174x for the
99th percentile, its figure 1a and section 6.4 for P90: both are here, of all requests and of short
ones, of which the introduction speaks. Its 5.7x of throughput has no figure: the text of its 6.2 is
that of the first version, with 5x the capacity.
"""

from __future__ import annotations

from collections.abc import Iterator

from experiments.figures import Claim, Figure, Panel, Row, Rows, cell, ratio, typical
from experiments.medha import fig15
from experiments.medha.fig1 import LOONGSERVE
from experiments.medha.figure import MedhaSettings
from experiments.medha.systems import (
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
from jaxserve.lab.quotients import quotient

QPS = 0.75
OF = {"ttft_s": "", "short_ttft_s": " of short requests"}
TAILS = {90: "v5 6.4 and figure 1a", 99: "v5 abstract"}


def runs() -> Iterator[Run]:
    for name in ("medha", *LOONGSERVE):
        yield from ((name, paced(QPS, percent), SMALL) for percent in (0, 1))
        for ms in OBJECTIVES_MS:
            yield from ((name, paced(qps, 5, ms), SMALL) for qps in LOADS)


def sweep(settings: MedhaSettings) -> Iterator[Row]:
    yield from sweep_of(runs(), settings)


def _ratio(rows: Rows, column: str, name: str, percent: int, long: int, ms: int) -> float:
    place = lambda system: at(system, QPS, percent, long, ms)
    return ratio(rows, column, place(name), place("medha"))


def _goodput(rows: Rows, name: str, ms: int) -> float:
    """Most requests per second in both objectives, at any of the loads."""
    return max(qps * cell(rows, "met_all", **at(name, qps, ms=ms)) for qps in LOADS)


def _tail(rows: Rows) -> str:
    told = []
    for column, of in OF.items():
        for name in ("medha", *LOONGSERVE):
            found = (typical(rows, column, **at(name, QPS, percent)) for percent in (50, 90, 99))
            told.append("{}{} {:.3g}, {:.3g}, {:.3g}".format(name, of, *found))
    return (
        f"P50, P90 and P99 in s: {'; '.join(told)}; 5 % of all are long, so that P99 of all is of "
        "long prompts, which ask for nearly all of the devices' time"
    )


def _of_few(rows: Rows) -> str:
    told = []
    for name in ("medha", *LOONGSERVE):
        found = (typical(rows, "ttft_s", **at(name, QPS, percent, 1)) for percent in (50, 90))
        told.append("{} {:.3g} and {:.3g}".format(name, *found))
    share = typical(rows, "offered_long", **at("medha", QPS, 50, 1))
    return (
        f"P50 and P90 in s: {'; '.join(told)}; long prompts take {share:.2f} of the devices' time, "
        "so that most others meet none"
    )


def _in_both(rows: Rows) -> str:
    told = []
    for name in ("medha", *LOONGSERVE):
        found = (typical(rows, "met_all", **at(name, qps)) for qps in LOADS)
        told.append(f"{name} {', '.join(f'{share:.2f}' for share in found)}")
    return f"shares in both objectives at the four loads: {'; '.join(told)}"


FIGURE = Figure(
    "fig1b",
    "TTFT by share of long requests, later version, Llama-3 8B, 16 A100",
    "simulated",
    sweep,
    mechanisms=(SHARED,),
    seeded=True,
    claims=(
        *(
            Claim(
                f"P{percent} TTFT{of}, {label} / Medha, 5 % long{under(ms)}",
                174,
                lambda rows, column=column, name=name, percent=percent, ms=ms: _ratio(
                    rows, column, name, percent, 5, ms
                ),
                f"{where}: 174x over LoongServe",
                better="higher",
                cause=_tail,
            )
            for ms in OBJECTIVES_MS
            for name, label in LOONGSERVE.items()
            for percent, where in TAILS.items()
            for column, of in OF.items()
        ),
        *(
            Claim(
                f"P{percent} TTFT, {label} / Medha, 1 % long",
                times,
                lambda rows, name=name, percent=percent: _ratio(
                    rows, "ttft_s", name, percent, 1, OURS_MS
                ),
                "v5 figure 1a: 2x and 8x over LoongServe, which we read as P50 and P90",
                better="higher",
                cause=_of_few,
            )
            for name, label in LOONGSERVE.items()
            for percent, times in ((50, 2.0), (90, 8.0))
        ),
        Claim(
            "P90 TTFT of Medha, 5 % long",
            10,
            lambda rows: cell(rows, "ttft_s", **at("medha", QPS, 90)),
            "v5 6.4: 'under 10 seconds'",
            "s",
            better="lower",
            limit=True,
            cause=_tail,
        ),
        *(
            Claim(
                f"throughput: requests per second in both objectives, Medha / {label}{under(ms)}",
                5.7,
                lambda rows, name=name, ms=ms: quotient(
                    _goodput(rows, "medha", ms), _goodput(rows, name, ms)
                ),
                "v5 abstract: 5.7x over non-preemptive systems",
                better="higher",
                remark="most at any of the four loads; the paper does not say what it counts",
                cause=_in_both,
            )
            for ms in OBJECTIVES_MS
            for name, label in LOONGSERVE.items()
        ),
        *(
            Claim(
                f"throughput as capacity by median TTFT, Medha / {label}{under(ms)}",
                5.7,
                lambda rows, name=name, ms=ms: (
                    fig15.by_median(rows, "medha", ms) / fig15.by_median(rows, name, ms)
                ),
                "v5 abstract: 5.7x over non-preemptive systems",
                better="higher",
                remark="as figure 15 reads it: the greatest of the four loads with a median of at "
                "most 2 s",
                cause=fig15.medians,
            )
            for ms in OBJECTIVES_MS
            for name, label in LOONGSERVE.items()
        ),
    ),
    panels=tuple(
        Panel(
            f"P{percent}, 0.75 q/s",
            "long_percent",
            "ttft_s",
            "system",
            (("qps", QPS), ("percent", percent), ("objective_ms", OURS_MS)),
            "y",
        )
        for percent in (50, 90, 99)
    ),
)

if __name__ == "__main__":
    main(FIGURE, "medha")
