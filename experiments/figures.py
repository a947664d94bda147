"""Parts that the papers' figures share: rows to CSV and back, the paper's numbers beside ours,
pictures, the summary. `papers` makes one, or all of a paper.

A figure is a file: a sweep that yields rows, claims read off the rows, what must have run for
them to mean anything, panels to draw. What a sweep is given is up to its paper. `judged` is the one
place where verdicts are made.
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
from experiments.bounds import sign_of
from jaxserve.cli.display import table
from jaxserve.cli.files import figure_class

Cell = float | str
Row = dict[str, Cell]
Rows = Sequence[Row]

CLOSE = 1.25  # a ratio to the paper's number within this, either way, is close
SEED = "seed"  # the column of a figure that is made with several
NOT_RUN = "did not run"
NOT_COUNTED = "not counted yet"
GIVEN = "computed from the paper's number"
ELSEWHERE = "counted elsewhere"
NOT_REACHED = "limit not reached"
NOTHING = "nothing to compare"
CONTENT = ("close", "better", "holds", ELSEWHERE, GIVEN)  # verdicts that need no cause


@dataclass(frozen=True)
class Claim:
    """A number of the paper, where it stands, and how ours is read off the rows.

    better: 'higher' or 'lower' where one is better, 'equal' where neither is. limit: the paper says
    at most (or at least) so much. remark: why ours differs, or what the paper says twice. cause:
    what the rows of all seeds say of why, which is remarked where ours falls short. given: ours is
    computed from the paper's own number. counted_in: the figure that has the same number of ours
    and the paper's, and counts it.
    """

    what: str
    paper: float
    ours: Callable[[Rows], float]
    source: str
    unit: str = "x"
    better: str = "equal"
    limit: bool = False
    remark: str = ""
    given: bool = False
    counted_in: str = ""
    cause: Callable[[Rows], str] | None = None

    def remarked(self, rows: Rows) -> str:
        """The remark, and the cause as these rows have it."""
        cause = self.cause(rows) if self.cause else ""
        return "; ".join(part for part in (self.remark, cause) if part)

    @property
    def said(self) -> str:
        """The paper's number as people write it, such as 30x or > 15 s."""
        sign = {"higher": "> ", "lower": "< "}.get(self.better, "") if self.limit else ""
        return sign + number(self.paper, self.unit)

    def times(self, ours: float) -> float:
        """Divides ours by the paper's; NaN for a limit, for a bound, for a number that says nothing
        of ours, and without ours."""
        if self.limit or self.given or self.counted_in or sign_of(ours):
            return math.nan
        return ours / self.paper

    def verdict(self, ours: float) -> str:
        """Judges ours: close, better, holds, ..."""
        if self.counted_in:
            return ELSEWHERE
        if self.given:
            return GIVEN
        if not math.isfinite(ours):
            return NOTHING
        ratio = float(ours) / self.paper
        ahead = ratio > 1 if self.better == "higher" else ratio < 1
        if sign_of(ours) and not self._is_clear(ratio, sign_of(ours)):
            return NOT_REACHED
        if self.limit:
            return "holds" if ahead else "does not hold"
        if 1 / CLOSE <= ratio <= CLOSE:
            return "close"
        if self.better == "equal":
            return "higher" if ratio > 1 else "lower"
        return "better" if ahead else "worse"

    def _is_clear(self, ratio: float, sign: str) -> bool:
        """Returns whether every number on that side of a bound has the same verdict."""
        edge = 1.0 if self.limit else CLOSE
        return ratio > edge if sign == ">" else ratio < 1 / edge


