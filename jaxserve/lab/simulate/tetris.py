"""Simulates prefill instances that a planner of `lanes.cdsp` plans for as each request
comes (Tetris and what it is compared with).

A request is planned once, when it arrives, against the queue times that the plans before it left;
chunks take what the latency model says, so that a plan is also what happens. Moving KV to instances
that join is hidden behind compute and costs nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lanes.cdsp import Instances, Planning

# improvement rates that are tried (Tetris, 7.1)
IMPROVEMENT_RATES = (0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75)

Rate = Callable[[float], float]  # improvement rate for a request that comes at this second
# seconds for which a request keeps one of its instances after its first token
Held = Callable[[Arrival], float]


def constant(rate: float) -> Rate:
    return lambda now: rate


@dataclass(frozen=True)
class PrefillOutcome:
    """Results of a run of arrivals. ttft: [requests] seconds. Of the instances' time from the first
    arrival to the last end, busy: the share in which they computed; idle: the share in which they
    were kept for a group whose others were not free. tokens_per_s: of prompts, over the same
    time."""

    ttft: np.ndarray
    busy: float
    idle: float
    tokens_per_s: float


@dataclass(frozen=True)
class PrefillInstances:
    """Prefill instances, `count` of them, and the policy that plans for them. held: None where
    requests decode elsewhere."""

    instances: Instances
    count: int
    policy: Planning
    rate: Rate
    held: Held | None = None

    def run(self, arrivals: Sequence[Arrival]) -> PrefillOutcome:
        """Serves arrivals in the order of their time. Errors: ConfigError, of the policy."""
        free = np.zeros(self.count)
        computed = 0.0
        idle = 0.0
        ttft = np.empty(len(arrivals))
        for number, arrival in enumerate(arrivals):
            now = arrival.time
            queues = np.maximum(free - now, 0.0)
            plan = self.policy(self.instances, queues, arrival.prompt, self.rate(now))
            ttft[number] = plan.ttft
            for chunk in plan.chunks:
                group = list(chunk.group)
                idle += float((chunk.start - queues[group]).sum())
                computed += (chunk.end - chunk.start) * len(group)
                queues[group] = chunk.end
            free = now + queues
            if self.held:
                free[plan.chunks[-1].group[0]] += self.held(arrival)
        ends = np.array([arrival.time for arrival in arrivals]) + ttft
        span = float(ends.max() - arrivals[0].time)
        time = span * self.count
        return PrefillOutcome(
            ttft, computed / time, idle / time, sum(arrival.prompt for arrival in arrivals) / span
        )


def best_rates(
    instances: Instances,
    count: int,
    policy: Planning,
    arrivals: Callable[[float], Sequence[Arrival]],
    loads: Iterable[float],
    rates: Sequence[float] = IMPROVEMENT_RATES,
) -> dict[float, float]:
    """Finds the improvement rate with the least mean TTFT at each load (Tetris, 5.1). arrivals: a
    sample of requests at a number of them per second."""

    def best(sample: Sequence[Arrival]) -> float:
        return min(
            rates,
            key=lambda rate: (
                PrefillInstances(instances, count, policy, constant(rate)).run(sample).ttft.mean()
            ),
        )

    return {load: best(arrivals(load)) for load in loads}
