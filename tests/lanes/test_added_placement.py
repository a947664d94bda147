"""A placement that is added from outside: one class and one row of the table."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.cache import CacheManager, LaneRules
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.run import System, execute
from jaxserve.lanes.layout import SequenceLayout
from jaxserve.lanes.placement import PLACEMENTS, Placement
from jaxserve.settings.options import options_of
from jaxserve.settings.schema import CacheConfig, ConfigError, MeshConfig, SchedulerConfig
from jaxserve.settings.schema.engine import check_lanes
from tests.engine.harness import engine, generate
from tests.scheduling.fakes import CONFIG, Replica

NONE = np.empty(0, np.intp)
STRIPE = 2


class Keyed(Placement):
    """Goes where the key of its stripe's first block says: equal prefixes to equal lanes, whoever
    computes them. Blocks without a key go on behind the one before."""

    help = "where its key says"
    deals = True

    def dealt_over(self, home: int, blocks: int) -> tuple[int, ...]:
        return tuple(range(self.lanes))

    def next_lane(self, layout: SequenceLayout, available: list[int]) -> int:
        block = len(layout.pages)
        key = layout.key(block - block % self.stripe)
        lane = layout.last_lane
        if key is not None:
            lane = int.from_bytes(key[-8:], "little") % self.lanes
        return lane if available[lane] else available.index(max(available))


@pytest.fixture(autouse=True)
def keyed():
    PLACEMENTS["keyed"] = Keyed
    yield
    del PLACEMENTS["keyed"]


def placed(lanes: int, prompt: np.ndarray, home: int, **config) -> list[int]:
    """The lanes of a prompt's blocks in an empty cache, and of two decoded ones."""
    made = CacheConfig(block_size=4, pages=50, placement="keyed", **config)
    cache = CacheManager(made, lanes, 1, rules=LaneRules(STRIPE))
    hashes = cache.block_hashes("", lambda first, last: prompt[first:last])
    blocks = cache.blocks(len(prompt))
    cache.admit(0, NONE, home, blocks, hashes=hashes)
    cache.extend(0, blocks)
    cache.extend(0, 2)
    cache.check()
    return cache.layouts[0].lanes_of(0, blocks + 2).tolist()


def test_settings_take_it_by_its_name_as_long_as_it_is_there():
    mesh = MeshConfig(kvp=2)
    cache = CacheConfig(pages=10, placement="keyed")
    check_lanes(mesh, cache, SchedulerConfig())
    assert options_of(CacheConfig)["placement"].parse("keyed") == "keyed"
    with pytest.raises(ConfigError, match="keyed cannot follow --planner=cdsp; that needs str"):
        check_lanes(mesh, cache, SchedulerConfig(planner="cdsp", exchange="auto"))
    row = PLACEMENTS.pop("keyed")
    with pytest.raises(ConfigError, match="is not one of grow, striped"):
        CacheConfig(pages=10, placement="keyed")
    PLACEMENTS["keyed"] = row


def test_it_sees_the_keys_of_the_prompts_full_blocks():
    """Equal prefixes lie on equal lanes wherever home is, and stripes of two blocks stay together;
    the last block of the prompt, which is not full, and decoded ones have no key."""
    prompt = np.random.default_rng(1).integers(0, 99, 151).astype(np.int32)
    lanes = placed(4, prompt, 0)
    assert lanes == placed(4, prompt, 3) and set(lanes) == {0, 1, 2, 3}
    assert all(first == second for first, second in zip(lanes[:36:2], lanes[1:36:2]))
    assert placed(4, prompt[:99], 0)[:24] == lanes[:24]
    assert placed(4, prompt[::-1], 0) != lanes
    assert lanes[37:] == [lanes[36]] * 3  # 36 begins a stripe


def test_without_prefix_caching_no_block_has_a_key():
    prompt = np.arange(100, dtype=np.int32)
    assert set(placed(4, prompt, 2, prefix_caching=False)) == {2}


@pytest.mark.parametrize("lanes", [2, 3])
def test_a_scheduler_serves_with_it(lanes):
    """The device checks what its pages hold, and the scheduler's invariants after every step."""
    cache = CacheConfig(block_size=4, pages=30)
    replica = Replica(CONFIG, cache, MeshConfig(kvp=lanes), "keyed")
    document = [token % 7 for token in range(60)]
    for number in range(12):
        replica.add(document[: 5 * number + 1] + [number] * 3, max_tokens=20)
    replica.drain()
    replica.check_answers()
    assert not replica.cache.blocks_per_lane.any()


def test_it_is_simulated():
    replica = System(MODELS["llama3-8b"], "h100", MeshConfig(kvp=4, tp=2)).replica(
        SchedulerConfig(exchange="auto", chunk_tokens=8192, chunking="adaptive", max_seqs=16),
        CacheConfig(block_size=64, pages=700, placement="keyed"),
    )
    issued = []

    class Checked:
        def step_issued(self, batch, passage):
            issued.append(batch)

        def step_read(self, batch, now):
            replica.scheduler.check()

    replica.listeners.append(Checked())
    outcome = execute(replica, [Arrival(0.0, 60_000, 20), Arrival(0.1, 3_000, 30)])
    assert [record.reason for record in outcome.records] == ["length"] * 2
    assert all(batch.spread.any() for batch in issued)


def test_an_engine_serves_with_it_and_the_tokens_stay():
    prompts = [[3 + 7 * token % 500 for token in range(length)] for length in (150, 90, 20)]
    size = dict(chunk=32, seqs=4, pages=40, block=8, max_len=256)
    right = generate(engine(**size), prompts, max_tokens=6)
    made = engine(mesh="kvp=2", placement="keyed", **size)
    assert generate(made, prompts, max_tokens=6) == right
    assert generate(made, prompts, max_tokens=6) == right  # behind cached prefixes
    assert made.scheduler.cache.placement.deals
