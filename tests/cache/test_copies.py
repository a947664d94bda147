"""A block on several pages: found on any of them, lost with the last, wherever they lie."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from jaxserve.api.request import EPHEMERAL
from jaxserve.cache import CacheManager, LaneRules
from jaxserve.cache.block_events import BlockEvents, Medium, StoredBlocks
from jaxserve.cache.hashes import block_key, group_key, is_block
from jaxserve.cache.pages import PageAllocator
from jaxserve.cache.prefix_match import BlockPage
from jaxserve.settings.schema import CacheConfig
from tests.cache.test_hashes import chain
from tests.cache.test_tiers import Lower
from tests.examples import examples
from tests.lanes.test_moves import Watcher

NOTHING = np.empty(0, np.intp)
LANES = 3
SIZE = 4
SLOTS = 3
ROOM = LaneRules(most_moves=6)


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
    key = block_key(b"root", np.arange(4))
    events = BlockEvents()
    mirror = Mirror()
    events.subscribe(mirror)
    pages = PageAllocator(2, 1, events)
    left: list[tuple[int, bytes]] = []
    pages.on_evict = lambda page, key: left.append((page, key))
    one = pages.allocate(0)
    pages.publish(one, key)
    mirror.keys.add(key)
    two = pages.allocate(1)
    pages.add_copy(two, key)
    assert pages.copies(one) == pages.copies(two) == (one, two)
    pages.unref([one, two])
    assert pages.allocate(0) == one and mirror.keys == {key} and pages.with_key == {key: (two,)}
    assert pages.allocate(1) == two and mirror.keys == set() and pages.with_key == {}
    assert left == [(one, key), (two, key)] and pages.generation.tolist() == [1, 1]
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


def test_a_match_takes_the_page_that_is_chosen_and_stays_with_it():
    cache = CacheManager(CacheConfig(block_size=SIZE, pages=9), 2, SLOTS, rules=ROOM)
    hashes = chain(range(100))
    cache.admit(0, cache.match(hashes, 0).pages, 0)
    cache.extend(0, 3)
    cache.publish(0, 0, 3, hashes)
    table = cache.layouts[0].pages
    page = cache.copy(table[1], 1)
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
    cache = CacheManager(CacheConfig(block_size=SIZE, pages=2), 2, SLOTS, lower=Lower(), rules=ROOM)
    hashes = chain(range(100))
    cache.admit(0, cache.match(hashes, 0).pages, 0, retention=EPHEMERAL)
    cache.extend(0, 1)
    cache.publish(0, 0, 1, hashes)
    page = cache.copy(cache.layouts[0].pages[0], 1)
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


def test_what_cannot_be_copied():
    """To a lane that has the block, one without room, beyond what a batch copies, from a page that
    the batch writes, a block without a key."""
    config = CacheConfig(block_size=SIZE, pages=4)
    cache = CacheManager(config, 3, SLOTS, rules=LaneRules(most_moves=1))
    hashes = chain(range(100))
    cache.admit(0, NOTHING, 0)
    cache.extend(0, 3)
    cache.publish(0, 0, 2, hashes)
    first, second, third = cache.layouts[0].pages
    assert cache.copy(first, 0) is None and cache.copy(third, 1) is None
    copy = cache.copy(first, 1)
    assert copy is not None and cache.pages.cached[1].keys() == {copy}
    assert cache.copy(first, 1) is None and cache.copy(copy, 2) is None
    assert cache.copy(second, 1) is None
    cache.moves.take()
    assert cache.copy(second, 1) is not None
    cache.admit(1, NOTHING, 2)
    cache.extend(1, 4)
    assert cache.copy(copy, 2) is None
    cache.check()


def test_a_slot_that_reads_a_copy_at_home_is_local_and_its_row_ascends():
    cache = CacheManager(CacheConfig(block_size=SIZE, pages=6), 2, SLOTS, rules=ROOM)
    hashes = chain(range(100))
    cache.admit(0, NOTHING, 0)
    cache.extend(0, 3)
    cache.publish(0, 0, 3, hashes)
    cache.admit(1, cache.match(hashes, 3).pages, 1)
    cache.extend(1, 1)
    for block in (1, 0, 2):
        copy = cache.copy(cache.layouts[0].pages[block], 1)
        cache.repoint(1, block, copy, 3)
        assert cache.group_size[1] == (1 if block == 2 else 2)
        cache.check()
    assert cache.layouts[1].rows == [[], [0, 1, 2, 3]]
    assert cache.capacity[1] == 4 * SIZE and cache.pages.refs.sum() == 3 + 4


def test_a_copy_that_is_not_there_yet_cannot_move_on():
    config = CacheConfig(block_size=SIZE, pages=6, placement="striped")
    cache = CacheManager(config, 3, SLOTS, rules=ROOM)
    hashes = chain(range(100))
    cache.admit(0, NOTHING, 0)
    cache.extend(0, 2)
    cache.publish(0, 0, 2, hashes)
    for block in range(2):
        cache.repoint(0, block, cache.copy(cache.layouts[0].pages[block], 1), 2)
    cache.regroup(0, (2,))
    assert cache.rebalance(0, 2) == 0
    cache.moves.take()
    cache.regroup(0, (2,))
    assert cache.rebalance(0, 2) == 2
    cache.check()


def test_a_page_that_is_given_away_is_not_copied_to():
    cache = CacheManager(CacheConfig(block_size=SIZE, pages=2), 2, SLOTS, rules=ROOM)
    hashes = chain(range(100))
    cache.admit(0, NOTHING, 0)
    cache.extend(0, 1)
    cache.publish(0, 0, 1, hashes)
    copy = cache.copy(cache.layouts[0].pages[0], 1)
    cache.admit(1, NOTHING, 1)
    cache.extend(1, 2)
    assert copy in cache.layouts[1].pages and not len(cache.moves.take())
    cache.check()


class Copies(RuleBasedStateMachine):
    """Publish, copy, read copies, evict, move, fetch, retract and flush in any order, a batch now
    and then: every page with a key holds its block once the batch is done, every sequence reads its
    own blocks, each in one row, listeners know exactly the keys that are there."""

    @initialize(windows=st.sampled_from([(), (6,), (5, 11)]))
    def build(self, windows: tuple[int, ...]) -> None:
        groups = 1 + len(windows)
        config = CacheConfig(block_size=SIZE, pages=6 * groups, placement="round_robin")
        rules = LaneRules(most_moves=6 * groups, ascending=bool(windows), windows=windows)
        self.cache = CacheManager(config, LANES, SLOTS, rules=rules)
        self.windows = windows
        self.cache.published.choose = self.choose
        self.turn = 0
        self.mirror = Mirror()
        self.cache.events.subscribe(self.mirror)
        self.watcher = Watcher(self.cache, SLOTS)
        self.content: dict[int, bytes] = {}  # by page
        # page tables of the device: page, block, pages of further groups
        self.rows: dict[tuple[int, int, int], tuple[int, int, list[int]]] = {}
        self.blocks: dict[int, list[bytes]] = {}  # by slot in use

    def choose(self, copies: Sequence[int]) -> int:
        """Takes one page after the other of those that hold a block."""
        self.turn += 1
        return copies[self.turn % len(copies)]

    @rule(
        slot=st.integers(0, SLOTS - 1),
        document=st.integers(0, 2),
        blocks=st.integers(1, 5),
        fetched=st.booleans(),
    )
    def run(self, slot: int, document: int, blocks: int, fetched: bool) -> None:
        cache = self.cache
        if slot in self.blocks or cache.available_blocks < blocks:
            return
        hashes = chain(range(document * 1000, document * 1000 + blocks * SIZE))
        match = cache.match(hashes, blocks)
        new = range(len(match.pages), blocks)
        taken = cache.published.matched(match.pages, hashes).on_pages
        lost = cache.pages.evictable(taken) + len(cache.windows) * LANES  # apart on lanes
        if len(new) * cache.needs.per_block + lost > cache.available:
            return
        cache.admit(slot, match.pages, document, blocks, hashes=hashes)
        comes = False
        if fetched and new and not self.windows:
            comes = cache.fetch(slot, list(map(BlockPage, new)), hashes) is not None
        else:
            cache.extend(slot, len(new))
        if not comes:  # computed by the batch: after its moves
            self.step()
        layout = cache.layouts[slot]
        for block in new:
            for group, page in zip((0, *layout.groups_of(block)), layout.of_block(block)):
                self.content[page] = group_key(hashes[block], group)
        cache.publish(slot, 0, blocks, hashes)
        self.blocks[slot] = [hashes[block] for block in range(blocks)]

    @precondition(lambda self: self.cache.pages.with_key)
    @rule(number=st.integers(0, 99), lane=st.integers(0, LANES - 1))
    def copy(self, number: int, lane: int) -> None:
        pages = list(self.cache.pages.key_of)
        page = pages[number % len(pages)]
        copy = self.cache.copy(page, lane)
        assert copy is None or copy in self.cache.pages.copies(page)

    @precondition(lambda self: self.blocks)
    @rule(number=st.integers(0, 99), block=st.integers(0, 4), turn=st.integers(0, LANES - 1))
    def repoint(self, number: int, block: int, turn: int) -> None:
        slot = sorted(self.blocks)[number % len(self.blocks)]
        keys = self.blocks[slot]
        block %= len(keys)
        pages = self.cache.pages.with_key.get(keys[block])
        if pages is not None:
            self.cache.repoint(slot, block, pages[turn % len(pages)], len(keys))

    @rule(slot=st.integers(0, SLOTS - 1))
    def release(self, slot: int) -> None:
        self.cache.release(slot)
        self.blocks.pop(slot, None)

    @rule(slot=st.integers(0, SLOTS - 1), number=st.integers(0, 1))
    def retract(self, slot: int, number: int) -> None:
        """Retracts one time in two, so that blocks live long enough to be copied."""
        if number:
            pages = self.cache.pages
            keys = {pages.key_of.get(page) for page in self.cache.layouts[slot].held()}
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

    @rule()
    def step(self) -> None:
        """Moves pages and changes the page tables as the device does."""
        cache = self.cache
        per_lane = cache.pages.per_lane
        moves = cache.moves.take()
        sources = (moves[:, 0] * per_lane + moves[:, 1]).tolist()
        targets = (moves[:, 2] * per_lane + moves[:, 3]).tolist()
        assert len(set(targets)) == len(targets), "a page is written twice"
        self.content |= dict(zip(targets, [self.content[page] for page in sources]))
        cache.stores.take()
        for lane, slot, index, page, block, *further in cache.table_updates.take().tolist():
            self.rows[slot, lane, index] = page, block, further
        for slot, keys in self.blocks.items():
            read: dict[int, bytes] = {}
            for lane, count in enumerate(cache.blocks_per_lane[slot].tolist()):
                for index in range(count):
                    page, block, further = self.rows[slot, lane, index]
                    assert block not in read, "a block is read twice"
                    read[block] = self.content[page + lane * per_lane]
                    for group in cache.layouts[slot].groups_of(block):
                        other = self.content[further[group - 1] + lane * per_lane]
                        assert other == group_key(keys[block], group)
            assert [read[block] for block in sorted(read)] == keys
        for key, copies in cache.pages.with_key.items():
            assert {self.content[page] for page in copies} == {key}

    @rule(number=st.integers(0, 99), tokens=st.integers(0, 24))
    def pass_windows(self, number: int, tokens: int) -> None:
        for slot in sorted(self.blocks)[number % SLOTS :][:1]:
            self.cache.pass_windows(slot, min(tokens, len(self.blocks[slot]) * SIZE))

    @invariant()
    def all_counts_agree(self) -> None:
        self.cache.check()
        assert self.mirror.keys == set(filter(is_block, self.cache.pages.with_key))
        assert self.watcher.agrees(self.cache)


TestCopies = Copies.TestCase
TestCopies.settings = settings(max_examples=examples(200), stateful_step_count=30, deadline=None)
