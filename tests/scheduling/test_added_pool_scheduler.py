"""A scheduler over the pool that is added from outside: it asks what is cached and how loaded lanes
are, decides batches and degrees, and never names a lane."""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import pytest

from jaxserve.api.request import Request
from jaxserve.api.sampling import SamplingParams
from jaxserve.cache import CacheManager
from jaxserve.costs.coefficients import Costs
from jaxserve.lab.simulate.replica import VirtualReplica
from jaxserve.scheduling import Scheduler
from jaxserve.scheduling.pool.interface import (
    Pool,
    PoolChunk,
    PoolDecision,
    PoolScheduler,
    PoolStep,
)
from jaxserve.settings.schema import CacheConfig, MeshConfig, SchedulerConfig
from tests.replica.holders import Heard
from tests.scheduling.fakes import Replica

LANES = MeshConfig(kvp=4)
SECONDS = Costs(layers=1, linear_token=1e-4, pair=1e-8, read=1e-8, decode_kv=1e-8)
CONFIG = SchedulerConfig(max_seqs=6, chunk_tokens=16, min_chunk=4)
MATCHED = dataclasses.replace(CONFIG, matched_homes=True)


class MostCachedFirst(PoolScheduler):
    """Gives the prompt of which most is cached half of the lanes, all others one lane each, and
    nothing while the cache takes nearly all there is."""

    def __init__(self) -> None:
        self.loads: list[float] = []
        self.degrees: set[int] = set()

    def decide(self, pool: Pool, step: PoolStep) -> PoolDecision:
        tree = pool.get_prefix_tree()
        requests = [*step.prompts, *(PoolChunk(number, 1) for number in step.decodes)]
        self.loads.append(pool.get_cache_load(requests, tree))
        if self.loads[-1] > 0.99 and step.decodes:
            return PoolDecision([], [])
        first, *others = sorted(
            step.prompts, key=lambda chunk: pool.cached(chunk.prompt), reverse=True
        )
        wide = pool.degrees[-1] // 2
        batches = [[first], *([chunk] for chunk in others[: pool.lanes - wide])]
        degrees = [wide] + [1] * (len(batches) - 1)
        self.degrees.update(degrees)
        return PoolDecision(batches, degrees)


def prompt(rng: random.Random, shared: list[int]) -> list[int]:
    return shared[: rng.choice([0, 24, 40])] + [
        rng.randrange(12) for _ in range(rng.randint(1, 60))
    ]


def busy(replica: Replica) -> None:
    """Runs random requests behind a shared prefix, and checks their answers."""
    rng = random.Random(0)
    shared = [rng.randrange(12) for _ in range(40)]
    for _ in range(30):
        replica.add(prompt(rng, shared), max_tokens=rng.randint(1, 8))
        for _ in range(rng.randint(0, 2)):
            batch = replica.start()
            if batch is not None:
                replica.finish()
    replica.drain()
    replica.check_answers()


@pytest.mark.parametrize("placement", ["hashed", "random"])
def test_its_batches_have_the_tokens_that_they_should(placement):
    scheduler = MostCachedFirst()
    busy(Replica(CONFIG, CacheConfig(4, 40), LANES, placement, costs=SECONDS, planner=scheduler))
    assert scheduler.degrees == {1, 2}
    assert 0 < max(scheduler.loads) < 1


@pytest.mark.parametrize("pages", [12, 40])
def test_matched_homes_have_the_tokens_that_they_should(pages):
    replica = Replica(MATCHED, CacheConfig(4, pages), LANES, "hashed", costs=SECONDS)
    busy(replica)


def test_its_batches_are_dealt_over_as_many_lanes_as_it_says():
    replica = Replica(
        CONFIG, CacheConfig(4, 40), LANES, "hashed", costs=SECONDS, planner=MostCachedFirst()
    )
    for first in range(3):
        replica.add([first] * 60, max_tokens=2)
    batch = replica.step()
    lanes = [over for _, over in sorted(batch.dealt.items())]
    assert (
        sorted(map(len, lanes)) == [1, 1, 2] and len({lane for over in lanes for lane in over}) == 4
    )


