"""docs/reproduction.md: every figure and table of the five papers, the paper's numbers beside ours,
from the results that are kept.

python -m experiments.reproduction
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.figures import (
    ELSEWHERE,
    GIVEN,
    NOT_COUNTED,
    NOT_REACHED,
    NOT_RUN,
    SEED,
    Figure,
    Judgement,
    Rows,
    by_seed,
    judged,
)
from experiments.markdown import plain, table
from experiments.papers import BUILT, Paper, module, paper
from experiments.script import command_line
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option

PAGE = Path(__file__).parents[1] / "docs" / "reproduction.md"
NOT_MADE = "not made"
FITTED = "fitted to this table"
TITLE = "# The papers' figures at a glance"
HEAD = """\
Made by `python -m experiments.reproduction` of the results that are kept beside each paper's \
figures; `python -m experiments.all` makes
them all again. No number of ours was measured on a GPU: *simulated* is a virtual clock whose \
steps take what public measurements say,
*computed* is read off formulas and coefficients alone, *measured* is a clock on the CPU where it \
ran. *What ran* says which of jaxserve's
own parts did: where no real scheduler, planner, routing or cache is named, none was. \
×2.28 is ours by the paper's; *close* is within a factor
of 1.25 either way. > and < are limits, where the paper gives a direction or a bound; before \
ours, a sweep that ended before its limit was reached. In brackets: the least and the greatest of \
the seeds, of which the middle one is judged. *Did not run*: what the figure is to show did not \
happen. *Not counted yet*: the kept results do not say whether it did. A number that two figures \
share is counted once. \
*Fitted to*: numbers of tables
to which a model's constants are fitted; they show the fit, no prediction. A number of requests \
in a command is what the kept
results have: fewer than the paper's. Remarks, why a number differs among them, are in each \
paper's summary.
"""
HEADLINES = "What a paper is known for first, read off its figures below:"
HEADLINE_COLUMNS = ("paper", "figure", "what", "paper's", "ours", "verdict", "remark")
COLUMNS = ("figure", "what", "paper", "ours", "verdict", "how", "what ran")
COUNTED = (
    "close",
    "better",
    "holds",
    "worse",
    "does not hold",
    "higher",
    "lower",
    NOT_REACHED,
    NOT_RUN,
    NOT_COUNTED,
    GIVEN,
)

Row = Sequence[str]


def page(folder_of: Callable[[Paper], Path]) -> str:
    """The page, of the results of each paper in a folder."""
    papers = [paper(folder) for folder in BUILT]
    headlines = [row for one in papers for row in _headlines(one, folder_of(one))]
    parts = [
        TITLE,
        *([HEADLINES, table(HEADLINE_COLUMNS, headlines)] if headlines else []),
        HEAD,
        table(
            ("paper", "numbers", "fitted to", *COUNTED, "figures and tables not made"),
            [_counted(one, folder_of(one)) for one in papers],
        ),
    ]
    for one in papers:
        parts += [f"## {one.title}", _source(one), table(COLUMNS, _rows(one, folder_of(one)))]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _headlines(one: Paper, folder: Path) -> Iterator[Row]:
    """The claims that a paper is known by, of the figures that are made."""
    made = {figure.name: (figure, rows) for figure, rows in one.made_in(folder)}
    for number, what in one.headlines:
        if module(number) not in made:
            continue
        for found in judged(*made[module(number)]):
            if found.claim.what == what:
                _, *cells = _claimed(found)
                yield one.title, _called(number), *cells, plain(found.remark)


def _source(one: Paper) -> str:
    return (
        f"`python -m experiments.{one.folder}`, or one figure by the command beside it; remarks: "
        f"[summary](../experiments/{one.folder}/results/summary.md)."
    )


def _counted(one: Paper, folder: Path) -> Row:
    made = one.made_in(folder)
    found = Counter(one.verdict for figure, rows in made for one in judged(figure, rows))
    del found[ELSEWHERE]
    fitted = sum(len(figure.claims) for figure, _ in made if FITTED in one.what_runs(figure))
    unmade = sum(NOT_MADE in why for why in one.others.values())
    left = f"{unmade}, and {len(one.others) - unmade} without a number of their own"
    numbers = (str(found[verdict] or "") for verdict in COUNTED)
    return one.title, str(found.total()), str(fitted or ""), *numbers, left


def _rows(one: Paper, folder: Path) -> Iterator[Row]:
    """A paper's figures in its own order, tables behind them: a row for each claim."""
    made = {figure.name: (figure, rows) for figure, rows in one.made_in(folder)}
    for name in sorted([*one.numbers, *one.others], key=_place):
        if name in one.others:
            yield _called(name), one.others[name], "", "", _unmade(one.others[name]), "", ""
        elif module(name) not in made:
            yield _called(name), one.figure(name).title, "", "", NOT_MADE, "", ""
        else:
            figure, rows = made[module(name)]
            yield _called(name), _titled(one, name, figure, rows), "", "", "", "", ""
            how = (figure.kind, one.what_runs(figure))
            yield from ((*_claimed(one), *how) for one in judged(figure, rows))


def _titled(one: Paper, name: str, figure: Figure, rows: Rows) -> str:
    requests = one.kept_requests(name)
    flags = f" --requests={requests}" if requests else ""
    if SEED in rows[0]:
        flags += f" --seeds={len(by_seed(rows))}"
    lasted = {option.name: option.default for option in one.given}.get("seconds")
    if lasted and rows[0].get("run_s", lasted) != lasted:
        flags += f" --seconds={rows[0]['run_s']:g}"
    command = f"`python -m experiments.{one.folder}.{figure.name}{flags}`"
    return f"**{plain(figure.title)}**, {command}"


def _claimed(one: Judgement) -> Row:
    shown = f"{one.verdict}, ×{one.times:.2f}" if math.isfinite(one.times) else one.verdict
    said = f"{shown}: {one.why}" if one.why else shown
    return "", plain(one.claim.what), plain(one.claim.said), plain(one.shown), plain(said)


def _unmade(why: str) -> str:
    return NOT_MADE if NOT_MADE in why else ""


def _called(name: str) -> str:
    """'15' -> 'Figure 15', 'table4' -> 'Table 4'."""
    return f"Table {name.removeprefix('table')}" if name.startswith("table") else f"Figure {name}"


def _place(name: str) -> tuple[bool, int, str]:
    found = re.search(r"\d+", name)
    assert found
    return name.startswith("table"), int(found[0]), name


def kept(one: Paper) -> Path:
    """The folder of the results that are kept."""
    return one.results


def main(arguments: Sequence[str]) -> int:
    def run(values: dict[str, Any]) -> int:
        Path(values["out"]).write_text(page(kept))
        return 0

    command = Command({"what is made": [Option("out", str, str(PAGE), "file of the page")]}, run)
    return command_line("reproduction", "all figures of the papers on a page", command, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
