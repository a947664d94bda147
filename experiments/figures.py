"""Parts that the papers' figures share: rows to CSV and back, the paper's numbers beside ours,
pictures, the summary. `papers` makes one, or all of a paper.

A figure is a file: a sweep that yields rows, claims read off the rows, panels to draw. What a sweep
is given is up to its paper.
"""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments import markdown
from jaxserve.cli.display import table
from jaxserve.cli.files import figure_class

Cell = float | str
Row = dict[str, Cell]
Rows = Sequence[Row]

CLOSE = 1.25  # a ratio to the paper's number within this, either way, is close


@dataclass(frozen=True)
class Claim:
    """A number of the paper, where it stands, and how ours is read off the rows.

    better: 'higher' or 'lower' where one is better, 'equal' where neither is. limit: the paper says
    at most (or at least) so much. remark: why ours differs, or what the paper says twice.
    """

    what: str
    paper: float
    ours: Callable[[Rows], float]
    source: str
    unit: str = "x"
    better: str = "equal"
    limit: bool = False
    remark: str = ""

    @property
    def said(self) -> str:
        """The paper's number as people write it, such as 30x or > 15 s."""
        sign = {"higher": "> ", "lower": "< "}.get(self.better, "") if self.limit else ""
        return sign + number(self.paper, self.unit)

    def times(self, ours: float) -> float:
        """Divides ours by the paper's; NaN for a limit, and without ours."""
        return math.nan if self.limit else ours / self.paper

    def verdict(self, ours: float) -> str:
        """Judges ours: close, better, holds, ..."""
        if not math.isfinite(ours):
            return "nothing to compare"
        ratio = ours / self.paper
        ahead = ratio > 1 if self.better == "higher" else ratio < 1
        if self.limit:
            return "holds" if ahead else "does not hold"
        if 1 / CLOSE <= ratio <= CLOSE:
            return "close"
        if self.better == "equal":
            return "higher" if ratio > 1 else "lower"
        return "better" if ahead else "worse"


@dataclass(frozen=True)
class Panel:
    """One picture: y over x, a line for each value of `by`, of the rows whose columns equal
    `where`."""

    title: str
    x: str
    y: str
    by: str
    where: tuple[tuple[str, Cell], ...] = ()
    log: str = ""  # axes that are logarithmic: 'x', 'y', 'xy'
    marker: str = "o"


@dataclass(frozen=True)
class Figure:
    """One figure of the paper. kind: 'simulated', 'computed' where it is closed-form, or
    'measured'. runs: what of jaxserve is run for it, if not what runs for its kind
    (`papers.Paper.runs`)."""

    name: str
    title: str
    kind: str
    sweep: Callable[[Any], Iterable[Row]]
    claims: tuple[Claim, ...]
    panels: tuple[Panel, ...]
    runs: str = ""


# --- rows


def matching(rows: Rows, **where: Cell) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in where.items())]


def cell(rows: Rows, column: str, **where: Cell) -> float:
    """Returns the number of `column` in the row where the other columns are so; NaN without such a
    row. Errors: ValueError for several."""
    found = matching(rows, **where)
    if len(found) > 1:
        raise ValueError(f"{len(found)} rows have {where}")
    value = found[0][column] if found else math.nan
    return value if isinstance(value, float | int) else math.nan


def ratio(rows: Rows, column: str, above: Row, below: Row) -> float:
    """The quotient of two cells of a column; NaN where one is missing or the lower one is 0."""
    upper, lower = (cell(rows, column, **where) for where in (above, below))
    return upper / lower if lower else math.nan


def capacity(points: Sequence[tuple[float, float]], limit: float) -> float:
    """The load at which a time, known in seconds at some loads, reaches the limit: between loads
    its logarithm is a straight line. The lowest load where it is above the limit there, the highest
    where it never is."""
    before = None
    for load, seconds in points:
        if seconds > limit:
            if before is None:
                return load
            share = math.log(limit / before[1]) / math.log(seconds / before[1])
            return before[0] + share * (load - before[0])
        before = load, seconds
    return points[-1][0]


def write_csv(path: Path, rows: Rows) -> None:
    with path.open("w", newline="") as file:
        out = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        out.writeheader()
        out.writerows(
            {
                name: f"{value:.5g}" if isinstance(value, float) else value
                for name, value in row.items()
            }
            for row in rows
        )


