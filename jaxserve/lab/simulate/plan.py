"""Searches for the mesh and the chunks that serve a workload best on a number of devices, by
simulating each.

All plans are tried on a part of the workload, the best of them on all of it, and of these it is
found how many requests per second they bear. All are measured by the same objectives: those of the
plan that would prefill the longest prompt soonest, so that a slow plan is not given more time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.api.request import Request, Slo
from jaxserve.checkpoint.model import ModelConfig
from jaxserve.costs.predictor import Predictor
from jaxserve.lab.quotients import quotient
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.recorder import Outcome, RequestRecord
from jaxserve.lab.simulate.run import (
    System,
    check_classes,
    drive,
    outcome_summary,
    requests,
    tpot_by_kind,
)
from jaxserve.settings.schema import (
    CacheConfig,
    ConfigError,
    MeshConfig,
    SchedulerConfig,
    check_lanes,
)

CHUNKS = (("adaptive", 8192), ("static", 2048), ("static", 512))
COARSE_SHARE = 5  # the first pass has one request in five
MIN_COARSE_REQUESTS = 40  # fewer say nothing of percentiles
CAPACITY_RUNS = 6  # simulations in the search for one capacity
MAX_REQUESTS_FACTOR = 4  # of a run at a higher rate, times the workload's own requests
GIB = 2**30

# (requests per second, number of requests) -> arrivals; None: as the workload has them
Arrivals = Callable[[float | None, int | None], list[Arrival]]


@dataclass(frozen=True)
class MeshPlan:
    """A mesh and how prompts are cut into chunks on it."""

    mesh: MeshConfig
    chunking: str
    chunk_tokens: int

    def __str__(self) -> str:
        return f"{self.mesh} {self.chunking}:{self.chunk_tokens}"


@dataclass(frozen=True)
class PlanQuestion:
    """Question that plans answer: what is to be served, on what, and how well. `scheduler` holds
    the objectives and what is not planned; `qps` and `requests` are None where the workload's own
    are meant. `attainment` is the share of each kind of requests that is to meet both objectives at
    capacity."""

    shape: ModelConfig
    device: str
    scheduler: SchedulerConfig
    cache: CacheConfig
    arrivals: Arrivals
    qps: float | None = None
    requests: int | None = None
    attainment: float = 0.9
    lookahead: int = 1
    expert_parallel: bool = False
    ffn_over_lanes: bool = False

    def system(self, mesh: MeshConfig) -> System:
        system = System(
            self.shape,
            self.device,
            mesh,
            expert_parallel=self.expert_parallel,
            ffn_over_lanes=self.ffn_over_lanes,
        )
        return system.with_cache(self.cache)

    def settings(self, mesh: MeshConfig) -> tuple[SchedulerConfig, CacheConfig]:
        """Returns the settings of a replica on this mesh: those of lanes are dropped with one
        lane."""
        if mesh.kvp > 1:
            return self.scheduler, self.cache
        return (
            dataclasses.replace(
                self.scheduler,
                exchange=SchedulerConfig.exchange,
                decode_exchange=SchedulerConfig.decode_exchange,
                planner="none",
                improvement=None,
            ),
            dataclasses.replace(self.cache, placement="grow", lane_tokens=None),
        )

    def predictor(self, plan: MeshPlan) -> Predictor:
        """Predicts what prompts take alone on a plan's mesh."""
        scheduler, cache = self.settings(plan.mesh)
        scheduler = dataclasses.replace(
            scheduler, chunking=plan.chunking, chunk_tokens=plan.chunk_tokens
        )
        return self.system(plan.mesh).replica(scheduler, cache).scheduler.predictor


