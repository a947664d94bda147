"""What must not grow: the step's message with the context, what is kept with the requests that
ended, numbers beyond int32."""

from __future__ import annotations

import gc
import math
import random

import numpy as np
import pytest

from jaxserve.api.request import Request
from jaxserve.api.sampling import SamplingParams
from jaxserve.cache import CacheManager
from jaxserve.scheduling import Scheduler
from jaxserve.scheduling.batch_reader import StepResults
from jaxserve.scheduling.sequence import Sequence
from jaxserve.settings.schema import CacheConfig, MeshConfig, SchedulerConfig
from tests.scheduling.fakes import Replica


def scheduler(
    tokens: int, block_size: int, lanes: int = 1, chunk: int = 65536, **fields
) -> Scheduler:
    cache = CacheManager(
        CacheConfig(block_size=block_size, pages=tokens // block_size // lanes + 64, **fields),
        lanes,
        4,
    )
    return Scheduler(
        SchedulerConfig(max_seqs=4, chunk_tokens=chunk),
        cache,
        MeshConfig(kvp=lanes),
        max_len=tokens + 1000,
    )


def request(id: str, prompt: np.ndarray, **sampling) -> Request:
    return Request.make(
        id, prompt, SamplingParams.make(**sampling), vocab=1000, max_len=len(prompt) + 1000
    )


def prefill(replica: Scheduler, now: float = 0.0) -> list:
    """All batches until the first token."""
    batches = []
    while not batches or not batches[-1].sample.all():
        batches.append(replica.start(now))
        replica.finish(batches[-1], StepResults(np.full(len(batches[-1].seq), 7)), now)
    return batches


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_decode_steps_message_is_as_large_at_a_million_tokens_as_at_a_thousand(lanes):
    sizes = []
    for tokens in (1024, 1024 * 1024):
        replica = scheduler(tokens, 16, lanes, lane_tokens=tokens // 2)
        replica.add(request("r", np.arange(tokens) % 999, max_tokens=40))
        prefill(replica)
        batches = [replica.start(0.0) for _ in range(33)]
        assert all(batch.is_decode.all() for batch in batches)
        sizes.append([batch.nbytes for batch in batches])
    assert sizes[0] == sizes[1] and max(sizes[0]) < 100


def test_the_bookkeeping_of_ten_million_tokens_fits_int32():
    tokens = 10_000_000
    size = 1024
    share = 5000
    replica = scheduler(tokens + 200_000, size, 2, lane_tokens=share * size)
    prompt = np.random.default_rng(0).integers(0, 1000, tokens)
    replica.add(request("cold", prompt, max_tokens=5))
    batches = prefill(replica)
    # a chunk of both lanes, once both hold some of it
    joined = -(-share * size // 65536) * 65536
    starts = [*range(0, joined, 65536), *range(joined, tokens, 2 * 65536)]
    assert [int(batch.start[0]) for batch in batches] == starts
    assert sum(int(batch.length[0]) for batch in batches) == tokens
    deltas = np.concatenate([batch.table_updates for batch in batches])
    assert deltas[:, 4].tolist() == list(range(-(-tokens // size)))
    assert batches[-1].blocks_per_lane[0].tolist() == [share, -(-tokens // size) - share]
    assert [bool(batch.spread[0]) for batch in batches] == [
        int(batch.start[0] + batch.length[0]) > share * size for batch in batches
    ]
    replica.add(request("warm", prompt, max_tokens=1))
    batch = replica.start(0.0)
    assert batch.start.tolist() == [tokens, tokens // size * size]
    assert np.count_nonzero(batch.table_updates[:, 1] == 1) == tokens // size + 1
    for name in ("slot", "lane", "start", "length", "blocks_per_lane", "tokens", "table_updates"):
        assert getattr(batch, name).dtype == np.int32, name
    replica.check()


def test_ten_thousand_requests_cancelled_at_any_moment_leave_nothing():
    dice = random.Random(0)
    names = iter(range(10**9))
    replica = Replica(
        SchedulerConfig(max_seqs=8, chunk_tokens=16),
        CacheConfig(block_size=4, pages=24),
        MeshConfig(kvp=2),
    )
    core = replica.scheduler
    flight = []
    alive = []
    cancelled = 0
    tokens = np.full(8, 3)
    while cancelled < 10_000:
        if len(alive) < 20:
            alive.append(f"r{next(names)}")
            prompt = np.array([dice.randrange(12) for _ in range(dice.randrange(1, 40))])
            core.add(
                request(
                    alive[-1], prompt, max_tokens=dice.randrange(1, 20), n=dice.choice((1, 1, 2))
                )
            )
        if dice.random() < 0.3 and (batch := core.start(0.0)):
            flight.append(batch)
        if flight and (len(flight) > 2 or dice.random() < 0.2):
            core.finish(flight.pop(0), StepResults(tokens), 0.0)
        alive = [id for id in alive if id in core.requests.entries]
        if alive and dice.random() < 0.9:
            core.cancel(alive.pop(dice.randrange(len(alive))), 0.0)
            cancelled += 1
        if cancelled % 100 == 0:
            core.check()
    for id in alive:
        core.cancel(id, 0.0)
    for batch in flight:
        core.finish(batch, StepResults(tokens), 0.0)
    replica.check_empty()
    core.check()
    assert (
        not core.requests.entries
        and core.requests.next_expired(math.inf) is None
        and len(core.slots.free) == 8
    )


def test_an_ended_sequence_needs_no_garbage_collector():
    def sequences() -> set[int]:
        return {id(found) for found in gc.get_objects() if isinstance(found, Sequence)}

    replica = Replica()
    gc.collect()
    gc.disable()
    others = sequences()  # of engines that other tests hold
    try:
        for length in range(1, 30):
            replica.add([1] * length, "r", max_tokens=3, n=2)
            replica.drain()
        assert not sequences() - others
    finally:
        gc.enable()
