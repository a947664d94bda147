"""Settings of the sweeps of TokenLake's figures, and its three workloads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.shared_prefixes import WORKLOADS as SHARED
from jaxserve.lab.simulate.shared_prefixes import together
from jaxserve.lab.simulate.workload import parse
from jaxserve.settings.options import Option

OPTIONS = [
    Option("requests", int, None, "requests of a simulation; default: as the workload needs", 1),
    Option("seed", int, 0, "of arrivals and lengths", 0),
]
MIXED = "mixed"  # the three workloads, a third of the requests each


@dataclass(frozen=True)
class Workload:
    """A workload of the evaluation. rate: requests per second, at which searches begin. requests:
    of a simulation, of which the first third warms caches up. seconds: that it has at least, for
    requests that come fast and go on for long. name_tokens: first tokens of a
    prompt, by which a router that hashes knows its prefix. drain: seconds after the last arrival
    in which requests may end."""

    rate: float
    requests: int
    seconds: float = 0.0
    name_tokens: int = 2048
    drain: float = 60.0


WORKLOADS: dict[str, Workload] = {
    "loogle": Workload(rate=3.0, requests=300),
    "scbench": Workload(rate=0.25, requests=100, drain=120.0),
    "sharegpt-o3": Workload(rate=14.0, requests=300, seconds=75.0, name_tokens=4096 + 512),
    MIXED: Workload(rate=0.8, requests=200, drain=120.0),
}


@dataclass(frozen=True)
class TokenLakeSettings:
    """Settings of a sweep. requests: of a simulation; None for those of the workload. seed: of what
    is generated."""

    requests: int | None = None
    seed: int = 0

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        return cls(values["requests"], values["seed"])

    def arrivals(self, workload: str, qps: float, zipf: float | None = None) -> list[Arrival]:
        """Generates a workload at `qps` requests per second. zipf: exponent of its documents;
        default: the workload's own."""
        known = WORKLOADS[workload]
        count = self.requests or max(known.requests, math.ceil(qps * known.seconds))
        if workload == MIXED:
            return together(tuple(SHARED.values()), qps, count, self.seed)
        options = "" if zipf is None else f":zipf={zipf:g}"
        return parse(f"{workload}{options}", qps=qps, requests=count, seed=self.seed)

    @property
    def lengths(self) -> str:
        """Names the origin of the requests, for the column `lengths`."""
        part = f", at most {self.requests} requests" if self.requests else ""
        return f"generated: shared prefixes{part}"
