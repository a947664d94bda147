from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jaxserve.cache import CacheManager, LaneRules
from jaxserve.cache.block_events import Medium, StoredBlocks
from jaxserve.cache.hashes import CacheIdentity, block_key, root_key
from jaxserve.settings.schema import CacheConfig

SIZE = 4
SLOTS = 3


class Mirror:
    """The cache as a listener to its events knows it."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.heard: list[StoredBlocks | str] = []

    def stored(self, blocks: StoredBlocks) -> None:
        assert blocks.medium is Medium.DEVICE
        assert not self.keys & set(blocks.keys), "stored twice"
        assert len(set(blocks.keys)) == len(blocks.keys)
        self.keys |= set(blocks.keys)
        self.heard.append(blocks)

    def removed(self, keys: Sequence[bytes], medium: Medium) -> None:
        assert set(keys) <= self.keys, "removed what was not there"
        self.keys -= set(keys)
        self.heard.append("removed")

    def cleared(self, medium: Medium) -> None:
        self.keys.clear()
        self.heard.append("cleared")


def make_cache(lanes: int = 1, pages: int = 6, **fields) -> CacheManager:
    config = CacheConfig(block_size=SIZE, pages=pages, **fields)
    return CacheManager(config, lanes, SLOTS, rules=LaneRules(most_moves=pages))


def hear(cache: CacheManager) -> Mirror:
    mirror = Mirror()
    cache.events.subscribe(mirror)
    return mirror


def fill(cache: CacheManager, slot: int, tokens: Sequence[int], salt: str = "") -> None:
    """Runs a prompt of full blocks in a slot, as the scheduler does."""
    array = np.asarray(tokens, np.int32)
    hashes = cache.block_hashes(salt, lambda first, last: array[first:last])
    blocks = len(array) // SIZE
    match = cache.match(hashes, blocks)
    cache.admit(slot, match.pages, 0)
    cache.extend(slot, blocks - len(match.pages))
    cache.publish(slot, 0, blocks, hashes)


def test_a_listener_hears_of_new_blocks_with_their_parent_tokens_and_salt():
    cache = make_cache()
    fill(cache, 0, range(8), "tenant")
    mirror = hear(cache)
    fill(cache, 1, range(16), "tenant")
    root = root_key(CacheIdentity(), SIZE, "tenant")
    keys = [root]
    for first in range(0, 16, SIZE):
        keys.append(block_key(keys[-1], np.arange(first, first + SIZE)))
    present, new = mirror.heard
    assert sorted(present.keys) == sorted(keys[1:3]) and present.tokens is None
    assert (new.keys, new.parent, new.salt) == (keys[3:], keys[2], "tenant")
    assert new.tokens.tolist() == list(range(8, 16))


def test_the_first_block_of_a_sequence_has_no_parent():
    cache = make_cache()
    mirror = hear(cache)
    fill(cache, 0, range(8))
    assert mirror.heard[0].parent is None and mirror.heard[0].tokens.tolist() == list(range(8))


def test_a_listener_hears_of_evicted_retracted_and_flushed_blocks():
    cache = make_cache(pages=4)
    mirror = hear(cache)
    fill(cache, 0, range(8))
    cache.release(0)
    fill(cache, 0, range(100, 112))  # takes one of the two cached pages
    assert mirror.heard[1:] == ["removed", mirror.heard[2]] and len(mirror.keys) == 4
    cache.flush()
    assert mirror.heard[-1] == "removed" and mirror.keys == set(cache.pages.with_key)
    cache.retract(0)
    assert not mirror.keys
    cache.release(0)
    fill(cache, 0, range(8))
    cache.release(0)
    cache.flush()
    assert mirror.heard[-1] == "cleared"


def test_a_block_that_changes_lanes_is_neither_lost_nor_new():
    cache = make_cache(lanes=2)
    mirror = hear(cache)
    fill(cache, 0, range(16))
    count = len(mirror.heard)
    cache.regroup(0, (0, 1))
    assert cache.rebalance(0, 4) == 2 and cache.group_size[0] == 2
    assert len(mirror.heard) == count and mirror.keys == set(cache.pages.with_key)


def test_without_prefix_caching_there_is_nothing_to_hear():
    cache = make_cache(prefix_caching=False)
    mirror = hear(cache)
    fill(cache, 0, range(8))
    assert not mirror.heard


def test_who_unsubscribed_hears_no_more():
    cache = make_cache()
    mirror = hear(cache)
    cache.events.unsubscribe(mirror)
    assert not cache.events
    fill(cache, 0, range(8))
    assert not mirror.heard
    with pytest.raises(ValueError):
        cache.events.unsubscribe(mirror)


class Cache(RuleBasedStateMachine):
    """Whatever happens, early and late listeners know exactly the blocks that can be found."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = make_cache(lanes=2, pages=5)
        self.mirrors = [hear(self.cache)]
        self.used: set[int] = set()

    @rule(slot=st.integers(0, SLOTS - 1), document=st.integers(0, 2), blocks=st.integers(1, 4))
    def run(self, slot: int, document: int, blocks: int) -> None:
        if slot not in self.used and self.cache.available >= blocks:
            self.used.add(slot)
            fill(self.cache, slot, range(document * 1000, document * 1000 + blocks * SIZE))

    @rule(slot=st.integers(0, SLOTS - 1))
    def release(self, slot: int) -> None:
        self.used.discard(slot)
        self.cache.release(slot)

    @rule(slot=st.integers(0, SLOTS - 1))
    def retract(self, slot: int) -> None:
        self.cache.retract(slot)

    @rule(slot=st.integers(0, SLOTS - 1))
    def regroup(self, slot: int) -> None:
        if slot in self.used:
            self.cache.regroup(slot, (0, 1))
            self.cache.rebalance(slot, len(self.cache.layouts[slot].pages))

    @rule()
    def flush(self) -> None:
        self.cache.flush()

    @rule()
    def join(self) -> None:
        self.mirrors.append(hear(self.cache))

    @invariant()
    def listeners_know_what_is_there(self) -> None:
        for mirror in self.mirrors:
            assert mirror.keys == set(self.cache.pages.with_key)


TestCache = Cache.TestCase
TestCache.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
