"""Pages of layers with sliding windows in the cache: found, leased and retracted with their
blocks."""

from __future__ import annotations

import random

import numpy as np
import pytest

from jaxserve.cache import CacheManager, LaneRules
from jaxserve.cache.hashes import BlockHashes, group_key, is_block
from jaxserve.replica.kv_pool import LocalKvPool
from jaxserve.settings.schema import CacheConfig

BLOCK = 4
WINDOWS = (9, 21)  # of which a token sees two and five blocks before its own
REACH = (2, 5)


def manager(pages: int, lanes: int = 1) -> CacheManager:
    rules = LaneRules(most_moves=pages, ascending=True, windows=WINDOWS)
    return CacheManager(CacheConfig(block_size=BLOCK, pages=pages), lanes, 3, rules=rules)


def hashes_of(cache: CacheManager, seed: int, blocks: int) -> BlockHashes:
    tokens = np.random.default_rng(seed).integers(0, 1000, (blocks + 1) * BLOCK, np.int32)
    return cache.block_hashes("", lambda first, last: tokens[first:last])


def compute(cache: CacheManager, hashes: BlockHashes, blocks: int, slot: int = 0) -> None:
    """Has a slot compute a prompt, block by block."""
    first = len(cache.layouts[slot].pages)
    for block in range(first, blocks):
        cache.pass_windows(slot, block * BLOCK)
        cache.extend(slot, 1)
        cache.publish(slot, block, block + 1, hashes)


def hold(cache: CacheManager, hashes: BlockHashes, blocks: int) -> None:
    """Caches a prompt, as of a request that has ended."""
    cache.admit(0, cache.match(hashes, 0).pages, 0)
    compute(cache, hashes, blocks)
    cache.release(0)


def lose(cache: CacheManager, keys: list[bytes]) -> None:
    cache.pages.retract([page for key in keys for page in cache.pages.with_key.get(key, ())])


def test_a_match_is_the_longest_behind_which_no_group_lacks_a_page():
    rng = random.Random(0)
    cache = manager(200)
    for seed in range(40):
        hashes = hashes_of(cache, seed, 30)
        hold(cache, hashes, 30)
        lost = {(rng.randrange(30), rng.choice((1, 2))) for _ in range(rng.randrange(8))}
        lose(cache, [group_key(hashes[block], group) for block, group in lost])
        longest = max(
            end
            for end in range(31)
            if not any(end - REACH[group - 1] <= block < end for block, group in lost)
        )
        assert len(cache.match(hashes, 30).pages) == longest
        cache.flush()


def test_a_prompt_without_pages_of_windows_is_looked_up_in_one_pass():
    """As where these were evicted: at 128K tokens it took seconds, in every step."""
    blocks = 500
    cache = manager(4 * blocks)
    hashes = hashes_of(cache, 0, blocks)
    hold(cache, hashes, blocks)
    lose(cache, [key for key in cache.pages.with_key if not is_block(key)])

    class Counted(dict):
        count = 0

        def get(self, *arguments):
            self.count += 1
            return super().get(*arguments)

    cache.pages.with_key = counted = Counted(cache.pages.with_key)
    assert not len(cache.match(hashes, blocks).pages)
    assert counted.count <= 2 * blocks


def test_damaged_blocks_are_found_in_no_group_once_they_are_retracted():
    cache = manager(200)
    hashes = hashes_of(cache, 0, 30)
    cache.admit(0, cache.match(hashes, 0).pages, 0)
    compute(cache, hashes, 30)  # windows have passed most of it, and its pages are cached
    cache.retract(0)
    assert not cache.pages.with_key
    cache.release(0)
    cache.check()


def test_pages_of_windows_are_found_once_they_are_on_the_lane_of_their_blocks():
    """A sequence that computes the same blocks on another lane does not hide them."""
    cache = manager(200, lanes=2)
    hashes = hashes_of(cache, 0, 30)
    hold(cache, hashes, 30)
    lose(cache, [key for key in cache.pages.with_key if not is_block(key)])
    for home in (1, 0):
        cache.admit(0, cache.match(hashes, 0).pages, home)
        compute(cache, hashes, 30)
        cache.release(0)
        cache.check()
    assert len(cache.match(hashes, 30).pages) == 30


def test_a_slot_reads_a_copy_only_where_all_groups_that_see_its_block_have_one():
    cache = manager(200, lanes=2)
    hashes = hashes_of(cache, 0, 6)
    compute(cache, hashes, 6)
    pages = cache.layouts[0].of_block(5)
    copy = cache.copy(pages[0], 1)
    assert not cache.repoint(0, 5, copy, 6) and cache.layouts[0].of_block(5) == pages
    further = [cache.copy(page, 1) for page in pages[1:]]
    assert cache.repoint(0, 5, copy, 6) and cache.layouts[0].of_block(5) == [copy, *further]
    cache.check()


def test_a_block_stays_while_others_hold_one_of_its_pages():
    """They may share a page of one group alone: it was published when the others had been."""
    cache = manager(200, lanes=2)
    hashes = hashes_of(cache, 0, 6)
    compute(cache, hashes, 6)
    lose(cache, [group_key(hashes[5], 1)])
    compute(cache, hashes, 6, slot=1)
    cache.admit(2, cache.match(hashes, 6).pages, 0, hashes=hashes)
    mine, other = cache.layouts[1].of_block(5), cache.layouts[2].of_block(5)
    assert mine[0] != other[0] and mine[1] == other[1]
    cache.regroup(1, (1,))
    assert cache.rebalance(1, 6)
    cache.check()
    assert cache.layouts[1].of_block(5) == mine
    assert cache.blocks_per_lane[1].tolist() == [1, 5]


@pytest.mark.parametrize("asked", [40, 43])
def test_a_leased_prompt_is_found_whole_by_every_group(asked):
    """Also by a request of the same prompt, of which the last token is always computed."""
    cache = manager(100)
    prompt = np.arange(asked, dtype=np.int32)
    hashes = cache.block_hashes("", lambda first, last: np.arange(first, last, dtype=np.int32))
    hold(cache, hashes, 10)
    pool = LocalKvPool(cache, lambda work: work(), lambda: 0.0)
    lease = pool.lease(prompt, "", 10.0, "")
    assert lease.on_devices == pool.leases()[0].on_devices == 10
    for seed in range(10):
        hold(cache, hashes_of(cache, seed, 20), 20)
        cache.check()
    assert len(cache.match(hashes, 10).pages) == 10
    assert len(cache.match(hashes, (asked - 1) // BLOCK).pages) == (asked - 1) // BLOCK
    assert pool.release(lease.id) and not cache.pages.locks
