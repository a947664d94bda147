"""Prefixes that many sequences read are copied, so that sequences are local on several lanes; the
device checks what its pages hold in every step."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.cache import CacheManager, LaneRules
from jaxserve.cache.copies import LEVEL_EVERY, PrefixCopies
from jaxserve.cache.hashes import is_block
from jaxserve.settings.schema import CacheConfig, MeshConfig, SchedulerConfig
from tests.cache.test_hashes import chain
from tests.scheduling.fakes import Replica

NOTHING = np.empty(0, np.intp)
SIZE = 4
PREFIX = [token % 7 for token in range(60)]
BLOCKS = len(PREFIX) // SIZE


WINDOWS = (9, 21)  # of page groups; a token sees two and five blocks before its own


def serving(
    lanes: int,
    copies: bool = True,
    placement: str = "grow",
    pages: int = 120,
    windows: tuple[int, ...] = (),
) -> Replica:
    """A replica that has computed the prefix once. pages: of a page group."""
    config = SchedulerConfig(max_seqs=12, chunk_tokens=16)
    pages *= 1 + len(windows)
    cache = CacheConfig(block_size=SIZE, pages=pages, prefix_copies=copies)
    replica = Replica(config, cache, MeshConfig(kvp=lanes), placement, windows=windows)
    replica.add([*PREFIX, 9], max_tokens=1)
    replica.drain()
    return replica


def crowd(replica: Replica, count: int = 12, tokens: int = 40) -> None:
    for number in range(count):
        replica.add([*PREFIX, number % 5, 3, 3], max_tokens=tokens, ignore_eos=True)


def run(replica: Replica, steps: int) -> None:
    for _ in range(steps):
        replica.start()
        replica.finish()


@pytest.mark.parametrize("windows", [(), WINDOWS])
@pytest.mark.parametrize("copies", [False, True])
def test_sequences_that_a_lane_cannot_take_become_local_once_their_prefix_is_copied(
    copies, windows
):
    """Of page groups with windows, what these see from its end on."""
    replica = serving(2, copies, windows=windows)
    crowd(replica)
    run(replica, 20)
    cache = replica.cache
    assert set(cache.home.tolist()) == {0, 1}  # a step takes no more new prompts on one lane
    assert (cache.group_size == 1).all() == copies
    assert (replica.device.moved >= BLOCKS + 7 * bool(windows)) == copies
    replica.drain()
    replica.check_answers()
    assert sum(map(is_block, cache.pages.copied)) == BLOCKS * copies
    crowd(replica, tokens=8)
    local = []
    while replica.scheduler.load().running or replica.scheduler.load().waiting:
        run(replica, 1)
        local.append((cache.group_size == 1).all())
    assert all(local) == copies
    replica.check_answers()


def test_a_lane_that_alone_is_read_is_relieved():
    """One after the other, so that all fit where the prefix is."""
    replica = serving(4)
    for number in range(12):
        replica.add([*PREFIX, number % 5, 3, 3], max_tokens=80, ignore_eos=True)
        run(replica, 3)
    reads = replica.cache.blocks_per_lane.sum(0)
    assert (replica.cache.group_size == 1).all()
    assert reads.max() < 0.6 * reads.sum() and replica.device.moved
    replica.drain()
    replica.check_answers()


def test_what_few_read_and_what_has_no_room_is_not_copied():
    replica = serving(2)
    crowd(replica, 2)
    replica.drain()
    assert not replica.device.moved
    tight = serving(2, pages=19)
    crowd(tight, 5, tokens=12)
    tight.drain()
    tight.check_answers()
    assert not tight.device.moved


@pytest.mark.parametrize("windows", [(), WINDOWS])
@pytest.mark.parametrize("placement", ["striped", "hashed", "random"])
def test_all_placements_serve_with_copies(placement, windows, monkeypatch):
    monkeypatch.setattr("jaxserve.cache.copies.LEVEL_EVERY", 4)
    replica = serving(4, placement=placement, windows=windows)
    for _ in range(2):
        crowd(replica)
        replica.drain()
    replica.check_answers()
    if placement != "striped":  # else the prefix is on one lane
        assert replica.device.moved


def hashed(lanes: int, slots: int, segment: int = 2) -> tuple[CacheManager, PrefixCopies]:
    config = CacheConfig(
        block_size=SIZE, pages=300, placement="hashed", prefix_copies=True, pool_lanes=lanes
    )
    cache = CacheManager(config, 2 * lanes, slots, rules=LaneRules(segment, most_moves=99))
    return cache, PrefixCopies(cache)


def read_by_all(cache: CacheManager, blocks: int) -> None:
    """All slots read one document, and have a block of their own."""
    hashes = chain(range(1000))
    for slot in range(len(cache.layouts)):
        match = cache.match(hashes, blocks)
        cache.admit(slot, match.pages, 0, blocks + 1, hashes=hashes)
        cache.extend(slot, blocks + 1 - len(match.pages))
        cache.publish(slot, 0, blocks, hashes)


def test_the_most_read_segments_of_overloaded_lanes_are_shared_by_copies_in_their_group():
    cache, copies = hashed(4, 10)
    read_by_all(cache, 6)  # three segments cannot be even on four lanes
    before = copies.cache.reads
    issued = np.full(10, 7 * SIZE)
    for _ in range(4 * LEVEL_EVERY):
        copies.advance(issued)
        cache.moves.take()
        cache.check()
    after = copies.cache.reads
    assert after.sum() == before.sum() and after[:4].std() < before[:4].std() / 2
    assert not after[4:].any() and cache.pages.copied


def test_a_sequence_reads_a_segment_from_the_less_read_of_two_lanes():
    cache, copies = hashed(4, 2)
    read_by_all(cache, 40)
    hashes = chain(range(1000))
    for page in cache.match(hashes, 40).pages.tolist():
        for lane in range(4):
            cache.copy(page, lane)
    cache.moves.take()
    cache.release(0)
    cache.release(1)
    pages = cache.match(hashes, 40).pages
    assert (copies.nearest(pages, 3) // 300 == 3).all()
    far = copies.nearest(pages, 5)
    lanes = (far // 300).tolist()
    assert lanes[::2] == lanes[1::2] and max(map(lanes.count, range(4))) <= 12
    assert [cache.pages.key_of[page] for page in far.tolist()] == list(hashes.keys(0, 40))
    assert cache.choose_home(pages, [0, 1, 5], 1, [2.0, 1.0, 0.0] + [0.0] * 5) == 1