def test_it_runs_a_virtual_replica():
    config = SchedulerConfig(max_seqs=6, chunk_tokens=64)
    room = CacheConfig(16, 60, placement="hashed")
    cache = CacheManager(room, LANES.kvp, config.max_seqs)
    scheduler = MostCachedFirst()
    core = Scheduler(config, cache, LANES, 500, costs=SECONDS, planner=scheduler)
    replica = VirtualReplica(core, room, LANES)
    replica.start()
    sinks = [Heard() for _ in range(8)]
    for number, sink in enumerate(sinks):
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        tokens = np.arange(200 + number, dtype=np.int32)
        replica.submit(Request(str(number), tokens, params), sink)
    replica.advance(math.inf)
    assert [len(sink.tokens) for sink in sinks] == [5] * 8 and scheduler.degrees == {1, 2}


def test_the_tree_knows_what_is_read_and_forgets_what_is_evicted():
    replica = Replica(CONFIG, CacheConfig(4, 20), LANES, "hashed", costs=SECONDS)
    pool = replica.scheduler.pool
    tree = pool.get_prefix_tree()
    assert len(tree) == 0 and not list(tree.walk())
    for last in (1, 2):
        replica.add([7] * 21 + [last] * 3, max_tokens=20, ignore_eos=True)
        replica.step()
    (root,) = tree.children()
    assert root.accesses == 2 and root.parent is None
    counts = [node.accesses for node in tree.walk()]
    assert counts == sorted(counts, reverse=True), "no block is read more than the one before it"
    assert counts[:5] == [2] * 5 and len(tree) == len(counts)
    assert {node.key for node in tree.walk()} == set(replica.cache.pages.with_key)
    replica.drain()
    assert root.key in tree and tree.node(root.key).accesses == 0
    replica.cache.flush()
    assert len(tree) == 0 and root.key not in tree


def test_plans_send_queries_to_holders_and_batches_to_where_most_lies():
    replica = Replica(CONFIG, CacheConfig(4, 40), LANES, "hashed", costs=SECONDS)
    pool = replica.scheduler.pool
    tree = pool.get_prefix_tree()
    replica.add([3] * 9, max_tokens=1)
    replica.drain()
    replica.add([3] * 9 + [4] * 3, max_tokens=1)
    (number,) = replica.scheduler.sequences
    assert pool.cached(number) == 8
    plans = pool.gen_plans([[PoolChunk(number, 4)]], [1], tree)
    holders = {page // replica.cache.pages.per_lane for page in replica.cache.pages.key_of}
    assert set(np.flatnonzero(plans.query_plans[0]).tolist()) == holders
    assert plans.transfer_plans.sum() == 4
    (group,) = plans.groups
    assert len(group) == 1 and group.start in holders | set(
        np.flatnonzero(plans.transfer_plans[0]).tolist()
    )
    with pytest.raises(ValueError, match="room"):
        pool.gen_plans([[PoolChunk(number, 2)]] * 5, [1] * 5, tree)


def test_prompts_of_a_step_get_their_homes_together():
    """Each where its prefix lies, and no lane many more than the others."""
    replica = Replica(MATCHED, CacheConfig(4, 40), LANES, "hashed", costs=SECONDS)
    for first in range(4):
        replica.add([first] * 5, max_tokens=1)
    replica.drain()
    lanes = {page // replica.cache.pages.per_lane for page in replica.cache.pages.key_of}
    for first in (3, 1, 0, 2):
        replica.add([first] * 4 + [9] * 2, max_tokens=1)
    batch = replica.start()
    assert sorted(batch.lane.tolist()) == [0, 1, 2, 3]
    at_home = batch.blocks_per_lane[range(4), batch.lane] > 0
    assert np.count_nonzero(at_home) >= len(lanes) >= 2
    replica.finish()
    for _ in range(6):
        replica.add([3] * 4 + [8] * 2, max_tokens=9, ignore_eos=True)
    batch = replica.start()
    assert batch.lane.size == 6
    assert np.bincount(batch.lane).max() <= 2, "also of one prefix"
    replica.finish()
    replica.drain()
    replica.check_answers()
