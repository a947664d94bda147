"""Plans which lanes of a replica compute which part of a prompt, by `cdsp`.

The lanes are the prefill instances of Tetris. The seconds of a chunk on a group of lanes are those
of the steps that it will take, as the predictor says: each lane of the group computes a share of
the linear layers, and attention takes as long as with the exchange that these steps would choose.
Where a group grows, pages change lanes, which adds what the predictor says that steps expose of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from jaxserve.lanes import cdsp
from jaxserve.lanes.cdsp import Instances
from jaxserve.lanes.groups import group_sizes
from jaxserve.lanes.improvement import ImprovementRate

ELASTIC = "elastic"  # the planner of batches over a pool of KV; it plans no prompt by itself
LENGTHS = 8  # lengths of chunks and of histories to predict, each twice the one before


class PlanPart(NamedTuple):
    """A part of a plan for a prompt: the tokens from the part before to before `stop` are computed
    by these lanes, over which all blocks so far are dealt out by then. The lanes of the part before
    are among them (Tetris, section 3.1)."""

    stop: int
    lanes: tuple[int, ...]


def part_at(plan: tuple[PlanPart, ...], start: int, stop: int) -> PlanPart:
    """Returns the part of a plan with the token at `start`; where the plan is empty, all tokens to
    before `stop`, without lanes."""
    return next((part for part in plan if start < part.stop), PlanPart(stop, ()))


class PrefillTimes(Protocol):
    """Seconds of parts of a prompt alone, in steps of `chunk` tokens for each lane: see
    `costs.predictor.Predictor`."""

    def prefill_on(self, lanes: int, cached: int, total: int, chunk: int) -> float: ...
    def growth(self, before: int, after: int, history: float, chunk: int) -> float: ...


def instances_of(times: PrefillTimes, lanes: int, step: int, longest: int, block: int) -> Instances:
    """Returns the lanes, all in one node, with latencies for contexts up to `longest` tokens, in
    steps of `step` tokens for each lane. Chunks but the last are of whole blocks. A group's growth
    takes the same however long the chunk is that follows: moves go with the steps before it."""
    lengths = [max(1, longest >> power) for power in range(LENGTHS)]
    points = [
        (size, history, tokens, times.prefill_on(size, history, history + tokens, step))
        for size, history, tokens in itertools.product(group_sizes(lanes), [0, *lengths], lengths)
    ]
    growth = lambda before, after, history, tokens: times.growth(before, after, history, step)
    return Instances(cdsp.fit(points), lanes, block, aligned=True, growth=growth)


class LanePlanner:
    """Plans which lanes compute which part of a prompt, by one of `cdsp.PLANNERS`. rates:
    improvement rate by requests per second; the rate follows the load."""

    def __init__(self, name: str, instances: Instances, rates: Mapping[float, float]):
        self.instances = instances
        self._plan = cdsp.PLANNERS[name]
        self.rates = rates
        self._rate = ImprovementRate(rates)

    def arrived(self, now: float) -> None:
        """Notes a request that comes at this clock second."""
        self._rate.arrived(now)

    def __call__(self, pending: list[float], start: int, target: int) -> tuple[PlanPart, ...]:
        """Plans tokens `start` to before `target`; pending: seconds of prefill that each lane has
        to do first."""
        rate = self._rate.value
        chunks = self._plan(self.instances, pending, target - start, rate, start).chunks
        return tuple(PlanPart(chunk.history + chunk.tokens, chunk.group) for chunk in chunks)
