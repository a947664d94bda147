"""A block on several pages: found on any of them, lost with the last, wherever they lie."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxserve.api.request import EPHEMERAL
from jaxserve.cache import CacheManager, LaneRules
from jaxserve.cache.block_events import BlockEvents, Medium, StoredBlocks
from jaxserve.cache.pages import PageAllocator
from jaxserve.settings.schema import CacheConfig
from tests.cache.test_hashes import chain
from tests.cache.test_tiers import Lower
from tests.examples import examples

LANES = 3
SIZE = 4
SLOTS = 3


class Mirror:
    """The keys that a listener knows."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()

    def stored(self, blocks: StoredBlocks) -> None:
        assert not self.keys & set(blocks.keys), "stored twice"
        self.keys |= set(blocks.keys)

    def removed(self, keys: Sequence[bytes], medium: Medium) -> None:
        assert set(keys) <= self.keys and len(set(keys)) == len(keys), "removed twice"
        self.keys -= set(keys)

    def cleared(self, medium: Medium) -> None:
        self.keys.clear()


def two_copies() -> tuple[PageAllocator, int, int]:
    """One block on a held page of each of two lanes."""
    pages = PageAllocator(2, 2)
    one = pages.allocate(0)
    two = pages.allocate(1)
    pages.publish(one, b"a")
    pages.add_copy(two, b"a")
    return pages, one, two


def test_the_key_stays_until_its_last_page_goes():
    events = BlockEvents()
    mirror = Mirror()
    events.subscribe(mirror)
    pages = PageAllocator(2, 1, events)
    left: list[tuple[int, bytes]] = []
    pages.on_evict = lambda page, key: left.append((page, key))
    one = pages.allocate(0)
    pages.publish(one, b"a")
    mirror.keys.add(b"a")
    two = pages.allocate(1)
    pages.add_copy(two, b"a")
    assert pages.copies(one) == pages.copies(two) == (one, two)
    pages.unref([one, two])
    assert pages.allocate(0) == one and mirror.keys == {b"a"} and pages.with_key == {b"a": (two,)}
    assert pages.allocate(1) == two and mirror.keys == set() and pages.with_key == {}
    assert left == [(one, b"a"), (two, b"a")] and pages.generation.tolist() == [1, 1]
    pages.check([one, two])


def test_a_copy_that_moves_keeps_its_place_among_the_others():
    pages, one, two = two_copies()
    (target,) = pages.move([one], 1)
    assert pages.with_key == {b"a": (target, two)}
    pages.check([target, two])


def test_damage_is_taken_from_all_copies():
    pages, one, two = two_copies()
    pages.unref([two])
    pages.retract([one])
    pages.check([one])
    assert pages.with_key == {} and not pages.cached[1] and two in pages.free[1]


def test_all_copies_that_are_not_held_are_flushed():
    pages, one, two = two_copies()
    pages.unref([two])
    assert pages.flush() == 1 and pages.with_key == {b"a": (one,)}
    pages.unref([one])
    assert pages.flush() == 1 and pages.with_key == {}
    pages.check([])


def test_a_wrong_list_of_copies_is_noticed():
    pages, one, two = two_copies()
    pages.with_key[b"a"] = (one, two, two)
    with pytest.raises(AssertionError, match="published keys"):
        pages.check([one, two])


def copied(cache: CacheManager, key: bytes, lane: int) -> int | None:
    """Copies a published block to a page of a lane, cached from then on; returns the page, None
    where the lane has no room. The source is held, so that it does not leave for the copy."""
    (source, *_) = cache.pages.with_key[key]
    cache.pages.ref(np.array([source]))
    page = None
    if cache.pages.available()[lane]:
        page = cache.pages.allocate(lane)
        cache.stores.moved([source], [page])
        cache.pages.add_copy(page, key)
        cache.pages.unref([page])
    cache.pages.unref([source])
    return page


def test_a_match_takes_the_page_that_is_chosen_and_stays_with_it():
    cache = CacheManager(CacheConfig(block_size=SIZE, pages=9), 2, SLOTS)
    hashes = chain(range(100))
    cache.admit(0, cache.match(hashes, 0).pages, 0)
    cache.extend(0, 3)
    cache.publish(0, 0, 3, hashes)
    table = cache.layouts[0].pages
    page = copied(cache, hashes[1], 1)
    first = cache.match(hashes, 3)
    assert first.pages.tolist() == table
    cache.published.choose = max
    assert cache.match(hashes, 3).pages.tolist() == [table[0], page, table[2]]
    assert cache.match(hashes, 3, first) is first
    cache.admit(1, cache.match(hashes, 3).pages, 0)
    assert cache.blocks_per_lane[1].tolist() == [2, 1] and cache.group_size[1] == 2
    cache.check()


