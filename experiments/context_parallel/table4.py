"""Table 4: TTFT of pass-KV and pass-Q by how much of 128000 tokens is new, 4 hosts. Predicted:
nothing of it is fitted.

Twice: with as much of a hop hidden behind attention as table 8 tells of decode, and with all of it,
as appendix C assumes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from experiments.context_parallel.paper import TABLE4
from experiments.context_parallel.system import MILLI, RANKS, RINGS, PaperHost, calibrated
from experiments.figures import Claim, Figure, Panel, Row, Rows, matching, ratio
from experiments.papers import main

FITTED = "as in decode"
ALL = "all"


def systems() -> dict[str, PaperHost]:
    """By how much of a hop is hidden."""
    return {FITTED: calibrated(), ALL: calibrated(hidden=1.0)}


def sweep(settings: None) -> Iterator[Row]:
    for hidden, system in systems().items():
        for row in TABLE4:
            predicted = system.ttft(row.cached, row.new, RANKS)
            for strategy in ("gather", *RINGS):
                seconds = predicted[strategy]
                paper = getattr(row, strategy) * MILLI if strategy in RINGS else ""
                yield {
                    "hidden": hidden,
                    "cached": row.cached,
                    "new": row.new,
                    "miss": row.new / (row.cached + row.new),
                    "strategy": strategy,
                    "ttft_s": seconds,
                    "paper_s": paper,
                    "error": seconds / paper - 1 if isinstance(paper, float) else "",
                }


def error(rows: Rows, *strategies: str, hidden: str = FITTED) -> float:
    """Mean of the relative errors, whatever their sign."""
    return float(
        np.mean(
            [
                abs(float(row["error"]))
                for name in strategies
                for row in matching(rows, strategy=name, hidden=hidden)
            ]
        )
    )


def margin(rows: Rows, new: int, hidden: str) -> float:
    """TTFT of pass-Q over that of pass-KV: above 1 where pass-KV is chosen."""
    return ratio(
        rows,
        "ttft_s",
        dict(new=new, hidden=hidden, strategy="pass_q"),
        dict(new=new, hidden=hidden, strategy="pass_kv"),
    )


def right(rows: Rows, hidden: str) -> float:
    """Rows of the table in which the faster ring is the paper's."""
    return sum((margin(rows, row.new, hidden) > 1) == (row.pass_q > row.pass_kv) for row in TABLE4)


def crossover(rows: Rows, hidden: str) -> float:
    """Share of new tokens at which both rings take equally long, between two rows of the table."""
    points = [(row.new / (row.cached + row.new), margin(rows, row.new, hidden)) for row in TABLE4]
    for (low, before), (high, after) in zip(points, points[1:]):
        if before <= 1 < after:
            return low + (high - low) * (1 - before) / (after - before)
    return float("nan")


TIE = (
    "with all hidden pass-KV wins at 3.25 and 5 %, where the paper has pass-Q ahead by 1.4 and "
    "0.3 %, less than the 5 % by which its own figures for 128K on 4 hosts differ"
)

FIGURE = Figure(
    "table4",
    "TTFT by share of new tokens, 128000 tokens, 4 hosts",
    "computed",
    sweep,
    claims=(
        Claim(
            "mean error, pass-KV, 14 rows",
            0.1,
            lambda rows: error(rows, "pass_kv"),
            "goal: within 10 %",
            "%",
            "lower",
            limit=True,
            remark="up to 4160 new tokens 13 to 25 % too fast: a prefill after a cache seems to "
            "cost what a full one, to which linear parts and issue are fitted, does not",
        ),
        Claim(
            "mean error, pass-Q, 14 rows",
            0.1,
            lambda rows: error(rows, "pass_q"),
            "goal: within 10 %",
            "%",
            "lower",
            limit=True,
            remark="as above, and 8 % too slow from 40000 on: hops of many queries are better "
            "hidden than those of decode",
        ),
        Claim(
            "mean error, both",
            0.1,
            lambda rows: error(rows, *RINGS),
            "goal: within 10 %",
            "%",
            "lower",
            limit=True,
        ),
        Claim(
            "mean error, pass-KV, all of a hop hidden",
            0.1,
            lambda rows: error(rows, "pass_kv", hidden=ALL),
            "goal: within 10 %",
            "%",
            "lower",
            limit=True,
        ),
        Claim(
            "mean error, pass-Q, all of a hop hidden",
            0.1,
            lambda rows: error(rows, "pass_q", hidden=ALL),
            "goal: within 10 %",
            "%",
            "lower",
            limit=True,
        ),
        Claim(
            "rows whose faster ring is right",
            14,
            lambda rows: right(rows, FITTED),
            "table 4",
            "rows",
            "higher",
        ),
        Claim(
            "rows whose faster ring is right, all of a hop hidden",
            14,
            lambda rows: right(rows, ALL),
            "table 4",
            "rows",
            "higher",
            remark=TIE,
        ),
        Claim(
            "pass-Q / pass-KV at 3.25 % new",
            1280.1 / 1298.92,
            lambda rows: margin(rows, 4160, FITTED),
            "table 4",
        ),
        Claim(
            "pass-Q / pass-KV at 10 % new",
            2205.27 / 2080.67,
            lambda rows: margin(rows, 12800, FITTED),
            "table 4",
        ),
        Claim(
            "pass-Q / pass-KV, all new",
            12360.57 / 11462.15,
            lambda rows: margin(rows, 128000, FITTED),
            "table 4",
        ),
        Claim(
            "share of new tokens where both are equal",
            0.05,
            lambda rows: crossover(rows, FITTED),
            "4.2.4: 'tipping point'",
            "%",
        ),
        Claim(
            "the same, all of a hop hidden",
            0.05,
            lambda rows: crossover(rows, ALL),
            "4.2.4: 'tipping point'",
            "%",
            remark=TIE,
        ),
    ),
    panels=(
        Panel("predicted", "miss", "ttft_s", "strategy", (("hidden", FITTED),), "xy"),
        Panel("the paper's", "miss", "paper_s", "strategy", (("hidden", FITTED),), "xy"),
        Panel("error", "miss", "error", "strategy", (("hidden", FITTED),), "x"),
        Panel("error, all of a hop hidden", "miss", "error", "strategy", (("hidden", ALL),), "x"),
    ),
)

if __name__ == "__main__":
    main(FIGURE, "context_parallel")
