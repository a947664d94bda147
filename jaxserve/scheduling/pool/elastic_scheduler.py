"""Schedules prompts over a pool elastically: goodput first, by `elastic`."""

from __future__ import annotations

from jaxserve.scheduling.pool.elastic import BatchTimes, plan_step
from jaxserve.scheduling.pool.interface import (
    Pool,
    PoolChunk,
    PoolDecision,
    PoolScheduler,
    PoolStep,
)

MOST_PROMPTS = 64  # that a plan is made of


class ElasticScheduler(PoolScheduler):
    """Cuts the prompts of each step into batches of similar length, each on as many lanes as make
    the summed latency least (TokenLake, section 6.2).

    Lanes of a replica step together and decodes stay at home, so batches of prompts run on all
    lanes, beside the decodes: a lane that had decodes alone would wait for the others.
    """

    def __init__(self, times: BatchTimes):
        self._times = times

    def decide(self, pool: Pool, step: PoolStep) -> PoolDecision:
        """Returns batches of at most the tokens that all lanes take."""
        room = step.tokens * pool.lanes
        chunks: list[PoolChunk] = []
        for prompt, tokens in step.prompts[:MOST_PROMPTS]:
            if room:
                chunks.append(PoolChunk(prompt, min(tokens, room)))
                room -= chunks[-1].tokens
        requests = [*chunks, *(PoolChunk(decode, 1) for decode in step.decodes)]
        load = pool.get_cache_load(requests, pool.get_prefix_tree())
        lengths = [chunk.tokens for chunk in chunks]
        plan = plan_step(self._times, lengths, 0, pool.lanes, load, step.seconds)
        return PoolDecision(
            [[chunks[prompt] for prompt in batch.prompts] for batch in plan.batches],
            [batch.degree for batch in plan.batches],
        )