@dataclass(frozen=True)
class PlanAnswer:
    """Results of simulating a plan. Seconds and tokens; `met` is the share of requests that met
    both objectives; `capacity` the most requests per second with which `attainment` of each kind
    do, None where it was not looked for; `alone` the seconds to the first token of the longest
    prompt on idle devices, None where it does not fit. `weights` are bytes on the device that has
    most."""

    plan: MeshPlan
    requests: int
    met: float
    figures: dict[str, Any]
    kv_tokens: int
    weights: int
    alone: float | None
    capacity: float | None = None

    @property
    def rank(self) -> tuple[float, float]:
        """Sort key, best first: by the share that met the objectives, then by TTFT p90."""
        return -self.met, self.figures["ttft"].get("p90", math.inf)

    @property
    def row(self) -> dict[str, Any]:
        """The answer as plain data for JSON; seconds, tokens and bytes."""
        plan = self.plan
        return {
            "plan": str(plan),
            "gpus": plan.mesh.devices,
            "mesh": str(plan.mesh),
            "chunking": plan.chunking,
            "chunk_tokens": plan.chunk_tokens,
            "requests": self.requests,
            "met": self.met,
            "capacity": self.capacity,
            "kv_tokens": self.kv_tokens,
            "weight_bytes_per_gpu": self.weights,
            "longest_alone": self.alone,
            "figures": self.figures,
        }


# --- what is possible


def meshes(
    count: int, question: PlanQuestion
) -> tuple[list[MeshConfig], list[tuple[MeshConfig, str]]]:
    """Lists the meshes of `count` devices on which the model can run, and those on which it cannot,
    with the reason."""
    possible = []
    impossible = []
    for mesh in meshes_of(count):
        reason = _obstacle(mesh, question)
        if reason:
            impossible.append((mesh, reason))
        else:
            possible.append(mesh)
    return possible, impossible


