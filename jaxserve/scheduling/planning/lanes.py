"""Plans which lanes of a replica compute which part of a prompt, by `cdsp`.

The lanes are the prefill instances of Tetris. The seconds of a chunk on a group of lanes are those
of the steps that it will take (`Predictor`): each lane of the group computes a share of the linear
layers, and attention takes as long as with the exchange that these steps would choose.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from jaxserve.costs.predictor import Predictor
from jaxserve.lanes.groups import group_sizes
from jaxserve.scheduling.planning import cdsp
from jaxserve.scheduling.planning.cdsp import Instances
from jaxserve.scheduling.planning.improvement import ImprovementRate
from jaxserve.scheduling.sequence import PlanPart
from jaxserve.settings.schema import SchedulerConfig

IMPROVEMENT = 0.1  # share of a prompt's time that more lanes must save, where nobody knows better
LENGTHS = 8  # lengths of chunks and of histories to predict, each twice the one before


def instances_of(predictor: Predictor, step: int, longest: int, block: int) -> Instances:
    """The lanes, all in one node, with latencies for contexts up to `longest` tokens, in steps of
    `step` tokens for each lane. Chunks but the last are of whole blocks."""
    sizes = group_sizes(predictor.mesh.kvp)
    lengths = [max(1, longest >> power) for power in range(LENGTHS)]
    points = [
        (size, history, tokens, predictor.prefill_on(size, history, history + tokens, step))
        for size, history, tokens in itertools.product(sizes, [0, *lengths], lengths)
    ]
    return Instances(cdsp.fit(points), predictor.mesh.kvp, block, aligned=True)


def improvement_rates(
    scheduler: SchedulerConfig, profiled: Mapping[float, float] = {}
) -> Mapping[float, float]:
    """Improvement rate by requests per second: as it is set, else as it was profiled."""
    if scheduler.improvement is not None:
        return {0.0: scheduler.improvement}
    return profiled or {0.0: IMPROVEMENT}


class LanePlanner:
    """A Planner that follows a policy of `cdsp`. rates: improvement rate by requests per second;
    the rate follows the load."""

    def __init__(self, policy: str, instances: Instances, rates: Mapping[float, float]):
        self.instances = instances
        self._policy = cdsp.POLICIES[policy]
        self._rate = ImprovementRate(rates)

    def arrived(self, now: float) -> None:
        """Notes a request that comes at this clock second."""
        self._rate.arrived(now)

    def __call__(self, pending: list[float], start: int, target: int) -> tuple[PlanPart, ...]:
        """A plan for tokens `start` to before `target`; pending: seconds of prefill that each lane
        has to do first."""
        chunks = self._policy(
            self.instances, pending, target - start, self._rate.value, start
        ).chunks
        return tuple(PlanPart(chunk.history + chunk.tokens, chunk.group) for chunk in chunks)
