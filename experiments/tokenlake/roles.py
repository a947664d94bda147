"""Simulates steps over one pool of KV by plan: elastic, with fixed roles, or with both phases on
all lanes (TokenLake, 6.2 and 7.4). The replica that serves has no roles: this is a loop of its own.

Lanes step together: a step ends with its slowest batch. Batches and their seconds are those of
`jaxserve.scheduling.pool.elastic`, with times fitted to the predictor; attention over the cache is
the load L of all lanes (6.1). The cache is the engine's, least recently used blocks first; what
running sequences hold is not taken from it, which is in favour of small caches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from experiments.mooncake.cache_replay import BlockCache, block_hashes
from experiments.tokenlake.systems import CHUNK, INSTANCES, SHAPE, objectives, predictor_of
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.shared_prefixes import UNIT
from jaxserve.lanes.cdsp import Latency
from jaxserve.lanes.work import Heads
from jaxserve.scheduling.pool.elastic import BatchTimes, PromptTable, plan_step
from jaxserve.scheduling.pool.load import AttentionRates, cache_load

MOST_PROMPTS = 16  # of a step
MARGIN = 0.9  # of the time between tokens, within which a batch is to end
FLOPS_PER_S = 2 * 209e12  # of attention, by two A100 (costs/profiles.json)
BYTES_PER_S = 2 * 1.58e12
LENGTHS = (128, 512, 2048, 8192)  # tokens of prompts that times are fitted to


class Work(NamedTuple):
    """A step's work. tokens: new ones of each prompt; decodes: their number; load: of the cache;
    limit: seconds within which batches are to end."""

    tokens: np.ndarray
    decodes: int
    load: float
    limit: float


Policy = Callable[[BatchTimes, Work], float]


def elastic(times: BatchTimes, work: Work) -> float:
    """Seconds of the step by the dynamic program."""
    plan = plan_step(times, work.tokens, work.decodes, INSTANCES, work.load, work.limit)
    prompts = max((batch.seconds for batch in plan.batches), default=0.0)
    return max(prompts, _decodes(times, work, plan.decode_lanes))


def fixed(prefill: int) -> Policy:
    """Makes the policy with `prefill` lanes for prompts, and the others for decodes."""

    def seconds(times: BatchTimes, work: Work) -> float:
        decodes = _decodes(times, work, INSTANCES - prefill)
        if not len(work.tokens):
            return decodes
        order = np.sort(work.tokens)
        each = times.prompts(order, work.load)
        table = PromptTable(each, len(order), times.degrees, prefill, float("inf"))
        batches = table.batches(prefill, range(len(order)))
        return max(decodes, *(batch.seconds for batch in batches))

    return seconds


def mixed(times: BatchTimes, work: Work) -> float:
    """Seconds of one batch of both phases on all lanes."""
    tokens = np.append(work.tokens, np.ones(work.decodes))
    return float(times.prompts(tokens, work.load)[-1, _whole(len(tokens))])


def _whole(prompts: int) -> int:
    """Returns the place of the batch of all prompts among `batch_ends`."""
    return prompts * (prompts - 1) // 2


def _decodes(times: BatchTimes, work: Work, lanes: int) -> float:
    count = np.array([-(-work.decodes // max(lanes, 1))])
    return float(times.decodes(count, work.load)[0])


POLICIES: dict[str, Policy] = {
    "elastic": elastic,
    "1P3D": fixed(1),
    "3P1D": fixed(3),
    "both phases on all lanes": mixed,
}


def fitted_times() -> BatchTimes:
    """Fits the seconds of prompts on 1, 2 and 4 lanes to the predictor's."""
    found = {}
    for lanes in (1, 2, INSTANCES):
        predictor = predictor_of(lanes)
        seconds = [predictor.prefill_on(lanes, 0, n, n) for n in LENGTHS]
        columns = np.stack([np.ones(len(LENGTHS)), LENGTHS, np.square(LENGTHS)], axis=1)
        # in relation to each time, so that short prompts count as much
        weights = 1 / np.array(seconds)
        fit = np.linalg.lstsq(columns * weights[:, None], np.ones(len(LENGTHS)), rcond=None)[0]
        base, token, pair = np.maximum(fit, 0.0).tolist()
        found[lanes] = Latency(base, token, 0.0, pair)
    return BatchTimes.of(found)


@dataclass
class Job:
    """A request on its way. done: tokens of its prompt that are computed or were cached."""

    arrival: Arrival
    done: int = 0
    made: int = 0
    first: float = 0.0


def input_seconds(arrivals: Sequence[Arrival], policy: Policy, cached_tokens: int) -> float:
    """Returns the mean seconds to the first token per token of the prompt. cached_tokens: of all
    lanes that cache for prefill."""
    times = fitted_times()
    rates = AttentionRates.of(
        SHAPE.layers, Heads(SHAPE.heads, SHAPE.kv_heads, SHAPE.head_dim), FLOPS_PER_S, BYTES_PER_S
    )
    cache = BlockCache(cached_tokens // UNIT)
    coming = deque(arrivals)
    waiting: list[Job] = []
    running: list[Job] = []
    ended: list[Job] = []
    now = 0.0
    while coming or waiting or running:
        if not waiting and not running:
            now = max(now, coming[0].time)
        while coming and coming[0].time <= now:
            waiting.append(_begun(coming.popleft(), cache))
        chosen = waiting[:MOST_PROMPTS]
        tokens, chunks = _chunks(chosen)
        work = _work(times, rates, chosen[: len(chunks)], tokens, running)
        now += policy(times, work)
        for job in running:
            job.made += 1
        for job, chunk in zip(chosen, chunks):
            job.done += chunk
            if job.done >= job.arrival.prompt:
                job.made = 1
                job.first = now
                waiting.remove(job)
                running.append(job)
        ended += [job for job in running if job.made >= job.arrival.output]
        running = [job for job in running if job.made < job.arrival.output]
    return float(np.mean([(job.first - job.arrival.time) / job.arrival.prompt for job in ended]))


def _begun(arrival: Arrival, cache: BlockCache) -> Job:
    hits = cache.serve(block_hashes(arrival, ""))
    return Job(arrival, min(hits * UNIT, arrival.prompt - 1))


def _chunks(jobs: Sequence[Job]) -> tuple[np.ndarray, list[int]]:
    """Deals the tokens of a step out over the prompts, in their order."""
    left = INSTANCES * CHUNK
    chunks = []
    for job in jobs:
        chunk = min(job.arrival.prompt - job.done, left, CHUNK)
        if not chunk:
            break
        chunks.append(chunk)
        left -= chunk
    return np.array(chunks), chunks


def _work(
    times: BatchTimes,
    rates: AttentionRates,
    jobs: Sequence[Job],
    tokens: np.ndarray,
    running: Sequence[Job],
) -> Work:
    contexts = [job.arrival.prompt + job.made for job in running]
    prefix = np.array([*(job.done for job in jobs), *contexts], float)
    new = np.append(tokens, np.ones(len(running)))
    load = cache_load(prefix, new, INSTANCES, times.ideal(new), rates)
    limits = [objectives(job.arrival.prompt).tpot or 0.0 for job in running]
    return Work(tokens, len(running), load, MARGIN * min(limits, default=float("inf")))
