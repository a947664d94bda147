"""Settings of the sweeps of Tetris' figures."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.papers import SPREAD, SweepSettings, missing, sweep_options
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.workload import parse
from jaxserve.settings.options import Option

# the public trace with lengths like the paper's short one
RECORDED = "mooncake/synthetic_trace.jsonl.gz"
# tokens; the short trace's limits
LOW = 4_000
HIGH = 95_000
TRACES = ("short", "medium", "long")  # the paper's, of which limits and mean are known (7.1)
OPTIONS = [
    *sweep_options(
        "mooncake",
        "generated lengths only",
        Option("requests", int, 400, "of a simulation", 1),
        "of arrivals, lengths and noise",
    ),
    *SPREAD,
]


@dataclass(frozen=True)
class TetrisSettings(SweepSettings):
    """Settings of a sweep of Tetris' figures."""

    requests: int = 400

    def check(self, data: Path) -> None:
        self.file()

    @property
    def traces(self) -> tuple[str, ...]:
        return TRACES if self.data is None else (*TRACES, "recorded")

    @property
    def lengths(self) -> str:
        return "generated: tetris mixes" + (
            "" if self.data is None else "; recorded: mooncake synthetic, 4k to 95k tokens"
        )

    def arrivals(self, trace: str, load: float) -> list[Arrival]:
        """Returns requests at `load` per second: Poisson with generated lengths, or recorded ones
        stretched to that rate (7.2)."""
        if trace != "recorded":
            return parse(
                f"poisson:mix=tetris-{trace}", qps=load, requests=self.requests, seed=self.seed
            )
        found = _recorded(self.file())[: self.requests]
        span = found[-1].time - found[0].time
        factor = (len(found) - 1) / load / span if span else 1.0
        return [replace(arrival, time=(arrival.time - found[0].time) * factor) for arrival in found]

    def file(self) -> Path:
        """Returns the recorded trace. Errors: ConfigError for a wrong folder."""
        assert self.data is not None
        if not (self.data / RECORDED).is_file():
            raise missing(self.data, RECORDED)
        return self.data / RECORDED


@functools.cache
def _recorded(file: Path) -> list[Arrival]:
    return [arrival for arrival in parse(str(file)) if LOW <= arrival.prompt <= HIGH]
