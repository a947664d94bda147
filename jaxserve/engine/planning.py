"""Which lanes compute which part of a prompt: the lanes of a replica as the prefill instances of Tetris.

The planner of `cluster.cdsp` wants the seconds of a chunk on a group of lanes, for each size of group. They are what the engine's profile
says: a share of the linear layers for each lane, and attention with the fastest exchange among so many.
"""

from __future__ import annotations

import dataclasses
import itertools

from jaxserve.cluster import cdsp
from jaxserve.cluster.cdsp import Instances, Latency
from jaxserve.scheduling.exchange import Exchange, work_of
from jaxserve.scheduling.packing import Planner
from jaxserve.scheduling.predictor import Costs
from jaxserve.scheduling.sequence import Part

LENGTHS = 8                                           # at which a chunk is looked at, and histories, each twice the one before


def latencies(costs: Costs, exchange: Exchange, longest: int) -> dict[int, Latency]:
    """Seconds of a chunk after a history by size of group, for contexts up to `longest` tokens."""
    sizes = [2**power for power in range(exchange.lanes.bit_length()) if 2**power <= exchange.lanes]
    lengths = [max(1, longest >> power) for power in range(LENGTHS)]
    points = [(size, history, tokens, _seconds(costs, exchange, size, history, tokens))
              for size, history, tokens in itertools.product(sizes, [0, *lengths], lengths)]
    return cdsp.fit(points)


def _seconds(costs: Costs, exchange: Exchange, size: int, history: int, tokens: int) -> float:
    group = dataclasses.replace(exchange, lanes=size)
    attention = min(group.seconds(work_of([(history, tokens)], size)).values())
    return costs.launch + costs.layers * (costs.linear(-(-tokens // size)) + attention)


def planner(policy: str, rate: float, latencies: dict[int, Latency], lanes: int, block: int) -> Planner:
    """Plans by a policy of `cluster.cdsp`, each chunk but the last of whole blocks; the lanes are one node."""
    instances = Instances(latencies, lanes, block)

    def plan(pending: list[float], start: int, target: int) -> tuple[Part, ...]:
        chunks = cdsp.POLICIES[policy](instances, pending, target - start, rate).chunks
        return tuple(Part(start + chunk.history + chunk.tokens, chunk.group) for chunk in chunks)
    return plan
