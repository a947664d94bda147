"""The servers of Medha's evaluation, simulated: what a system makes of a mix at a load. Equal runs
are simulated once, and `make_ahead` simulates many in several processes.

A run is cut off after an hour, as the paper's are: what has not begun by then counts as having
waited until then.
"""

from __future__ import annotations

import functools
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace

import numpy as np

from experiments.figures import Mechanism, Row, fewest
from experiments.medha import apart
from experiments.medha.figure import MedhaSettings
from experiments.step_counts import StepCounts
from jaxserve.lab.cli.simulate import configs, scheduling_options
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.baselines import POOLS, compare, pool, serve_elastic
from jaxserve.lab.simulate.loongserve import PUBLISHED, LoongPool
from jaxserve.lab.simulate.recorder import Outcome, RequestRecord
from jaxserve.lab.simulate.run import System, execute, shape_of
from jaxserve.lab.simulate.workload import parse
from jaxserve.settings.schema import CacheConfig, MeshConfig, SchedulerConfig

LOADS = (0.25, 0.75, 1.25, 1.75)  # queries per second (Medha 5.2)
PERCENTS = (5, 10, 25, 50, 75, 90, 95, 99)  # at which distributions are noted
OURS_MS = 100  # our objective per output token, which is also the default
THEIRS_MS = 20  # the one that the paper names (2.1, and Algorithm 1 of its later version)
OBJECTIVES_MS = (OURS_MS, THEIRS_MS)
SMALL = System(shape_of("llama3-8b"), "a100", MeshConfig(tp=8, spp=2))  # Medha 5.1: two DGX-A100
# Medha 5.3: eight DGX-H100
LARGE_2D = System(shape_of("llama3-70b"), "h100", MeshConfig(tp=8, spp=8))
LARGE_3D = System(shape_of("llama3-70b"), "h100", MeshConfig(tp=8, spp=4, kvp=2))


@dataclass(frozen=True)
class LoadCase:
    """A mix at a load. percent: of long prompts; stretch: factor on long prompts' lengths; seconds:
    after which it is cut off; None: as the settings say. tpot: objective in seconds per token, and
    of steps; lane_tokens: of a prompt on a lane, before the next joins (KVP); None: the default, by
    which a lane is filled."""

    qps: float
    percent: int = 5
    stretch: float = 1.0
    seconds: float | None = None
    tpot: float | None = None
    lane_tokens: int | None = None

    def arrivals(self, settings: MedhaSettings) -> list[Arrival]:
        most = math.ceil(self.qps * self.span(settings))
        count = min(most, settings.requests or most)
        found = parse(
            settings.workload(self.percent), qps=self.qps, requests=count, seed=settings.seed
        )
        return [
            replace(a, prompt=round(a.prompt * self.stretch)) if a.kind == "long" else a
            for a in found
        ]

    def span(self, settings: MedhaSettings) -> float:
        """Clock seconds of a run."""
        return self.seconds or settings.seconds


def paced(qps: float, percent: int = 5, ms: int = OURS_MS) -> LoadCase:
    """A case with an objective per token in milliseconds."""
    return LoadCase(qps, percent, tpot=None if ms == OURS_MS else ms / 1e3)


# a system by its name in `run`, a case, and its devices
Run = tuple[str, LoadCase, System]


@dataclass(frozen=True)
class CaseRun:
    """Results of a case: a record per request that arrived, percentiles of the gaps between
    tokens, when it ended, the objective in seconds per token, what its steps did (of jaxserve's
    scheduler), the share of the time in which devices worked, what simulating it took."""

    records: list[RequestRecord]
    gaps: np.ndarray  # seconds, at PERCENTS
    end: float
    tpot_objective: float
    counts: StepCounts
    busy: float
    cpu_seconds: float

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

    def met(self, kind: str = "") -> float:
        """Share of the requests of a class in both objectives, for the first token and per token,
        of those whose first token came or was due; NaN without any."""
        decided = [r for r in self._of(kind) if r.output or r.due <= self.end]
        met = [r.output > 0 and r.first <= r.due and self._in_pace(r) for r in decided]
        return float(np.mean(met)) if met else math.nan

    def active(self) -> tuple[float, float]:
        """Means over the run: requests without their first token, and requests that decode."""
        waiting = self.ttft().sum()
        decoding = sum(min(r.end, self.end) - r.first for r in self.records if r.output)
        return waiting / self.end, decoding / self.end

    def _in_pace(self, record: RequestRecord) -> bool:
        return record.output < 2 or record.tpot <= self.tpot_objective

    def _of(self, kind: str) -> list[RequestRecord]:
        return [record for record in self.records if kind in ("", record.kind)]