@dataclass(frozen=True)
class Mechanism:
    """A mechanism that must have run for a figure's numbers to mean what they should. what: counted
    things, such as 'steps with a spread sequence'. count: returns their number from the rows."""

    what: str
    count: Callable[[Rows], float]

    def fault(self, rows: Rows) -> tuple[str, str]:
        """Returns the verdict on numbers of these rows and why, where they do not show that it ran;
        ('', '') where they do."""
        try:
            counts = [self.count(some) for some in by_seed(rows)]
        except KeyError:  # results of before there was a column for it
            return NOT_COUNTED, f"{self.what} (the kept results are older)"
        return ("", "") if min(counts) > 0 else (NOT_RUN, f"no {self.what}")


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
    (`papers.Paper.runs`). mechanisms: all must have run for its claims to be judged. seeded: it is
    made with several seeds."""

    name: str
    title: str
    kind: str
    sweep: Callable[[Any], Iterable[Row]]
    claims: tuple[Claim, ...]
    panels: tuple[Panel, ...]
    runs: str = ""
    mechanisms: tuple[Mechanism, ...] = ()
    seeded: bool = False

    def fault(self, rows: Rows) -> tuple[str, str]:
        """Returns the first fault of its mechanisms; see `Mechanism`."""
        faults = (mechanism.fault(rows) for mechanism in self.mechanisms)
        return next((fault for fault in faults if fault[0]), ("", ""))


# --- rows


def matching(rows: Rows, **where: Cell) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in where.items())]


def cell(rows: Rows, column: str, **where: Cell) -> float:
    """Returns the number of `column` in the row where the other columns are so; NaN without such a
    row or column. Errors: ValueError for several."""
    found = matching(rows, **where)
    if len(found) > 1:
        raise ValueError(f"{len(found)} rows have {where}")
    value = found[0].get(column, math.nan) if found else math.nan
    return value if isinstance(value, float | int) else math.nan


def ratio(rows: Rows, column: str, above: Row, below: Row) -> float:
    """The quotient of two cells of a column; NaN where one is missing or the lower one is 0."""
    upper, lower = (cell(rows, column, **where) for where in (above, below))
    return upper / lower if lower else math.nan


def typical(rows: Rows, column: str, **where: Cell) -> float:
    """Returns the number of a cell in the middle one of the seeds."""
    found = sorted(cell(some, column, **where) for some in by_seed(rows))
    return found[len(found) // 2]


def fewest(column: str, **where: Cell) -> Callable[[Rows], float]:
    """Returns the count of a mechanism: the least of a column over the rows that are so, 0 without
    such rows."""

    def count(rows: Rows) -> float:
        return min((float(row[column]) for row in matching(rows, **where)), default=0.0)

    return count


def by_seed(rows: Rows) -> list[Rows]:
    """Splits rows by their seed; rows without that column are of one seed."""
    seeds = dict.fromkeys(row.get(SEED, "") for row in rows)
    return [[row for row in rows if row.get(SEED, "") == seed] for seed in seeds]


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
    sign = f"{sign_of(value)} " if sign_of(value) else ""
    if unit == "%":
        return f"{sign}{100 * value:.3g} %"
    return f"{sign}{value:.3g}{'' if unit == 'x' else ' '}{unit}"


@dataclass(frozen=True)
class Judgement:
    """A number of the paper and ours. ours: of the seed in the middle; seeds: of all, ascending.
    verdict: one word or a few, which are counted; why: what is to be said with it. remark: on how
    it came to be so."""

    claim: Claim
    ours: float
    seeds: tuple[float, ...]
    verdict: str
    why: str = ""
    remark: str = ""

    @property
    def shown(self) -> str:
        """Ours as people write it, with what other seeds give."""
        ours = number(self.ours, self.claim.unit)
        if len(self.seeds) < 2:
            return ours
        low, high = (number(end, self.claim.unit) for end in (self.seeds[0], self.seeds[-1]))
        return f"{ours} ({low} to {high})"

    @property
    def said(self) -> str:
        """The verdict, and what is to be said with it."""
        return f"{self.verdict}: {self.why}" if self.why else self.verdict

    @property
    def times(self) -> float:
        """Ours divided by the paper's; NaN where that says nothing."""
        if self.verdict in (NOT_RUN, NOT_COUNTED):
            return math.nan
        return self.claim.times(self.ours)


def judged(figure: Figure, rows: Rows) -> list[Judgement]:
    """Judges all claims of a figure."""
    fault = figure.fault(rows)
    return [_judgement(claim, by_seed(rows), fault) for claim in figure.claims]


def _judgement(claim: Claim, seeds: Sequence[Rows], fault: tuple[str, str]) -> Judgement:
    found = [claim.ours(rows) for rows in seeds]
    known = sorted(value for value in found if math.isfinite(value))
    ours = known[len(known) // 2] if known else math.nan
    verdict = claim.verdict(ours)
    same = sum(claim.verdict(value) == verdict for value in found)
    why = "" if same == len(found) else f"{same} of {len(found)} seeds"
    if verdict == ELSEWHERE:
        why = claim.counted_in
    elif fault[0]:
        verdict, why = fault
    remark = claim.remark
    if verdict not in CONTENT:
        remark = claim.remarked([row for rows in seeds for row in rows])
    return Judgement(claim, ours, tuple(known), verdict, why, remark)


def compared(figure: Figure, rows: Rows) -> str:
    """The claims as a table for the terminal."""
    lines = [[one.claim.what, one.claim.said, one.shown, one.said] for one in judged(figure, rows)]
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
    """Equal values of `by` have equal colours in all panels; each seed is a line."""
    for place, value in enumerate(dict.fromkeys(row[panel.by] for row in rows)):
        chosen = matching(rows, **dict(panel.where), **{panel.by: value})
        label = value if isinstance(value, str) else f"{panel.by} {value:g}"
        for some in by_seed(chosen):
            points = [(row[panel.x], row[panel.y]) for row in some if row[panel.y] != ""]
            if points:
                axes.plot(
                    *zip(*points),
                    color=f"C{place}",
                    marker=panel.marker,
                    markersize=3,
                    linewidth=1.2,
                    label=label,
                )
                label = "_"  # none for further seeds
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
    write_csv(file, list(swept(figure, settings)))
    rows = read_csv(file)
    draw(out / f"{figure.name}.png", figure, rows)
    return compared(figure, rows)


def swept(figure: Figure, settings: Any) -> Iterator[Row]:
    """Yields the rows of the sweep, of each seed where it is made with several."""
    if not figure.seeded:
        yield from figure.sweep(settings)
        return
    for one in settings.each_seed():
        yield from (row | {SEED: one.seed} for row in figure.sweep(one))


# --- the summary

COLUMNS = ("figure", "how", "what", "paper", "where", "ours", "ours / paper", "verdict", "remark")
VERDICTS = """\
*close*: within a factor of 1.25 of the paper's number. > and < before the paper's are limits: it \
gives a direction or a bound, not a number; before ours: a sweep ended before its limit was \
reached. Numbers in brackets: the least and the greatest of the seeds, of which the middle one is \
judged. *Did not run*: what the figure is to show did not happen. *Not counted yet*: the kept \
results do not say whether it did. *Counted elsewhere*: the same number is in another figure.
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
    for one in judged(figure, rows):
        yield (
            figure.name.removeprefix("fig"),
            figure.kind,
            one.claim.what,
            one.claim.said,
            one.claim.source,
            one.shown,
            f"{one.times:.2f}" if math.isfinite(one.times) else "",
            one.said,
            one.remark,
        )
