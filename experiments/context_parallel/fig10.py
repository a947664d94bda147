"""Figure 10: a line fitted to measurements over new tokens and their share (appendix D). The
measurements are the model's, 4 hosts."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import numpy as np

from experiments.context_parallel.boundary import Boundary, fit_boundary
from experiments.context_parallel.paper import FIT, TABLE4
from experiments.context_parallel.system import RANKS, calibrated
from experiments.figures import Claim, Figure, Panel, Row, Rows, matching
from experiments.papers import main

NEW = np.geomspace(256, 65536, 17).astype(int).tolist()
SHARES = np.geomspace(0.005, 1, 33).tolist()


@functools.cache
def lines() -> dict[str, Boundary]:
    """The paper's line, and those fitted to table 4 and to the model."""
    times = [
        (cached, new, *_rings(cached, new))
        for new in NEW
        for cached in (round(new / share) - new for share in SHARES)
    ]
    return {
        "paper": Boundary(*FIT),
        "fit to table 4": fit_boundary(
            [(row.cached, row.new, row.pass_kv, row.pass_q) for row in TABLE4]
        ),
        "fit to the model": fit_boundary(times),
    }


def _rings(cached: int, new: int) -> tuple[float, float]:
    seconds = calibrated().ttft(cached, new, RANKS)
    return seconds["pass_kv"], seconds["pass_q"]


def sweep(settings: None) -> Iterator[Row]:
    """Points, and the lowest share of new tokens at which pass-KV is preferred: by the model, and
    where the lines are 0."""
    for new in NEW:
        preferred = []
        for share in SHARES:
            cached = round(new / share) - new
            pass_kv, pass_q = _rings(cached, new)
            preferred += [share] if pass_kv < pass_q else []
            yield {
                "what": "point",
                "line": "",
                "new": new,
                "cached": cached,
                "share": new / (new + cached),
                "pass_kv_s": pass_kv,
                "pass_q_s": pass_q,
            }
        least = {
            "the model": min(preferred),
            **{
                name: math.exp(-(line.new * math.log(new) + line.constant) / line.miss)
                for name, line in lines().items()
            },
        }
        for name, share in least.items():
            if share <= 1:
                yield {
                    "what": "threshold",
                    "line": name,
                    "new": new,
                    "cached": "",
                    "share": share,
                    "pass_kv_s": "",
                    "pass_q_s": "",
                }


def _told(rows: Rows, name: str) -> float:
    """Share of the points that a line decides as their times do."""
    line = lines()[name]
    points = matching(rows, what="point")
    return float(
        np.mean(
            [
                (line(int(row["cached"]), int(row["new"])) > 0)
                == (row["pass_kv_s"] < row["pass_q_s"])
                for row in points
            ]
        )
    )


def _table4(name: str) -> float:
    return float(
        np.mean(
            [
                (lines()[name](row.cached, row.new) > 0) == (row.pass_kv < row.pass_q)
                for row in TABLE4
            ]
        )
    )


def _slope(name: str) -> float:
    return -lines()[name].new / lines()[name].miss


BASE = "the base of the logarithms and the measurements are not given: not transferable"
BENT = (
    "no straight line: with few new tokens the threshold rises with them, for latencies decide, "
    "and then it stays; the paper does not say which T it measured"
)
FIGURE = Figure(
    "fig10",
    "A line fitted to measurements",
    "computed",
    sweep,
    claims=(
        Claim(
            "points classified right by a line fitted to them",
            1,
            lambda rows: _told(rows, "fit to the model"),
            "figure 10",
            "%",
            "higher",
        ),
        Claim(
            "points classified right by the paper's line",
            1,
            lambda rows: _told(rows, "paper"),
            "figure 10",
            "%",
            "higher",
            remark=BASE,
        ),
        Claim(
            "rows of table 4 classified right by a line fitted to our points",
            1,
            lambda rows: _table4("fit to the model"),
            "table 4",
            "%",
            "higher",
        ),
        Claim(
            "rows of table 4 classified right by the paper's line",
            1,
            lambda rows: _table4("paper"),
            "table 4",
            "%",
            "higher",
            counted_in="figure 9",
        ),
        Claim(
            "rows of table 4 classified right by a line fitted to them",
            1,
            lambda rows: _table4("fit to table 4"),
            "table 4",
            "%",
            "higher",
            counted_in="figure 9",
            remark="all of the table has one length, so T and its share cannot be told apart: "
            "away from it the line means nothing",
        ),
        Claim(
            "how log(share) at the threshold goes with log(T)",
            -FIT[0] / FIT[1],
            lambda rows: _slope("fit to the model"),
            "appendix D",
            remark=BENT,
        ),
    ),
    panels=(
        Panel(
            "least share of new tokens with pass-KV",
            "new",
            "share",
            "line",
            (("what", "threshold"),),
            "xy",
        ),
    ),
)

if __name__ == "__main__":
    main(FIGURE, "context_parallel")
