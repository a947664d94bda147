"""Simulates prefill instances that a planner of `lanes.cdsp` plans for as each request
comes (Tetris and what it is compared with).

A request is planned once, when it arrives, against the queue times that the plans before it left.
Chunks take what the latency model says, so that a plan is also what happens; or, with noise, what
is drawn around that: plans are then made of predictions, corrected by when chunks have ended.
What moving KV to instances that join exposes, `Instances.growth`, is part of the chunk's time.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.noise import NO_NOISE, Noise
from jaxserve.lanes.cdsp import CdspPlan, Instances, Planning
from jaxserve.lanes.instance_queues import PlannedQueues, PlanRun

Rate = Callable[[float], float]  # improvement rate for a request that comes at this second
# seconds for which a request keeps one of its instances after its first token
Held = Callable[[Arrival], float]


def constant(rate: float) -> Rate:
    return lambda now: rate


@dataclass(frozen=True)
class PrefillOutcome:
    """Results of a run of arrivals. ttft: [requests] seconds. Of the instances' time from the first
    arrival to the last end, busy: the share in which they computed; exposed: the share, of these,
    in which history moved to instances that joined, and nothing else ran; idle: the share in which
    they were kept for a group whose others were not free. tokens_per_s: of prompts, over the same
    time. several: how many of the plans have several chunks."""

    ttft: np.ndarray
    busy: float
    exposed: float
    idle: float
    tokens_per_s: float
    several: int


class InstanceQueues(Protocol):
    """Queues of instances: the work that each was given."""

    def seconds(self, now: float) -> np.ndarray:
        """Returns the predicted seconds until each instance has done what it was given."""

    def give(self, plan: CdspPlan, now: float) -> PlanRun:
        """Has instances do a plan, which was made for the queues that `seconds(now)` gave."""

    def hold(self, instance: int, seconds: float) -> None:
        """Has an instance do something else, for that long, after the plan that was given last."""


class GivenWork(NamedTuple):
    """Something that a group of instances does until clock second `end`. predicted: [group] clock
    seconds at which it was to end, less what was known to be late then. Ordered by `end`."""

    end: float
    number: int
    group: np.ndarray
    predicted: np.ndarray


class DrawnQueues:
    """Queues of instances whose chunks take a drawn factor of what was predicted. An instance does
    what it was given in order; a chunk begins when all of its group are free. When something ends
    later or earlier than was predicted, all that its instances were given after it shifts."""

    def __init__(self, count: int, noise: Noise):
        self._factor = noise.draws()
        self._free = np.zeros(count)  # clock second at which each will be free, once drawn
        self._predicted = np.zeros(count)  # the same as predicted, less how late it is
        self._late = np.zeros(count)  # seconds by which each is known to be late
        self._given: list[GivenWork] = []  # a heap
        self._count = itertools.count()

    def seconds(self, now: float) -> np.ndarray:
        """See `InstanceQueues`: what has ended is known, how long the rest takes is not."""
        while self._given and self._given[0].end <= now:
            done = heapq.heappop(self._given)
            self._late[done.group] = done.end - done.predicted
        return np.maximum(self._predicted + self._late - now, 0.0)

    def give(self, plan: CdspPlan, now: float) -> PlanRun:
        """See `InstanceQueues`."""
        computed = exposed = idle = 0.0
        end = now
        for chunk in plan.chunks:
            group = np.array(chunk.group)
            free = np.maximum(self._free[group], now)
            start = float(free.max())
            factor = self._factor()
            end = start + (chunk.end - chunk.start) * factor
            exposed += chunk.exposed * factor * len(group)
            idle += float((start - free).sum())
            computed += (end - start) * len(group)
            self._give(group, end, now + chunk.end)
        return PlanRun(end - now, computed, exposed, idle)

    def hold(self, instance: int, seconds: float) -> None:
        """See `InstanceQueues`."""
        group = np.array([instance])
        predicted = float(self._predicted[instance] + self._late[instance])
        self._give(group, float(self._free[instance]) + seconds, predicted + seconds)

    def _give(self, group: np.ndarray, end: float, predicted: float) -> None:
        self._free[group] = end
        self._predicted[group] = predicted - self._late[group]
        work = GivenWork(end, next(self._count), group, self._predicted[group])
        heapq.heappush(self._given, work)


@dataclass(frozen=True)
class PrefillInstances:
    """Prefill instances, `count` of them, and the policy that plans for them. held: None where
    requests decode elsewhere. noise: spread of the times of chunks around their prediction."""

    instances: Instances
    count: int
    policy: Planning
    rate: Rate
    held: Held | None = None
    noise: Noise = NO_NOISE

    def _queues(self) -> InstanceQueues:
        if self.noise.sigma:
            return DrawnQueues(self.count, self.noise)
        return PlannedQueues(self.count)

    def run(self, arrivals: Sequence[Arrival]) -> PrefillOutcome:
        """Serves arrivals in the order of their time. Errors: ConfigError, of the policy."""
        queues = self._queues()
        several = 0
        computed = exposed = idle = 0.0
        ttft = np.empty(len(arrivals))
        for number, arrival in enumerate(arrivals):
            now = arrival.time
            waiting = queues.seconds(now)
            plan = self.policy(self.instances, waiting, arrival.prompt, self.rate(now))
            done = queues.give(plan, now)
            ttft[number] = done.ttft
            idle += done.idle
            computed += done.computed
            exposed += done.exposed
            several += len(plan.chunks) > 1
            if self.held:
                queues.hold(plan.chunks[-1].group[0], self.held(arrival))
        ends = np.array([arrival.time for arrival in arrivals]) + ttft
        span = float(ends.max() - arrivals[0].time)
        time = span * self.count
        tokens = sum(arrival.prompt for arrival in arrivals)
        return PrefillOutcome(
            ttft, computed / time, exposed / time, idle / time, tokens / span, several
        )