def meshes_of(count: int) -> Iterator[MeshConfig]:
    """All meshes of `count` devices, whether a model can run on them or not."""
    for tp in _divisors(count):
        for spp in _divisors(count // tp):
            yield MeshConfig(spp=spp, kvp=count // tp // spp, tp=tp)


def _divisors(number: int) -> list[int]:
    return [degree for degree in range(1, number + 1) if number % degree == 0]


def _obstacle(mesh: MeshConfig, question: PlanQuestion) -> str:
    """Returns why the model cannot run on this mesh; '' if it can."""
    system = question.system(mesh)
    if reason := system.obstacle():
        return reason
    if (tokens := system.kv_tokens(question.scheduler.max_seqs)) < 2 * question.cache.block_size:
        return f"KV of {tokens} tokens fits, which is less than two blocks"
    scheduler, cache = question.settings(mesh)
    try:
        check_lanes(mesh, cache, scheduler)
    except ConfigError as error:
        return str(error)
    return ""


def plans(
    meshes: Sequence[MeshConfig], chunks: Sequence[tuple[str, int]] = CHUNKS
) -> list[MeshPlan]:
    return [MeshPlan(mesh, *chunk) for mesh in meshes for chunk in chunks]


# --- one plan


class PlanRunner:
    """Simulates plans on one workload, all by the same objectives. Errors: ConfigError for a class
    of requests that none is of."""

    def __init__(self, question: PlanQuestion, plans: Sequence[MeshPlan]):
        self.question = question
        self.arrivals = question.arrivals(question.qps, question.requests)
        check_classes(question.scheduler, self.arrivals)
        self.longest = max(arrival.prompt for arrival in self.arrivals)
        every = [question.predictor(plan) for plan in plans]
        chunks = [plan.chunk_tokens for plan in plans]
        self._soonest, self._chunk = min(
            zip(every, chunks), key=lambda pair: pair[0].prefill(0, self.longest, pair[1])
        )

    @property
    def rate(self) -> float:
        """Requests per second, as given or as they come."""
        span = self.arrivals[-1].time - self.arrivals[0].time
        return self.question.qps or quotient(len(self.arrivals), span, 1.0)

    def objective(self, prompt: int, class_name: str | None = None) -> float:
        """Seconds to the first token that every plan is measured by, for a prompt of this
        length."""
        stated = self.question.scheduler.objectives[class_name]
        return max(stated.ttft, stated.ttft_stretch * self._soonest.prefill(0, prompt, self._chunk))

    def answer(self, plan: MeshPlan, requests: int | None = None) -> PlanAnswer:
        """Simulates a plan at the question's rate, with the first `requests` of its requests."""
        system = self.question.system(plan.mesh)
        scheduler = self.question.scheduler
        outcome = self.run(plan, self.arrivals[:requests])
        alone = self.run(plan, [Arrival(0.0, self.longest, 1)]).records[0]
        block = self.question.cache.block_size
        return PlanAnswer(
            plan,
            len(outcome.records),
            met(outcome.records),
            outcome_summary(outcome, scheduler.tpot, tpot_by_kind(scheduler))["all"],
            plan.mesh.kvp * (system.kv_tokens(scheduler.max_seqs) // block) * block,
            system.weights,
            None if alone.reason == "refused" else alone.ttft,
        )

    def met_at(self, plan: MeshPlan, qps: float) -> float:
        """The share of requests that meet both objectives where they come at this rate, for as long
        as at the question's rate, so that a queue that grows shows; of the kind that fares worst,
        for a few long ones could all be late in a large share of all."""
        count = len(self.arrivals)
        arrivals = self.question.arrivals(
            qps,
            min(
                max(round(count * qps / self.rate), MIN_COARSE_REQUESTS),
                MAX_REQUESTS_FACTOR * count,
            ),
        )
        records = self.run(plan, arrivals).records
        kinds = {record.kind for record in records}
        return min(met([record for record in records if record.kind == kind]) for kind in kinds)

    def run(self, plan: MeshPlan, arrivals: Sequence[Arrival]) -> Outcome:
        question = self.question
        scheduler, cache = question.settings(plan.mesh)
        config = dataclasses.replace(
            scheduler, chunking=plan.chunking, chunk_tokens=plan.chunk_tokens
        )
        replica = question.system(plan.mesh).replica(
            config, cache, question.lookahead, observed=False
        )
        info = replica.info
        coming = (
            (self._with_objective(request), kind)
            for request, kind in requests(arrivals, info.max_model_len, Slo(), info.class_names)
        )
        return drive(replica, coming, deadline=_stated_deadline).outcome()

    def _with_objective(self, request: Request) -> Request:
        slo = request.slo
        ttft = self.objective(len(request.prompt), slo.class_name)
        return dataclasses.replace(request, slo=dataclasses.replace(slo, ttft=ttft))


def _stated_deadline(request: Request) -> float:
    """Returns when a first token is due for all meshes alike, also those on which the prompt takes
    longer than that alone."""
    assert request.slo.ttft is not None
    return request.arrival + request.slo.ttft


def met(records: Sequence[RequestRecord]) -> float:
    """The share of requests that kept all their objectives."""
    return sum(record.in_time for record in records) / max(1, len(records))


# --- the search


def search(
    trial: PlanRunner,
    plans: Sequence[MeshPlan],
    best: int,
    step: Callable[[str], None] = lambda name: None,
) -> list[PlanAnswer]:
    """Answers to all plans, best first: the `best` ones on all requests and with their capacity,
    then the others on a part of them.

    step: called after each of `simulations` with what was simulated.
    """
    few = max(MIN_COARSE_REQUESTS, len(trial.arrivals) // COARSE_SHARE)
    coarse = []
    for plan in plans:
        coarse.append(trial.answer(plan, few))
        step(str(plan))
    coarse.sort(key=lambda answer: answer.rank)
    full = []
    for answer in coarse[:best]:
        full.append(trial.answer(answer.plan))
        step(str(answer.plan))
    return [
        _with_capacity(trial, answer, step)
        for answer in sorted(full, key=lambda answer: answer.rank)
    ] + coarse[best:]


def simulations(plans: int, best: int) -> int:
    """The number of simulations in a search."""
    return plans + min(best, plans) * (1 + CAPACITY_RUNS)


def _with_capacity(
    trial: PlanRunner, answer: PlanAnswer, step: Callable[[str], None]
) -> PlanAnswer:
    def share(qps: float) -> float:
        found = trial.met_at(answer.plan, qps)
        step(f"{answer.plan} at {qps:.3g}/s")
        return found

    return dataclasses.replace(
        answer, capacity=capacity(share, trial.rate, trial.question.attainment)
    )


def capacity(
    met: Callable[[float], float], rate: float, attainment: float, runs: int = CAPACITY_RUNS
) -> float:
    """The largest rate with which `met` is at least `attainment`, as far as `runs` questions tell;
    0 where it is at none of them.

    `rate` is doubled or halved until one is met and another is not; then their geometric mean
    decides.
    """
    low = 0.0
    high = math.inf
    for _ in range(runs):
        if met(rate) >= attainment:
            low = rate
        else:
            high = rate
        if high == math.inf:
            rate = 2 * low
        elif low:
            rate = math.sqrt(low * high)
        else:
            rate = high / 2
    return low