def read_csv(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return [{name: _value(text) for name, text in row.items()} for row in csv.DictReader(file)]


def _value(text: str) -> Cell:
    try:
        return float(text)
    except ValueError:
        return text


# --- the paper's numbers beside ours


def number(value: float, unit: str) -> str:
    """A number as people write it: 3.4x, 92 %, 15 s."""
    if not math.isfinite(value):
        return "-"
    if unit == "%":
        return f"{100 * value:.3g} %"
    return f"{value:.3g}{'' if unit == 'x' else ' '}{unit}"


def compared(figure: Figure, rows: Rows) -> str:
    """The claims as a table for the terminal."""
    lines = []
    for claim in figure.claims:
        ours = claim.ours(rows)
        lines.append([claim.what, claim.said, number(ours, claim.unit), claim.verdict(ours)])
    return table([f"{figure.name}, {figure.kind}", "paper", "ours", ""], lines)


# --- pictures

canvas = functools.partial(figure_class, "out", "pictures need")  # gives matplotlib's Figure


def draw(path: Path, figure: Figure, rows: Rows) -> None:
    """All panels side by side. Errors: ConfigError without matplotlib."""
    columns = min(4, len(figure.panels))
    lines = -(-len(figure.panels) // columns)
    picture = canvas()(figsize=(4 * columns, 3.2 * lines), dpi=70, layout="constrained")
    picture.suptitle(f"{figure.title} ({figure.kind})", fontsize=11)
    places = picture.subplots(lines, columns, squeeze=False).flat
    for axes, panel in zip(places, figure.panels):
        _draw_panel(axes, panel, rows)
    for axes in places[len(figure.panels) :]:
        axes.remove()
    picture.savefig(path)


def _draw_panel(axes: Any, panel: Panel, rows: Rows) -> None:
    """Equal values of `by` have equal colours in all panels."""
    for place, value in enumerate(dict.fromkeys(row[panel.by] for row in rows)):
        chosen = matching(rows, **dict(panel.where), **{panel.by: value})
        points = [(row[panel.x], row[panel.y]) for row in chosen if row[panel.y] != ""]
        if points:
            axes.plot(
                *zip(*points),
                color=f"C{place}",
                marker=panel.marker,
                markersize=3,
                linewidth=1.2,
                label=value if isinstance(value, str) else f"{panel.by} {value:g}",
            )
    axes.set_xlabel(panel.x, fontsize=9)
    axes.set_ylabel(panel.y, fontsize=9)
    axes.set_title(panel.title, fontsize=9)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize=7)
    for axis in panel.log:
        getattr(axes, f"set_{axis}scale")("log")


# --- one figure


def make(figure: Figure, settings: Any, out: Path) -> str:
    """Writes the figure's CSV and PNG; returns its table, made from the CSV. Errors: ConfigError
    without matplotlib."""
    canvas()  # before the sweep, which may take minutes
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"{figure.name}.csv"
    write_csv(file, list(figure.sweep(settings)))
    rows = read_csv(file)
    draw(out / f"{figure.name}.png", figure, rows)
    return compared(figure, rows)


# --- the summary

COLUMNS = ("figure", "how", "what", "paper", "where", "ours", "ours / paper", "verdict", "remark")
VERDICTS = """\
*close*: within a factor of 1.25 of the paper's number. > and < are limits: the paper gives a \
direction or a bound, not a number.
"""


def made_in(folder: Path, figures: Iterable[Figure]) -> Iterator[tuple[Figure, Rows]]:
    """Yields the figures whose CSV is in the folder, with their rows."""
    for figure in figures:
        file = folder / f"{figure.name}.csv"
        if file.is_file():
            yield figure, read_csv(file)


def summary(figures: Iterable[Figure], folder: Path, head: str) -> str:
    """summary.md: the paper's numbers and ours in one table, of those figures whose CSV is in the
    folder."""
    made = list(made_in(folder, figures))
    lengths = sorted({str(row["lengths"]) for _, rows in made for row in rows if "lengths" in row})
    told = f"Lengths of the requests: {', '.join(lengths) or 'none'}."
    compared = (cells for figure, rows in made for cells in _summed(figure, rows))
    return "\n".join([head + "\n" + VERDICTS, told, "", markdown.table(COLUMNS, compared)]) + "\n"


def _summed(figure: Figure, rows: Rows) -> Iterator[Sequence[str]]:
    for claim in figure.claims:
        ours = claim.ours(rows)
        times = claim.times(ours)
        yield (
            figure.name.removeprefix("fig"),
            figure.kind,
            claim.what,
            claim.said,
            claim.source,
            number(ours, claim.unit),
            f"{times:.2f}" if math.isfinite(times) else "",
            claim.verdict(ours),
            claim.remark,
        )
