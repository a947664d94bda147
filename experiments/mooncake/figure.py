"""What a sweep of Mooncake's figures is given, the command line that says it, and the paper's three
workloads."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments import figures
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.workload import parse
from jaxserve.settings.options import Option
from jaxserve.settings.schema import ConfigError

RESULTS = Path(__file__).parent / "results"
SIBLING = Path(__file__).parents[3] / "shared" / "data"
FOLDER = "mooncake"  # of the traces, in the folder of the data
ENDINGS = ("_trace.jsonl.gz", "_trace.jsonl")
OPTIONS = [
    Option("out", str, str(RESULTS), "folder of the CSV and PNG"),
    Option(
        "data",
        str,
        None,
        "folder with mooncake; default: JAXSERVE_DATA, else ../shared/data, else generated traces",
    ),
    Option("requests", int, None, "most requests of a trace; default: all, as in the paper", 1),
    Option("seed", int, 0, "of generated traces", 0),
]


@dataclass(frozen=True)
class Workload:
    """A workload as the paper's Table 3 has it: mean lengths in tokens, requests, share of the
    blocks that an unbounded cache would hit. seconds: from the first request to the last."""

    prompt: int
    output: int
    hit: float
    requests: int
    seconds: float


WORKLOADS = {
    "conversation": Workload(12035, 343, 0.40, 12031, 3537),
    "toolagent": Workload(8596, 182, 0.59, 23608, 3600),
    "synthetic": Workload(15325, 149, 0.66, 3993, 1022),
}


@dataclass(frozen=True)
class MooncakeSettings:
    """What a sweep is given. data: None for generated traces; requests: None for all."""

    data: Path | None = None
    requests: int | None = None
    seed: int = 0

    def file(self, workload: str) -> Path | None:
        """The recorded trace of a workload; None where the data have none."""
        if self.data is None:
            return None
        files = (self.data / FOLDER / f"{workload}{ending}" for ending in ENDINGS)
        return next((file for file in files if file.is_file()), None)

    def arrivals(self, workload: str, speed: float = 1.0) -> list[Arrival]:
        """The requests of a workload in order of time, as recorded, or generated at the recorded
        rate. speed: of the replay, as a multiple of the recorded one."""
        return _arrivals(self, workload, speed)

    def source(self, workload: str) -> str:
        """Where the requests of a workload are from, for the column `lengths`."""
        origin = "generated" if self.file(workload) is None else "recorded"
        part = f", at most {self.requests} requests" if self.requests else ""
        return f"{workload} {origin}{part}"


@functools.cache
def _arrivals(settings: MooncakeSettings, workload: str, speed: float) -> list[Arrival]:
    published = WORKLOADS[workload]
    file = settings.file(workload)
    rate = published.requests / published.seconds
    if file is None:
        count = min(published.requests, settings.requests or published.requests)
        mix = f"poisson:mix=mooncake-{workload}"
        return parse(mix, qps=rate * speed, requests=count, seed=settings.seed)
    found = parse(str(file), requests=settings.requests)
    if speed == 1:
        return found
    span = found[-1].time
    return parse(
        str(file), qps=(len(found) - 1) / span * speed if span else None, requests=len(found)
    )


def settings_of(values: dict[str, Any]) -> MooncakeSettings:
    """Errors: ConfigError for a data folder that was named and has no trace of Mooncake's."""
    named = os.environ.get("JAXSERVE_DATA") if values["data"] is None else values["data"]
    data = (
        (Path(named).expanduser() if named else None)
        if named is not None
        else (SIBLING if SIBLING.is_dir() else None)
    )
    settings = MooncakeSettings(data, values["requests"], values["seed"])
    if data is not None and not any(settings.file(workload) for workload in WORKLOADS):
        raise ConfigError(
            "data",
            f"{data} has no {FOLDER}/conversation{ENDINGS[0]}; give the folder that has it, or "
            "--data= to generate",
        )
    return settings


def main(figure: figures.Figure, arguments: Sequence[str] | None = None) -> None:
    """The command line of one figure's file."""
    figures.main(figure, OPTIONS, settings_of, arguments)
