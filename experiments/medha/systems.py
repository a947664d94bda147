"""The servers of Medha's evaluation, simulated: what a system makes of a mix at a load. Equal runs
are simulated once.

A run is cut off after 200 s (the paper lets one last an hour), so that there is time for several
seeds: what has not begun by then counts as having waited until then.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from experiments.figures import Mechanism, Row, fewest
from experiments.medha.figure import MedhaSettings
from experiments.step_counts import StepCounts
from jaxserve.lab.cli.simulate import configs, scheduling_options
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.baselines import compare
from jaxserve.lab.simulate.recorder import RequestRecord
from jaxserve.lab.simulate.run import System, execute, shape_of
from jaxserve.lab.simulate.workload import parse
from jaxserve.settings.schema import MeshConfig

RUN = 600.0  # seconds after which a run is cut off
LOADS = (0.25, 0.75, 1.25, 1.75)  # queries per second (Medha 5.2)
PERCENTS = (5, 10, 25, 50, 75, 90, 95, 99)  # at which distributions are noted
SMALL = System(shape_of("llama3-8b"), "a100", MeshConfig(tp=8, spp=2))  # Medha 5.1: two DGX-A100
# Medha 5.3: eight DGX-H100
LARGE_2D = System(shape_of("llama3-70b"), "h100", MeshConfig(tp=8, spp=8))
LARGE_3D = System(shape_of("llama3-70b"), "h100", MeshConfig(tp=8, spp=4, kvp=2))


@dataclass(frozen=True)
class LoadCase:
    """A mix at a load. percent: of long prompts; stretch: factor on long prompts' lengths; seconds:
    after which it is cut off; tpot: objective in seconds per token, and of steps; lane_tokens: of a
    prompt on a lane, before the next joins (KVP); None: the default, by which a lane is filled."""

    qps: float
    percent: int = 5
    stretch: float = 1.0
    seconds: float = RUN
    tpot: float | None = None
    lane_tokens: int | None = None

    def arrivals(self, settings: MedhaSettings) -> list[Arrival]:
        most = math.ceil(self.qps * self.seconds)
        count = min(most, settings.requests or most)
        found = parse(
            settings.workload(self.percent), qps=self.qps, requests=count, seed=settings.seed
        )
        return [
            replace(a, prompt=round(a.prompt * self.stretch)) if a.kind == "long" else a
            for a in found
        ]


@dataclass(frozen=True)
class CaseRun:
    """Results of a case: a record per request that arrived, percentiles of the gaps between
    tokens, when it ended, the objective in seconds per token, what its steps did (of jaxserve's
    scheduler)."""

    records: list[RequestRecord]
    gaps: np.ndarray  # seconds, at PERCENTS
    end: float
    tpot_objective: float
    counts: StepCounts

    def ttft(self, kind: str = "") -> np.ndarray:
        """Seconds to the first token of each request; of one that has none, the seconds that it has
        waited."""
        return np.array(
            [
                r.ttft if r.output else self.end - r.arrival
                for r in self._of(kind)
                if r.reason != "refused"
            ]
        )

    def tpot(self, kind: str = "") -> np.ndarray:
        """Mean seconds per output token of each request that ended."""
        return np.array([r.tpot for r in self._of(kind) if r.reason == "length" and r.output > 1])

    def finished(self, kind: str = "") -> int:
        return sum(record.reason == "length" for record in self._of(kind))

    def in_time(self) -> float:
        """Share of the requests whose first token met its objective."""
        return float(np.mean([bool(r.output) and r.first <= r.due for r in self.records]))

    def met(self, kind: str) -> float:
        """Share of the requests of a class in both objectives, for the first token and per token,
        of those whose first token came or was due; NaN without any."""
        decided = [r for r in self._of(kind) if r.output or r.due <= self.end]
        met = [r.output > 0 and r.first <= r.due and self._in_pace(r) for r in decided]
        return float(np.mean(met)) if met else math.nan

    def _in_pace(self, record: RequestRecord) -> bool:
        return record.output < 2 or record.tpot <= self.tpot_objective

    def _of(self, kind: str) -> list[RequestRecord]:
        return [record for record in self.records if kind in ("", record.kind)]


def run(name: str, case: LoadCase, settings: MedhaSettings, system: System = SMALL) -> CaseRun:
    """`name`: a row of OURS, or one of the paper's schedulers, or a row of jaxserve's BASELINES."""
    noisy = replace(system, noise=settings.step_noise)
    return _run(SCHEDULERS.get(name, name), case, settings, noisy)


# policies of jaxserve under which prompts share steps: the default, which puts late prompts behind
# those in time, and Medha's Eq. 7 as printed, which does not
OURS = {"medha": "slack", "medha, Eq. 7": "relative-slack"}
# the paper's schedulers, under which no prompts share a step, as rows of BASELINES
SCHEDULERS = {"fcfs": "fcfs-unshared", "edf": "edf-unshared", "lrs": "relative-slack-unshared"}


@functools.cache
def _run(name: str, case: LoadCase, settings: MedhaSettings, system: System) -> CaseRun:
    values = {option.name: option.default for option in scheduling_options()}
    if case.tpot is not None:
        values |= {"tpot": case.tpot, "step_time": case.tpot}
    values |= {"lane_tokens": case.lane_tokens, "policy": OURS.get(name, values["policy"])}
    scheduler, cache = configs(values)
    arrivals = case.arrivals(settings)
    counts = StepCounts()
    if name in OURS:
        made = system.replica(scheduler, cache, observed=False)
        made.listeners.append(counts)
        outcome = execute(made, arrivals, until=case.seconds)
    else:
        outcome = compare(name, system, scheduler, cache, arrivals, until=case.seconds)
    end = min(case.seconds, max((record.end for record in outcome.records), default=0.0))
    gaps = (
        np.percentile(outcome.gaps, PERCENTS)
        if len(outcome.gaps)
        else np.full(len(PERCENTS), np.nan)
    )
    return CaseRun(outcome.records, gaps, end, scheduler.tpot, counts)


SHARED = Mechanism(
    "steps that prompts share", fewest("shared_steps", system="medha", long_percent=5)
)


def distribution(values: np.ndarray) -> np.ndarray:
    """At PERCENTS."""
    return np.percentile(values, PERCENTS) if len(values) else np.full(len(PERCENTS), np.nan)


def rows_of(
    name: str,
    case: LoadCase,
    settings: MedhaSettings,
    system: System = SMALL,
    label: str = "",
    kind: str = "",
) -> Iterator[Row]:
    """A run as one row per percentile."""
    result = run(name, case, settings, system)
    columns = zip(
        PERCENTS, distribution(result.ttft(kind)), distribution(result.tpot(kind)), result.gaps
    )
    for percent, ttft, tpot, gap in columns:
        yield {
            "lengths": settings.lengths,
            "system": label or name,
            "long_percent": case.percent,
            "qps": case.qps,
            "percent": percent,
            "ttft_s": float(ttft),
            "tpot_s": float(tpot),
            "gap_s": float(gap),
            "finished": result.finished(kind),
            "requests": len(result.ttft(kind)),
            "met_short": result.met("short"),
            "met_long": result.met("long"),
            "spread_steps": result.counts.spread,
            "shared_steps": result.counts.shared,
        }
