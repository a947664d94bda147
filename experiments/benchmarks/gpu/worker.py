"""One section of the measurements, in a process of its own: a list of named cases, each of which
becomes rows.

Rows are appended to a file as they come, and so is the name of each case that begins, so that
the process that started it knows what it was at when it hung or broke. What a section needs is
imported when it runs; third-party modules that are absent where nothing is served are replaced by
stand-ins.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from experiments.benchmarks.gpu.timing import Pace, said

Row = dict[str, Any]
Case = tuple[str, Callable[[], list[Row] | Row]]
SECTIONS = {  # where each one's cases come from
    "environment": "checks:environment",
    "ceilings": "checks:ceilings",
    "kernels": "checks:kernels",
    "prefill": "attention:prefill",
    "chunks": "attention:chunks",
    "decode": "attention:decode",
    "served": "served:served",
    "engine": "steps:engine",
    "graphs": "graphs:graphs",
    "engine_1m": "steps:engine_1m",
    "engine_10m": "steps:engine_10m",
    "tp": "ranks:ranks",
    "vllm": "served:vllm",
    "tiles": "attention:tiles",
    "pools": "pools:pools",
}
OPTIONAL = (
    "gguf",
    "tqdm",
    "tokenizers",
    "jinja2",
    "grpc",
    "grpc_health",
    "grpc_reflection",
    "prometheus_client",
    "safetensors",
    "psutil",
)


@dataclass(frozen=True)
class Run:
    """Context of a section. until: time.time() after which no case should begin; found: rows of the
    sections before it."""

    section: str
    rehearse: bool
    seed: int
    until: float
    folder: str
    torch_python: str
    vllm_python: str
    found: dict[str, list[Row]]

    @property
    def left(self) -> float:
        return self.until - time.time()

    @property
    def pace(self) -> Pace:
        return Pace(2, 0.0, 1) if self.rehearse else Pace()

    def figure(self, section: str, case: str, column: str) -> float | None:
        """A figure of a section before this one; its median where it has a spread."""
        value = self.row(section, case).get(column)
        return value["median"] if isinstance(value, dict) else value

    def best(self, section: str, column: str) -> float | None:
        """The largest figure of a column of a section before this one."""
        rows = self.found.get(section, ())
        return max((row[column] for row in rows if column in row), default=None)

    def row(self, section: str, case: str) -> Row:
        """Returns a row of an earlier section; {} where there is none."""
        return next((row for row in self.found.get(section, ()) if row["case"] == case), {})


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules that are not there and that nothing here calls, only imports."""

    def __init__(self, names: list[str]):
        self.names = names

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        mine = fullname.split(".")[0] in self.names
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if mine else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        of = MagicMock()
        module.__getattr__ = lambda name: getattr(of, name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def stand_in() -> list[str]:
    """Puts stand-ins for what is absent; returns the names."""
    names = [name for name in OPTIONAL if name not in sys.modules and not is_there(name)]
    if names:
        sys.meta_path.insert(0, StandIns(names))
    return names


def is_there(module: str) -> bool:
    """Returns whether a module can be imported; a stand-in is none."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return False
    return spec is not None and not isinstance(spec.loader, StandIns)


def cases(run: Run) -> Iterator[Case]:
    """Yields the cases of a section."""
    stand_in()
    module, _, function = SECTIONS[run.section].partition(":")
    yield from getattr(importlib.import_module(f"experiments.benchmarks.gpu.{module}"), function)(
        run
    )


def work(task: dict[str, Any]) -> None:
    """Runs the section of a task: cases but those to `skip`, at most `most` of them; see `inject`
    in h200."""

    def tell(**line: Any) -> None:
        with Path(task["rows"]).open("a") as out:
            out.write(json.dumps(line) + "\n")

    run = Run(**task["run"])
    kind, _, where = task["inject"].partition(":")
    for number, (name, case) in enumerate(cases(run)):
        if number >= task["most"] or name in task["skip"]:
            continue
        if run.left < 0:
            tell(begin=name)
            tell(rows=[{"case": name, "status": "skipped", "why": "out of time"}])
            continue
        tell(begin=name)
        began = time.perf_counter()
        try:
            if where == run.section:
                broken(kind)
            rows = case()
            rows = [rows] if isinstance(rows, dict) else rows
            rows = [{"case": name, "status": "ok", **row} for row in rows]
        except Exception as error:
            traceback.print_exc()
            rows = [{"case": name, "status": "failed", "why": said(error)}]
        tell(rows=rows, seconds=time.perf_counter() - began)


def broken(kind: str) -> None:
    """A fault on purpose, to see that it takes nothing else along."""
    if kind == "crash":
        os.abort()
    if kind == "hang":
        time.sleep(3600)
    raise RuntimeError("failed on purpose")


if __name__ == "__main__":
    work(json.loads(Path(sys.argv[1]).read_text()))
