"""summary.md: the paper's numbers and ours in one table, read from the figures' CSVs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.medha.figure import Claim, Figure, Rows, number, read_csv

HEAD = """\
# Medha's figures, again

Made by `python -m experiments.medha`. Nothing here was measured on a GPU. *simulated*: the real scheduler on a virtual clock, where a step
takes what coefficients say that were fitted to public measurements; *computed*: read off these coefficients alone. Baselines are
simulated over the same arrivals, with the same coefficients. Runs under load last an hour, those of figures 17 and 18 ten minutes.

*close*: within a factor of 1.25 of the paper's number. > and < are limits: the paper gives a direction or a bound, not a number.
"""
COLUMNS = ("figure", "how", "what", "paper", "where", "ours", "ours / paper", "verdict", "remark")


def text(figures: Sequence[Figure], folder: Path) -> str:
    """The table of those figures whose CSV is in the folder."""
    made = [(figure, read_csv(file)) for figure in figures if (file := folder / f"{figure.name}.csv").is_file()]
    lengths = sorted({str(row["lengths"]) for _, rows in made for row in rows if "lengths" in row})
    lines = [_line(COLUMNS), _line("---" for _ in COLUMNS), *(_line(cells) for figure, rows in made for cells in _rows(figure, rows))]
    return "\n".join([HEAD, f"Lengths of the requests: {', '.join(lengths) or 'none'}.", "", *lines]) + "\n"


def _rows(figure: Figure, rows: Rows) -> Iterator[Sequence[str]]:
    for claim in figure.claims:
        ours = claim.ours(rows)
        share = f"{ours / claim.paper:.2f}" if math.isfinite(ours) and not claim.limit else ""
        yield (figure.name.removeprefix("fig"), figure.kind, claim.what, _paper(claim), claim.source, number(ours, claim.unit), share,
               claim.verdict(ours), claim.remark)


def _paper(claim: Claim) -> str:
    sign = {"higher": "> ", "lower": "< "}.get(claim.better, "") if claim.limit else ""
    return sign + number(claim.paper, claim.unit)


def _line(cells: Sequence[str] | Iterator[str]) -> str:
    return f"| {' | '.join(cells)} |"
