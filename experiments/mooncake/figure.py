"""Settings of the sweeps of Mooncake's figures, and the paper's three workloads."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from experiments.papers import SPREAD, SweepSettings, missing, sweep_options
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.workload import parse
from jaxserve.settings.options import Option

FOLDER = "mooncake"  # of the traces, in the folder of the data
ENDINGS = ("_trace.jsonl.gz", "_trace.jsonl")
OPTIONS = [
    *sweep_options(
        "mooncake",
        "generated traces",
        Option("requests", int, None, "most requests of a trace; default: all, as in the paper", 1),
        "of generated traces, routing and noise",
    ),
    *SPREAD,
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
class MooncakeSettings(SweepSettings):
    """Settings of a sweep of Mooncake's figures."""

    def check(self, data: Path) -> None:
        if not any(self.file(workload) for workload in WORKLOADS):
            raise missing(data, f"{FOLDER}/conversation{ENDINGS[0]}")

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
        """Names the origin of the requests of a workload, for the column `lengths`."""
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
