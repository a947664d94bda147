"""Papers whose figures are made again: which there are, what they run, what their sweeps are given,
and the command lines that make one figure, or all of a paper with summary.md."""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from experiments import runner
from experiments.figures import Figure, Rows, canvas, made_in, make, read_csv, summary
from experiments.runner import Task
from experiments.script import command_line
from jaxserve.lab.simulate.noise import SERVED, Noise
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import ConfigError

BUILT = ("medha", "context_parallel", "tetris", "mooncake", "tokenlake")
SIBLING = Path(__file__).parents[2] / "shared" / "data"
JOBS = Option("jobs", int, 1, "processes that make figures at the same time", 1)


def data_folder(named: str | None) -> Path | None:
    """Returns the folder of recorded data: the one named, else that of JAXSERVE_DATA, else SIBLING
    if it exists. None, as for '': workloads are generated."""
    named = os.environ.get("JAXSERVE_DATA") if named is None else named
    if named is None and SIBLING.is_dir():
        return SIBLING
    return Path(named).expanduser() if named else None


def missing(data: Path, file: str) -> ConfigError:
    """The error for a data folder without a file."""
    said = f"{data} has no {file}; give the folder that has it, or --data= to generate"
    return ConfigError("data", said)


@dataclass(frozen=True)
class SweepSettings:
    """Settings of a sweep. data: folder of recorded data; None to generate. requests: most of a
    simulation; None for as many as the figure needs. seed: of what is generated and drawn. noise:
    sigma of the times of steps around their prediction. seeds: with how many seeds, from `seed` on,
    a figure is made that has several."""

    data: Path | None = None
    requests: int | None = None
    seed: int = 0
    noise: float = 0.0
    seeds: int = 1

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Makes settings of the values of `sweep_options`. Errors: ConfigError for a folder without
        the data."""
        drawn = {name: values[name] for name in ("noise", "seeds") if name in values}
        folder = data_folder(values["data"])
        settings = cls(data=folder, requests=values["requests"], seed=values["seed"], **drawn)
        if settings.data is not None:
            settings.check(settings.data)
        return settings

    def check(self, data: Path) -> None:
        """Checks the data folder. Errors: ConfigError."""

    @property
    def step_noise(self) -> Noise:
        """The spread of step times of the sweep's seed."""
        return Noise(self.noise, self.seed)

    def each_seed(self) -> Iterator[Self]:
        """Yields the settings of one seed after the other."""
        for number in range(self.seeds):
            yield replace(self, seed=self.seed + number, seeds=1)


# options of sweeps with noise
SPREAD = [
    Option(
        "noise",
        float,
        SERVED,
        "sigma of the times of simulated steps around their prediction; 0: they take it",
        0,
        1,
    ),
    Option("seeds", int, 3, "from --seed on, with which figures under load are made", 1),
]


def sweep_options(data: str, otherwise: str, requests: Option, seed: str) -> list[Option]:
    """Returns the options of SweepSettings. data: files in the folder. otherwise: what is used
    without it."""
    folder = f"folder with {data}; default: JAXSERVE_DATA, else ../shared/data, else {otherwise}"
    return [Option("data", str, None, folder), requests, Option("seed", int, 0, seed, 0)]


@dataclass(frozen=True)
class Paper:
    """A paper. folder: of its figures, under experiments. numbers: of the figures that are made,
    each a module `figN` or `tableN` there. head: of summary.md. given: options of its sweeps, of
    whose values settings_of makes what a sweep is given. runs: what of jaxserve is run, by a
    figure's kind. together: figures that simulate the same and are made in one process. ahead:
    given numbers of figures, settings and processes, makes what they share in that many, before
    the figures are made in this one. jobs: processes, where nothing else is said. headlines: what
    a reader asks first, as (figure, what of its claims). others: the figures and tables that are
    not made, and why."""

    folder: str
    title: str
    numbers: Sequence[str]
    head: str
    runs: Mapping[str, str]
    given: Sequence[Option] = ()
    settings_of: Callable[[Mapping[str, Any]], Any] = lambda values: None
    together: Sequence[Sequence[str]] = ()
    ahead: Callable[[Sequence[str], Any, int], None] | None = None
    jobs: int = 1
    headlines: Sequence[tuple[str, str]] = ()
    others: Mapping[str, str] = field(default_factory=dict)

    @property
    def results(self) -> Path:
        """The folder of the results that are kept."""
        return Path(__file__).parent / self.folder / "results"

    @property
    def options(self) -> list[Option]:
        """Options of the command lines."""
        return [Option("out", str, str(self.results), "folder of the CSV and PNG"), *self.given]

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
            settings = self.settings_of(values)  # mistakes are reported before anything is made
            numbers = self.chosen(values["figures"])
            tasks = [self.task(number, values, out) for number in numbers]
            jobs = values["jobs"]
            if self.ahead and tasks:
                canvas()
                self.ahead(numbers, settings, jobs)
                jobs = 1  # what was made ahead is in this process
            done = runner.run(tasks, jobs)
            self.summarise(out)
            return int(any(one.state == "failed" for one in done))

        command = Command(
            {"what is made": [*self.options, choice, replace(JOBS, default=self.jobs)]},
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


def main(figure: Figure, folder: str) -> None:
    """Runs the command line of one figure's file in a paper's folder."""
    source = paper(folder)

    def run(values: dict[str, Any]) -> int:
        print(make(figure, source.settings_of(values), Path(values["out"])))
        return 0

    command = Command({"what is made": source.options}, run)
    sys.exit(command_line(figure.name, figure.title, command, sys.argv[1:]))


def make_figure(folder: str, number: str, values: dict[str, Any], out: Path) -> str:
    """Makes one figure of a paper; returns its table."""
    found = paper(folder)
    return make(found.figure(number), found.settings_of(values), out)