# policies of jaxserve under which prompts share steps: the default, which puts late prompts behind
# those in time, and Medha's Eq. 7 as printed, which does not
OURS = {"medha": "slack", "medha, Eq. 7": "relative-slack"}
# the paper's schedulers, under which no prompts share a step, as rows of BASELINES
SCHEDULERS = {"fcfs": "fcfs-unshared", "edf": "edf-unshared", "lrs": "relative-slack-unshared"}
# schedulers with the paper's own pipeline, in which a prompt is in one stage at a time, as rows of
# BASELINES
PIPED = {"sarathi-512, PP": "sarathi-512", "fcfs, PP": "fcfs-unshared"}
COSTED = "loongserve-costs"
# LoongServe with other costs than the published ones. 24 ms for each further instance is what
# Table 1 of Tetris has over our costs; TP-2, CP-4 is how Medha (5.2) calls its LoongServe, whose
# eight instances (5.4) may then have worked as two groups of four
ELASTIC: Mapping[str, Callable[[LoongPool], LoongPool]] = {
    f"{COSTED} x0.5": lambda made: replace(made, elasticity=PUBLISHED.times(0.5)),
    f"{COSTED} x2": lambda made: replace(made, elasticity=PUBLISHED.times(2.0)),
    f"{COSTED}, ring as in Tetris": lambda made: replace(
        made, elasticity=replace(PUBLISHED, hop=0.024)
    ),
    f"{COSTED}, any time": lambda made: replace(
        made, elasticity=replace(PUBLISHED, together=0.0, wait=0)
    ),
    f"{COSTED}, CP-4": lambda made: replace(made, most=4),
}
# what does not look at the objective per token, and is simulated with ours alone
UNPACED = (*POOLS, *ELASTIC, "sarathi-512", "sarathi-2048", "sarathi-512, PP")


def run(name: str, case: LoadCase, settings: MedhaSettings, system: System = SMALL) -> CaseRun:
    """`name`: a row of OURS, PIPED or ELASTIC, or one of the paper's schedulers, or a row of
    jaxserve's BASELINES."""
    found = made(_key((name, case, system), settings))
    return found if case.tpot is None else replace(found, tpot_objective=case.tpot)


Key = tuple[str, LoadCase, MedhaSettings, System]
_MADE: dict[Key, CaseRun] = {}


def _key(one: Run, settings: MedhaSettings) -> Key:
    """What the run is known by: runs that cannot differ have the same."""
    name, case, system = one
    if name in UNPACED:
        case = replace(case, tpot=None)
    return name, case, settings, replace(system, noise=settings.step_noise)


def made(key: Key) -> CaseRun:
    """Returns what was simulated under the key, or simulates it."""
    if key not in _MADE:
        _MADE[key] = simulated(*key)
    return _MADE[key]


def distinct(runs: Iterable[Run], settings: MedhaSettings) -> list[Key]:
    """The runs of all seeds, each once, those that take longest first."""
    keys = {_key(one, seeded) for seeded in settings.each_seed() for one in runs}
    return sorted(keys, key=_work, reverse=True)


def _work(key: Key) -> tuple[float, str]:
    """About how many steps a run has, to order runs by; equal ones in any order that stays."""
    name, case, settings, system = key
    if name in (*POOLS, *ELASTIC):
        return 0.0, str(key)
    busy = 1.0 if case.percent else 0.2
    return busy * system.mesh.spp * case.span(settings) / (case.tpot or OURS_MS / 1e3), str(key)


def make_ahead(runs: Iterable[Run], settings: MedhaSettings, jobs: int) -> None:
    """Simulates in several processes what is not simulated yet."""
    keys = [key for key in distinct(runs, settings) if key not in _MADE]
    if not keys:
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(keys)), mp_context=context) as processes:
        futures = {processes.submit(made, key): key for key in keys}
        try:
            for number, future in enumerate(as_completed(futures), 1):
                key = futures[future]
                found = _MADE[key] = future.result()
                _tell(f"{number} of {len(keys)}", key, found)
        except BaseException:
            processes.shutdown(wait=False, cancel_futures=True)
            raise


def _tell(place: str, key: Key, found: CaseRun) -> None:
    name, case, settings, system = key
    objective = f"{found.tpot_objective * 1e3:.0f} ms"
    what = f"{name}, {system.mesh}, {case.qps:g}/s, {case.percent} % long, {objective}"
    told = f"{place}: {what}, seed {settings.seed}: {found.cpu_seconds:.0f} CPU s"
    print(f"{time.strftime('%H:%M:%S')} {told}", file=sys.stderr, flush=True)


