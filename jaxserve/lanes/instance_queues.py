"""Queues of prefill instances that are given plans of `lanes.cdsp`, in simulations."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxserve.lanes.cdsp import CdspPlan


class PlanRun(NamedTuple):
    """Result of a plan. ttft: seconds. Instance seconds: computed, while its chunks ran; exposed,
    of these, while history moved to instances that joined and nothing else ran; idle, while
    instances waited for others of their group."""

    ttft: float
    computed: float
    exposed: float
    idle: float


class PlannedQueues:
    """Queues of `count` instances whose chunks take what was planned: the work each was given."""

    def __init__(self, count: int):
        self._free = np.zeros(count)  # clock second at which each is free
        self._queues = self._free

    def seconds(self, now: float) -> np.ndarray:
        """Returns the seconds until each instance has done what it was given: [count]."""
        self._queues = np.maximum(self._free - now, 0.0)
        return self._queues

    def give(self, plan: CdspPlan, now: float) -> PlanRun:
        """Has instances do a plan, which was made for the queues that `seconds(now)` gave."""
        computed = exposed = idle = 0.0
        for chunk in plan.chunks:
            group = list(chunk.group)
            idle += float((chunk.start - self._queues[group]).sum())
            computed += (chunk.end - chunk.start) * len(group)
            exposed += chunk.exposed * len(group)
            self._queues[group] = chunk.end
        self._free = now + self._queues
        return PlanRun(plan.ttft, computed, exposed, idle)

    def hold(self, instance: int, seconds: float) -> None:
        """Has an instance do something else, for that long, after the plan that was given last."""
        self._free[instance] += seconds