def test_a_block_leaves_the_devices_with_its_last_page_and_its_strongest_wish():
    """The wish of the copy that goes first is passed on to the one that stays."""
    cache = CacheManager(CacheConfig(block_size=SIZE, pages=2), 2, SLOTS, lower=Lower())
    hashes = chain(range(100))
    cache.admit(0, cache.match(hashes, 0).pages, 0, retention=EPHEMERAL)
    cache.extend(0, 1)
    cache.publish(0, 0, 1, hashes)
    page = copied(cache, hashes[0], 1)
    cache.release(0)
    cache.published.choose = max
    cache.admit(0, cache.match(hashes, 1).pages, 1, retention=60)
    assert cache.layouts[0].pages == [page]
    cache.release(0)
    cache.stores.take()
    assert cache.below.stores_at_the_end().retention.tolist() == [60]
    cache.admit(0, cache.match(hashes, 0).pages, 1)
    cache.extend(0, 2)
    assert not len(cache.stores.take()) and cache.match(hashes, 1).pages.tolist() != [page]
    cache.admit(1, cache.match(hashes, 0).pages, 0)
    cache.extend(1, 2)
    stores = cache.stores.take()
    assert stores.keys == [hashes[0]] and stores.retention.tolist() == [60]


class Copies(RuleBasedStateMachine):
    """Publish, copy, evict, move, retract and flush in any order: every page with a key holds its
    block, every sequence reads its own blocks, listeners know exactly the keys that are there."""

    def __init__(self) -> None:
        super().__init__()
        config = CacheConfig(block_size=SIZE, pages=6, placement="round_robin")
        self.cache = CacheManager(config, LANES, SLOTS, rules=LaneRules(most_moves=6))
        self.cache.published.choose = self.choose
        self.turn = 0
        self.mirror = Mirror()
        self.cache.events.subscribe(self.mirror)
        self.content: dict[int, bytes] = {}  # by page
        self.blocks: dict[int, list[bytes]] = {}  # by slot in use

    def choose(self, copies: Sequence[int]) -> int:
        """Takes one page after the other of those that hold a block."""
        self.turn += 1
        return copies[self.turn % len(copies)]

    @rule(slot=st.integers(0, SLOTS - 1), document=st.integers(0, 2), blocks=st.integers(1, 5))
    def run(self, slot: int, document: int, blocks: int) -> None:
        if slot in self.blocks or self.cache.available < blocks:
            return
        hashes = chain(range(document * 1000, document * 1000 + blocks * SIZE))
        match = self.cache.match(hashes, blocks)
        new = range(len(match.pages), blocks)
        if len(new) + self.cache.pages.evictable(match.pages) > self.cache.available:
            return
        self.cache.admit(slot, match.pages, document, blocks)
        self.cache.extend(slot, len(new))
        for block in new:
            self.content[self.cache.layouts[slot].pages[block]] = hashes[block]
        self.cache.publish(slot, 0, blocks, hashes)
        self.blocks[slot] = [hashes[block] for block in range(blocks)]

    @precondition(lambda self: self.cache.pages.with_key)
    @rule(number=st.integers(0, 99), lane=st.integers(0, LANES - 1))
    def copy(self, number: int, lane: int) -> None:
        keys = list(self.cache.pages.with_key)
        key = keys[number % len(keys)]
        page = copied(self.cache, key, lane)
        if page is not None:
            self.content[page] = key

    @rule(slot=st.integers(0, SLOTS - 1))
    def release(self, slot: int) -> None:
        self.cache.release(slot)
        self.blocks.pop(slot, None)

    @rule(slot=st.integers(0, SLOTS - 1), number=st.integers(0, 1))
    def retract(self, slot: int, number: int) -> None:
        """Not each time, so that blocks live long enough to be copied."""
        if number:
            pages = self.cache.pages
            keys = {pages.key_of.get(page) for page in self.cache.layouts[slot].pages}
            self.cache.retract(slot)
            assert not keys & set(pages.with_key)

    @rule(slot=st.integers(0, SLOTS - 1), lanes=st.sets(st.integers(0, LANES - 1), min_size=1))
    def regroup(self, slot: int, lanes: set[int]) -> None:
        if slot in self.blocks:
            self.cache.regroup(slot, tuple(sorted(lanes)))
            self.cache.rebalance(slot, len(self.blocks[slot]))

    @rule()
    def flush(self) -> None:
        self.cache.flush()

    @invariant()
    def every_page_holds_its_block(self) -> None:
        moves = self.cache.moves.take()
        per_lane = self.cache.pages.per_lane
        sources = (moves[:, 0] * per_lane + moves[:, 1]).tolist()
        targets = (moves[:, 2] * per_lane + moves[:, 3]).tolist()
        self.content |= dict(zip(targets, [self.content[page] for page in sources]))
        self.cache.check()
        for slot, keys in self.blocks.items():
            assert [self.content[page] for page in self.cache.layouts[slot].pages] == keys
        for key, copies in self.cache.pages.with_key.items():
            assert {self.content[page] for page in copies} == {key}
        assert self.mirror.keys == set(self.cache.pages.with_key)


TestCopies = Copies.TestCase
TestCopies.settings = settings(max_examples=examples(200), stateful_step_count=30, deadline=None)
