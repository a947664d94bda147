"""Figure 15 with LoongServe as its paper and its public code say that it is, and how much of what
comes out rests on each assumption: half and twice the costs, other rings, other rules.

LoongServe here has what `simulate.loongserve.PUBLISHED` says. Medha's row is that of figure 15.
"""

from __future__ import annotations

from collections.abc import Iterator

from experiments.figures import Claim, Figure, Panel, Row, Rows, cell, ratio, typical
from experiments.medha.figure import MedhaSettings
from experiments.medha.systems import (
    COSTED,
    ELASTIC,
    OURS_MS,
    SHARED,
    SMALL,
    Run,
    at,
    paced,
    sweep_of,
)
from experiments.papers import main

QPS = 0.75
ASSUMED = {
    "loongserve": "LoongServe, elasticity free",
    COSTED: "LoongServe with its costs",
    f"{COSTED} x0.5": "LoongServe with half its costs",
    f"{COSTED} x2": "LoongServe with twice its costs",
    f"{COSTED}, ring as in Tetris": "LoongServe, 24 ms for each further instance",
    f"{COSTED}, any time": "LoongServe with its costs, prefills begin at any time",
    f"{COSTED}, CP-4": "LoongServe with its costs, at most 4 instances a prefill",
}
assert set(ELASTIC) < set(ASSUMED)


def runs() -> Iterator[Run]:
    for name in ("medha", *ASSUMED):
        yield from ((name, paced(qps), SMALL) for qps in (0.25, QPS))
        yield name, paced(1.75, 0), SMALL


def sweep(settings: MedhaSettings) -> Iterator[Row]:
    yield from sweep_of(runs(), settings)


def _named(name: str) -> str:
    """A variant by what it assumes."""
    return name.removeprefix(COSTED).strip(", ") or "its costs"


def _tails(rows: Rows) -> str:
    told = []
    for name in ("medha", *ASSUMED):
        seconds = typical(rows, "ttft_s", **at(name, QPS, 90))
        told.append(f"{_named(name)} {seconds:.3g}")
    return f"P90 of all requests in s: {'; '.join(told)}"


def _medians(rows: Rows) -> str:
    told = []
    for name in ASSUMED:
        seconds = typical(rows, "short_ttft_s", **at(name, QPS))
        milliseconds = 1e3 * typical(rows, "tpot_s", **at(name, 1.75, long_percent=0))
        told.append(f"{_named(name)} {seconds:.3g} s, {milliseconds:.1f} ms")
    return f"median TTFT of short requests, and TPOT at 1.75 q/s without long: {'; '.join(told)}"


FIGURE = Figure(
    "fig15b",
    "What rests on LoongServe's costs, Llama-3 8B, 16 A100",
    "simulated",
    sweep,
    mechanisms=(SHARED,),
    seeded=True,
    claims=(
        *(
            Claim(
                f"median TTFT of short requests, {label} / Medha, 0.75 q/s, 5 % long",
                30,
                lambda rows, name=name: ratio(
                    rows, "short_ttft_s", at(name, QPS), at("medha", QPS)
                ),
                "5.2",
                better="higher",
                counted_in="figure 15" if name in ("loongserve", COSTED) else "",
                cause=_medians,
            )
            for name, label in ASSUMED.items()
        ),
        *(
            Claim(
                f"P90 TTFT, {label} / Medha, 0.75 q/s, 5 % long",
                174,
                lambda rows, name=name: ratio(
                    rows, "ttft_s", at(name, QPS, 90), at("medha", QPS, 90)
                ),
                "v5 6.4",
                better="higher",
                counted_in="figure 1b" if name in ("loongserve", COSTED) else "",
                cause=_tails,
            )
            for name, label in ASSUMED.items()
        ),
        *(
            Claim(
                f"median TPOT, {label} / Medha, 1.75 q/s, none long",
                5,
                lambda rows, name=name: ratio(
                    rows,
                    "tpot_s",
                    at(name, 1.75, long_percent=0),
                    at("medha", 1.75, long_percent=0),
                ),
                "5.2",
                better="higher",
                counted_in="figure 16" if name in ("loongserve", COSTED) else "",
                cause=_medians,
            )
            for name, label in ASSUMED.items()
        ),
        Claim(
            "median TPOT of LoongServe with its costs, 0.75 q/s, 5 % long",
            0.025,
            lambda rows: cell(rows, "tpot_s", **at(COSTED, QPS)),
            "LoongServe's public code: --avg_decoding_time on 16 GPUs, of LWM-7B",
            "s",
            remark="theirs is of a model with four times the KV a token, and no million of tokens",
        ),
    ),
    panels=(
        Panel(
            "0.75 q/s, 5 % long",
            "ttft_s",
            "percent",
            "system",
            (("long_percent", 5), ("qps", QPS), ("objective_ms", OURS_MS)),
            "x",
        ),
        Panel(
            "1.75 q/s, none long",
            "tpot_s",
            "percent",
            "system",
            (("long_percent", 0), ("objective_ms", OURS_MS)),
            "x",
        ),
    ),
)

if __name__ == "__main__":
    main(FIGURE, "medha")
