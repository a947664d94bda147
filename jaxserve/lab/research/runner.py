"""Runs the points of a sweep and keeps a line of JSON for each.

A line has the point (`settings`, `load`), what came of it (`live`, `simulated`: figures, or null),
`reason` where nothing did, and what it was run on. A sweep that was cut short goes on where it was:
points whose keys are in the file are not run again.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxserve.cli.answers import NoAnswer, answer_of
from jaxserve.group.own_code import own_command
from jaxserve.lab.research.drive import figures, virtual
from jaxserve.lab.research.points import Point
from jaxserve.lab.simulate.run import System, check_classes, shape_of
from jaxserve.observe.machine import machine
from jaxserve.settings.schema import ConfigError

RUNS = ("live", "simulated", "both")
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Runner:
    """Settings by which points are run.

    run: live on the devices here, simulated on `gpu`s, or both: live, and simulated with the costs
    that were measured here. limit: seconds for a live point. Errors: ConfigError.
    """

    run: str = "both"
    gpu: str | None = None
    limit: float = 600.0

    def __post_init__(self) -> None:
        if self.run not in RUNS:
            raise ConfigError("run", f"{self.run!r} is not one of {', '.join(RUNS)}")
        if (self.gpu is not None) != (self.run == "simulated"):
            raise ConfigError("gpu", "goes with run=simulated, and only with that")

    def __call__(self, point: Point) -> Row:
        """The line of a point; one that cannot be run has a `reason`."""
        began = time.monotonic()
        results: dict[str, Any]
        try:
            point.config()
            point.load.schedule()
            results = self._live(point) if self.gpu is None else _simulated(point, self.gpu)
        except ConfigError as error:
            results = {"reason": str(error)}
        return {
            "key": key_of(point, self),
            "settings": dict(point.settings),
            "load": dataclasses.asdict(point.load),
            "gpu": self.gpu,
            "live": None,
            "simulated": None,
            "reason": "",
            **results,
            "seconds": round(time.monotonic() - began, 3),
            "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": machine(),
        }

    def _live(self, point: Point) -> dict[str, Any]:
        asked = json.dumps({"point": point.given, "simulated": self.run == "both"})
        try:
            return answer_of(own_command("jaxserve.lab.research.measure"), self.limit, asked)
        except TimeoutError as error:
            return {"reason": str(error)}
        except NoAnswer as error:
            return {"reason": f"the process ended with code {error.code}: {error}"}


def key_of(point: Point, runner: Runner) -> str:
    """Returns the key of a line in a file."""
    return f"{point.key}-{runner.run}{'' if runner.gpu is None else '-' + runner.gpu}"


def sweep(
    points: Sequence[Point],
    runner: Runner,
    out: Path,
    step: Callable[[str], object] = lambda name: None,
) -> list[Row]:
    """The lines of all points, in their order; those that `out` lacks are run and added to it.
    step: called after each, with what it was. Errors: ConfigError for a file that is no sweep's."""
    rows_by_key = {}
    if out.exists():
        rows_by_key = {row["key"]: row for row in read(out)}
    _cut_to_whole_lines(out)
    rows = []
    for point in points:
        key = key_of(point, runner)
        if key not in rows_by_key:
            rows_by_key[key] = runner(point)
            _append(out, rows_by_key[key])
        rows.append(rows_by_key[key])
        step(rows[-1]["reason"] or key)
    return rows


def read(file: Path) -> list[Row]:
    """The lines of a file; a last one that was cut short is left out. Errors: ConfigError."""
    lines = file.read_text().split("\n")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            if line:
                rows.append(json.loads(line))
                rows[-1]["key"]
        except (ValueError, TypeError, KeyError):
            if number == len(lines):
                break
            raise ConfigError("out", f"{file}:{number}: is not a line of a sweep") from None
    return rows


def _cut_to_whole_lines(file: Path) -> None:
    """Drops a last line that was cut short, so that the next one stands alone."""
    with open(file, "a+b") as out:
        out.seek(0)
        out.truncate(out.read().rfind(b"\n") + 1)


def _append(file: Path, row: Row) -> None:
    """Adds a line, on the disk when this returns."""
    with open(file, "ab") as out:
        out.write(json.dumps(row).encode() + b"\n")
        out.flush()
        os.fsync(out.fileno())


def _simulated(point: Point, gpu: str) -> dict[str, Any]:
    """The figures of a replica of such GPUs. Errors: ConfigError."""
    config = point.config()
    arrivals = point.load.schedule()
    system = System(
        shape_of(config.source.model),
        gpu,
        config.mesh,
        expert_parallel=config.source.enable_expert_parallel,
        ffn_over_lanes=config.source.ffn_over_lanes,
    )
    check_classes(config.scheduler, arrivals)
    replica = system.replica(config.scheduler, config.cache, config.lookahead)
    outcome = virtual(replica, arrivals, point.load.concurrency)
    return {"simulated": figures(outcome, config.scheduler)}


def unfinished(rows: Sequence[Mapping[str, Any]]) -> int:
    """Counts lines that have a reason and no figures."""
    return sum(bool(row["reason"]) for row in rows)
