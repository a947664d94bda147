"""A paper whose figures are made again: which there are, what they run, and the command line that
makes all of them and summary.md."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments import runner
from experiments.figures import Figure, Rows, made_in, make, read_csv, summary
from experiments.runner import Task
from experiments.script import command_line
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import ConfigError

BUILT = ("medha", "context_parallel", "tetris", "mooncake")
JOBS = Option("jobs", int, 1, "processes that make figures at the same time", 1)


@dataclass(frozen=True)
class Paper:
    """A paper. folder: of its figures, under experiments. numbers: of the figures that are made,
    each a module `figN` or `tableN` there. head: of summary.md. settings_of: what a sweep is given,
    from the values of the options. runs: what of jaxserve is run, by the kind of a figure.
    together: figures that simulate the same and are made in one process. others: the figures and
    tables that are not made, and why."""

    folder: str
    title: str
    numbers: Sequence[str]
    head: str
    options: Sequence[Option]
    settings_of: Callable[[dict[str, Any]], Any]
    runs: Mapping[str, str]
    together: Sequence[Sequence[str]] = ()
    others: Mapping[str, str] = field(default_factory=dict)

    @property
    def results(self) -> Path:
        """The folder of the results that are kept."""
        return Path(__file__).parent / self.folder / "results"

    def figure(self, number: str) -> Figure:
        return importlib.import_module(f"experiments.{self.folder}.{module(number)}").FIGURE

    def figures(self) -> list[Figure]:
        return [self.figure(number) for number in self.numbers]

    def chosen(self, wanted: str) -> list[str]:
        """'N,N' -> numbers. Errors: ConfigError for one that there is not."""
        found = [number for number in wanted.replace(" ", "").split(",") if number]
        if unknown := [number for number in found if number not in self.numbers]:
            raise ConfigError(
                "figures", f"{', '.join(unknown)}: known are {', '.join(self.numbers)}"
            )
        return found

    def what_runs(self, figure: Figure) -> str:
        return figure.runs or self.runs[figure.kind]

    def kept_requests(self, number: str) -> int | None:
        """The --requests with which the kept results of a figure were made; None for the
        default."""
        file = self.results / f"{module(number)}.csv"
        rows = read_csv(file) if file.is_file() else []
        limits = re.findall(r"at most (\d+) requests", str([row.get("lengths") for row in rows]))
        return int(limits[0]) if limits else None

    def task(self, number: str, values: Mapping[str, Any], out: Path, stamp: str = "") -> Task:
        """Makes a figure with these values of the options."""
        group = next((each for each in self.together if number in each), [number])
        return Task(
            f"{self.folder} {module(number)}",
            functools.partial(make_figure, self.folder, number, dict(values), out),
            f"{self.folder} {group[0]}",
            stamp,
        )

    def summarise(self, folder: Path) -> None:
        """Writes summary.md of the results in a folder."""
        (folder / "summary.md").write_text(summary(self.figures(), folder, self.head))

    def made_in(self, folder: Path) -> list[tuple[Figure, Rows]]:
        return list(made_in(folder, self.figures()))

    def main(self, arguments: Sequence[str]) -> int:
        """The command line of `python -m experiments.FOLDER`."""
        choice = Option(
            "figures",
            str,
            ",".join(self.numbers),
            "which, as N,N; the summary has all whose CSV is in the folder",
        )

        def run(values: dict[str, Any]) -> int:
            out = Path(values["out"])
            self.settings_of(values)  # a mistake is told before anything is made
            tasks = [self.task(number, values, out) for number in self.chosen(values["figures"])]
            done = runner.run(tasks, values["jobs"])
            self.summarise(out)
            return int(any(one.state == "failed" for one in done))

        command = Command(
            {"what is made": [*self.options, choice, JOBS]},
            run,
            f"python -m experiments.{self.folder} --out=DIR",
        )
        title = f"all figures of experiments/{self.folder}"
        return command_line(self.folder, title, command, arguments)


def paper(folder: str) -> Paper:
    """The paper of a folder."""
    return importlib.import_module(f"experiments.{folder}.__main__").PAPER


def module(number: str) -> str:
    """The module of a figure, and the name of its results: '15' -> 'fig15'."""
    return number if number.startswith("table") else f"fig{number}"


def make_figure(folder: str, number: str, values: dict[str, Any], out: Path) -> str:
    """Makes one figure of a paper; returns its table."""
    found = paper(folder)
    return make(found.figure(number), found.settings_of(values), out)