def simulated(name: str, case: LoadCase, settings: MedhaSettings, system: System) -> CaseRun:
    began = time.process_time()
    values = {option.name: option.default for option in scheduling_options()}
    if case.tpot is not None:
        values |= {"tpot": case.tpot, "step_time": case.tpot}
    values |= {"lane_tokens": case.lane_tokens, "policy": OURS.get(name, values["policy"])}
    scheduler, cache = configs(values)
    arrivals = case.arrivals(settings)
    counts = StepCounts()
    span = case.span(settings)
    outcome = _outcome(name, system, scheduler, cache, arrivals, span, counts)
    end = min(span, max((record.end for record in outcome.records), default=0.0))
    gaps = (
        np.percentile(outcome.gaps, PERCENTS)
        if len(outcome.gaps)
        else np.full(len(PERCENTS), np.nan)
    )
    return CaseRun(
        outcome.records,
        gaps,
        end,
        scheduler.tpot,
        counts,
        outcome.busy,
        time.process_time() - began,
    )


def _outcome(
    name: str,
    system: System,
    scheduler: SchedulerConfig,
    cache: CacheConfig,
    arrivals: list[Arrival],
    until: float,
    counts: StepCounts,
) -> Outcome:
    """Runs the arrivals on the system of this name. counts: of the steps of a row of OURS."""
    if name in OURS:
        replica = system.replica(scheduler, cache, observed=False)
        replica.listeners.append(counts)
        return execute(replica, arrivals, until=until)
    if name in PIPED:
        return apart.execute(PIPED[name], system, scheduler, cache, arrivals, until)
    if name in ELASTIC:
        instances = ELASTIC[name](pool(system.with_cache(cache), **POOLS[COSTED]))
        return serve_elastic(instances, system, scheduler, cache, arrivals, until=until)
    return compare(SCHEDULERS.get(name, name), system, scheduler, cache, arrivals, until=until)


SHARED = Mechanism(
    "steps that prompts share", fewest("shared_steps", system="medha", long_percent=5)
)


def distribution(values: np.ndarray) -> np.ndarray:
    """At PERCENTS."""
    return np.percentile(values, PERCENTS) if len(values) else np.full(len(PERCENTS), np.nan)


def offered(case: LoadCase, settings: MedhaSettings, system: System, kind: str) -> float:
    """Seconds of prefill that the prompts of a class ask of the system per second: of each alone,
    without decodes, all its steps through one stage. Above 1 no schedule keeps up with them."""
    return _offered(replace(case, tpot=None, lane_tokens=None), settings, system, kind)


@functools.cache
def _offered(case: LoadCase, settings: MedhaSettings, system: System, kind: str) -> float:
    scheduler, cache = configs({option.name: option.default for option in scheduling_options()})
    times = system.replica(scheduler, cache).scheduler.times
    prompts = [a.prompt for a in case.arrivals(settings) if a.kind == kind]
    return sum(times.seconds(0, prompt) for prompt in prompts) / case.span(settings)


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
    waiting, decoding = result.active()
    columns = zip(
        PERCENTS,
        distribution(result.ttft(kind)),
        distribution(result.ttft("short")),
        distribution(result.tpot(kind)),
        result.gaps,
    )
    for percent, ttft, short, tpot, gap in columns:
        yield {
            "lengths": settings.lengths,
            "run_s": case.span(settings),
            "system": label or name,
            "objective_ms": round(result.tpot_objective * 1e3),
            "long_percent": case.percent,
            "qps": case.qps,
            "percent": percent,
            "ttft_s": float(ttft),
            "short_ttft_s": float(short),
            "tpot_s": float(tpot),
            "gap_s": float(gap),
            "finished": result.finished(kind),
            "requests": len(result.ttft(kind)),
            "met_short": result.met("short"),
            "met_long": result.met("long"),
            "met_all": result.met(),
            "waiting": waiting,
            "decoding": decoding,
            "busy": result.busy,
            "offered_short": offered(case, settings, system, "short"),
            "offered_long": offered(case, settings, system, "long"),
            "spread_steps": result.counts.spread,
            "shared_steps": result.counts.shared,
        }


def at(system: str, qps: float, percent: int = 50, long_percent: int = 5, ms: int = OURS_MS) -> Row:
    """Where the row of a run and a percentile is."""
    return dict(system=system, qps=qps, percent=percent, long_percent=long_percent, objective_ms=ms)


def under(ms: int) -> str:
    """An objective, for the end of what a number is; '' for ours."""
    return "" if ms == OURS_MS else f", objective of {ms} ms"


def sweep_of(runs: Iterable[Run], settings: MedhaSettings) -> Iterator[Row]:
    """All runs as rows, each once."""
    for name, case, system in dict.fromkeys(runs):
        yield from rows_of(name, case, settings, system)
