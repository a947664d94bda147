"""Makes again what this project has made of the papers: all figures, the fitted costs of GPUs, the
page of all figures. What is made already, of the same code and arguments, is kept.

python -m experiments.all --out=DIR --jobs=2
"""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import reproduction, runner
from experiments.figures import judged, made_in
from experiments.papers import BUILT, Paper, module, paper
from experiments.profiles import fit
from experiments.runner import Done, Task
from experiments.script import command_line
from jaxserve.cli.display import table
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import ConfigError

ROOT = Path(__file__).parents[1]
PROFILES = "profiles"
ABOUT = """\
Figures are made as the kept ones were, with as many requests; the table at the end says how long
each took, and how many of its verdicts are those of the kept results. What was made already of the
same code and arguments is not made again.

  python -m experiments.all --out=DIR --jobs=2
  python -m experiments.all --only=tetris,mooncake.table1,profiles
"""
OPTIONS = [
    Option("out", str, str(ROOT / "build" / "figures"), "folder; each paper has its own in it"),
    Option(
        "only",
        str,
        "",
        f"what to make, as PAPER, PAPER.FIGURE or {PROFILES}, several with commas; papers: "
        f"{', '.join(BUILT)}; default: all",
    ),
    Option(
        "data",
        str,
        None,
        "folder of traces and measurements; default: JAXSERVE_DATA, else ../shared/data, else "
        "generated, and no profiles",
    ),
    Option("jobs", int, os.cpu_count() or 1, "processes", 1),
]


def run(values: dict[str, Any]) -> int:
    out = Path(values["out"])
    chosen = list(dict.fromkeys(_chosen(values["only"])))
    stamp = _code()
    tasks = [_task(name, number, values, out, stamp) for name, number in chosen]
    done = runner.run([task for task in tasks if task], values["jobs"], out / "stamps")
    papers = dict.fromkeys(name for name, _ in chosen if name != PROFILES)
    for name in papers:
        paper(name).summarise(out / name)
    if papers:
        page = reproduction.page(lambda one: out / one.folder)
        (out / "reproduction.md").write_text(page)
    print(_summary(done, out))
    return int(any(one.state == "failed" for one in done))


def _chosen(only: str) -> Iterator[tuple[str, str]]:
    """(paper, number) of every figure that is asked for. Errors: ConfigError for what there is
    not."""
    asked = [each for each in only.replace(" ", "").split(",") if each] or [PROFILES, *BUILT]
    for each in asked:
        name, _, figure = each.partition(".")
        if each == PROFILES:
            yield PROFILES, ""
        elif name not in BUILT:
            raise ConfigError("only", f"{each!r}: known are {', '.join((*BUILT, PROFILES))}")
        else:
            numbers = paper(name).numbers
            known = {module(number): number for number in numbers}
            if figure and figure not in known:
                raise ConfigError("only", f"{each!r}: {name} has {', '.join(known)}")
            yield from ((name, number) for number in ([known[figure]] if figure else numbers))


def _task(name: str, number: str, values: Mapping[str, Any], out: Path, code: str) -> Task | None:
    """None where there are no data for it."""
    if name == PROFILES:
        data = _measurements(values["data"])
        if data is None:
            return None
        file = out / "profiles.json"
        make = functools.partial(fit_profiles, data, file)
        return Task(PROFILES, make, stamp=_stamp(code, data))
    one = paper(name)
    given = {option.name: option.default for option in one.options}
    given |= {key: values[key] for key in ("data",) if key in given}
    if requests := one.kept_requests(number):
        given["requests"] = requests
    one.settings_of(given)  # mistakes are reported before anything is made
    del given["out"]
    return one.task(number, given, out / name, _stamp(code, given))


def _measurements(given: str | None) -> Path | None:
    """The folder of the measurements that profiles are fitted to; None where there are none."""
    named = os.environ.get("JAXSERVE_DATA") if given is None else given
    folder = Path(named).expanduser() if named else ROOT.parent / "shared" / "data"
    return folder if (folder / "vidur").is_dir() else None


def fit_profiles(data: Path, out: Path) -> str:
    """Fits the costs of GPUs; returns whether they are those that are shipped."""
    out.parent.mkdir(parents=True, exist_ok=True)
    fit.run({"data": str(data), "out": str(out)})
    same = out.read_text() == fit.profiles.FILE.read_text()
    return f"profiles: {'as shipped' if same else 'not as shipped'}"


def _code() -> str:
    """Identifies the code: the trees of git, and what is not committed of them; '' without git,
    and nothing is kept then."""
    git = lambda *arguments: (
        subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout
    )
    trees = git("rev-parse", "HEAD:jaxserve", "HEAD:experiments")
    changed = git("diff", "HEAD", "--", "jaxserve", "experiments", ":!experiments/*/results")
    return trees and trees + changed


def _stamp(code: str, arguments: object) -> str:
    whole = f"{code} {arguments}".encode()
    return hashlib.sha256(whole).hexdigest() if code else ""


def _summary(done: Sequence[Done], out: Path) -> str:
    """Tabulates what was made, how long it took, and whether it says what the kept results say."""
    lines = [[one.name, one.state, f"{one.seconds:.0f}", _same(one, out)] for one in done]
    total = sum(one.seconds for one in done if one.state == "made")
    return table(["", "", "s", "verdicts as kept"], [*lines, ["all", "", f"{total:.0f}", ""]])


def _same(one: Done, out: Path) -> str:
    """'5 of 6' verdicts of a figure that are those of the kept results."""
    name, _, figure = one.name.partition(" ")
    if not figure or one.state == "failed":
        return ""
    found = paper(name)
    ours, kept = (_verdicts(found, figure, folder) for folder in (out / name, found.results))
    return f"{sum(a == b for a, b in zip(ours, kept))} of {len(ours)}" if kept else ""


def _verdicts(found: Paper, name: str, folder: Path) -> list[str]:
    figures = [figure for figure in found.figures() if figure.name == name]
    return [
        one.verdict for figure, rows in made_in(folder, figures) for one in judged(figure, rows)
    ]


def main(arguments: Sequence[str]) -> int:
    command = Command({"what is made": OPTIONS}, run, ABOUT)
    return command_line("all", "all that was made of the papers, again", command, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
