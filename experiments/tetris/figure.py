"""What a sweep of Tetris' figures is given, and the command line that says it."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments import figures
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.workload import parse
from jaxserve.settings.options import Option
from jaxserve.settings.schema import ConfigError

RESULTS = Path(__file__).parent / "results"
SIBLING = Path(__file__).parents[3] / "shared" / "data"
# the public trace with lengths like the paper's short one
RECORDED = "mooncake/synthetic_trace.jsonl.gz"
# tokens; the short trace's limits
LOW = 4_000
HIGH = 95_000
TRACES = ("short", "medium", "long")  # the paper's, of which limits and mean are known (7.1)
OPTIONS = [
    Option("out", str, str(RESULTS), "folder of the CSV and PNG"),
    Option(
        "data",
        str,
        None,
        "folder with mooncake; default: JAXSERVE_DATA, else ../shared/data, else generated "
        "lengths only",
    ),
    Option("requests", int, 2000, "of a simulation", 1),
    Option("seed", int, 0, "of arrivals and lengths", 0),
]


@dataclass(frozen=True)
class TetrisSettings:
    """What a sweep is given. data: None for generated lengths only; requests: of a simulation."""

    data: Path | None = None
    requests: int = 2000
    seed: int = 0

    @property
    def traces(self) -> tuple[str, ...]:
        return TRACES if self.data is None else (*TRACES, "recorded")

    @property
    def lengths(self) -> str:
        return "generated: tetris mixes" + (
            "" if self.data is None else "; recorded: mooncake synthetic, 4k to 95k tokens"
        )

    def arrivals(self, trace: str, load: float) -> list[Arrival]:
        """Requests at so many per second: Poisson with generated lengths, or recorded ones
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
        """Errors: ConfigError for a wrong folder."""
        assert self.data is not None
        if not (self.data / RECORDED).is_file():
            raise ConfigError(
                "data",
                f"{self.data} has no {RECORDED}; give the folder that has it, or --data= to "
                "generate",
            )
        return self.data / RECORDED


@functools.cache
def _recorded(file: Path) -> list[Arrival]:
    return [arrival for arrival in parse(str(file)) if LOW <= arrival.prompt <= HIGH]


def settings_of(values: dict[str, Any]) -> TetrisSettings:
    """Errors: ConfigError for a data folder that was named and does not have the trace."""
    named = os.environ.get("JAXSERVE_DATA") if values["data"] is None else values["data"]
    data = (
        (Path(named).expanduser() if named else None)
        if named is not None
        else (SIBLING if SIBLING.is_dir() else None)
    )
    settings = TetrisSettings(data, values["requests"], values["seed"])
    if data is not None:
        settings.file()
    return settings


def main(figure: figures.Figure, arguments: Sequence[str] | None = None) -> None:
    """The command line of one figure's file."""
    figures.main(figure, OPTIONS, settings_of, arguments)
