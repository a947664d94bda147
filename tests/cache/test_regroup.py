"""The blocks of a sequence are dealt out anew over more lanes: evenly, by as few moves as that
takes, and nothing is lost on the way."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.cache import CacheManager
from jaxserve.settings.schema import CacheConfig
from tests.examples import examples

LANES = 5


class Watcher:
    """Keeps what each slot holds by what the cache tells of it."""

    def __init__(self, cache: CacheManager, slots: int):
        self.held = [Counter() for _ in range(slots)]
        cache.watch(self)

    def taken(self, slot, pages):
        self.held[slot].update(pages)

    def released(self, slot, pages):
        self.held[slot].subtract(pages)

    def agrees(self, cache: CacheManager) -> bool:
        return [+held for held in self.held] == [Counter(table) for table in cache.tables]


def fewest(held: list[int], group: tuple[int, ...]) -> int:
    """Blocks that must move until the lanes of the group have equally many, but for one, and others
    none: the best of all ways."""
    whole, more = divmod(sum(held), len(group))
    ways = itertools.combinations(group, more)
    return min(sum(max(0, whole + (lane in way) - held[lane]) for lane in group) for way in ways)


@settings(deadline=None, max_examples=examples(200))
@given(st.integers(0, 2**32 - 1))
def test_blocks_go_where_they_belong_and_pages_keep_what_they_held(seed):
    rng = np.random.default_rng(seed)
    cache = CacheManager(
        CacheConfig(block_size=4, pages=int(rng.integers(8, 25))), LANES, 4, placement="random"
    )
    watcher = Watcher(cache, 4)
    tokens = lambda a, b: np.arange(a, b, dtype=np.int32)
    chain = cache.block_hashes("", tokens)
    content = {}
    told = {}
    nothing = np.empty(0, np.intp)
    for slot in range(3):
        pages = (
            cache.match(chain, 6).pages if slot == 1 else nothing
        )  # shares blocks with the first
        cache.admit(slot, pages, int(rng.integers(LANES)))
        count = int(rng.integers(1, 14))
        room = cache.available - 4
        if count > room:
            cache.release(slot)
            continue
        cache.extend(slot, count)
        content |= {
            page: content.get(page, (slot, block)) for block, page in enumerate(cache.tables[slot])
        }
        if slot == 0:
            cache.publish(0, 0, min(6, len(cache.tables[0])), chain)
    for _ in range(4):
        slot = int(rng.integers(3))
        before = [content[page] for page in cache.tables[slot]]
        group = tuple(rng.permutation(LANES)[: rng.integers(1, LANES + 1)].tolist())
        held = cache.blocks_per_lane[slot].tolist()
        shared = {
            block: page
            for block, page in enumerate(cache.tables[slot])
            if cache.pages.refs[page] > 1
        }
        available = cache.available
        done = cache.regroup(slot, group)
        moves = cache.take_moves()
        deltas = cache.take_table_updates()
        cache.check()
        assert watcher.agrees(cache)
        for lane, row, index, page, block in deltas.tolist():
            told[row, lane, index] = page, block
        if not done:
            assert not len(moves) and cache.blocks_per_lane[slot].tolist() == held
            continue
        per_lane = cache.pages.per_lane
        # one after the other is what their order stands for
        for lane, page, to, new in moves.tolist():
            content[to * per_lane + new] = content[lane * per_lane + page]
        assert [content[page] for page in cache.tables[slot]] == before
        assert (
            all(cache.tables[slot][block] == page for block, page in shared.items())
            and cache.available == available
        )
        counts = cache.blocks_per_lane[slot]
        own = cache.blocks_per_lane[slot].copy()
        for page in shared.values():
            own[page // per_lane] -= 1
        assert own.sum() == own[list(group)].sum()
        assert all(
            counts[full] - counts[other] <= 1 for full in group for other in group if own[full]
        )
        if not shared:
            assert len(moves) == fewest(held, group)
        # no entry is told twice
        assert len({tuple(entry[:3]) for entry in deltas.tolist()}) == len(deltas)
        for lane in range(LANES):  # what the device's table says now
            blocks = [
                block for block, page in enumerate(cache.tables[slot]) if page // per_lane == lane
            ]
            assert [told[slot, lane, index] for index in range(len(blocks))] == [
                (cache.tables[slot][block] % per_lane, block) for block in blocks
            ]
    for slot in range(3):
        if cache.tables[slot]:
            cache.release(slot)
    cache.check()
    assert watcher.agrees(cache)
    free, cached, used = cache.counts()
    assert used == 0 and free + cached == cache.total


def test_a_block_that_only_one_sequence_holds_takes_its_key_along():
    cache = CacheManager(CacheConfig(block_size=4, pages=9), 2, 3)
    chain = cache.block_hashes("", lambda a, b: np.arange(a, b, dtype=np.int32))
    cache.admit(0, np.empty(0, np.intp), 0)
    cache.extend(0, 4)
    cache.publish(0, 0, 4, chain)
    assert (
        cache.regroup(0, (0, 1))
        and cache.blocks_per_lane[0].tolist() == [2, 2]
        and len(cache.take_moves()) == 2
    )
    assert cache.match(chain, 4).pages.tolist() == cache.tables[0]
    cache.admit(1, cache.match(chain, 4).pages, 0)
    # the other holds them where they are
    assert cache.regroup(0, (1,)) and cache.blocks_per_lane[0].tolist() == [2, 2]
    assert not len(cache.take_moves())
    cache.extend(0, 3)
    assert cache.regroup(0, (1,)) and cache.blocks_per_lane[0].tolist() == [2, 5]
    cache.check()


class DeviceTable:
    """The device's page tables, as the updates make them, and what its pages hold."""

    def __init__(self, cache: CacheManager):
        self.cache = cache
        self.rows: dict[tuple[int, int, int], tuple[int, int]] = {}

    def step(self) -> None:
        """Takes what the next batch would take, and compares each slot's rows with the host's."""
        updates = self.cache.take_table_updates().tolist()
        assert len({tuple(entry[:3]) for entry in updates}) == len(updates), "an entry twice"
        last: dict[tuple[int, int], int] = {}
        for lane, slot, index, page, block in updates:
            assert block > last.get((slot, lane), -1), "the blocks of a row must ascend"
            last[slot, lane] = block
            self.rows[slot, lane, index] = page, block
        for slot, table in enumerate(self.cache.tables):
            for lane in range(LANES):
                right = [
                    (page % self.cache.pages.per_lane, block)
                    for block, page in enumerate(table)
                    if page // self.cache.pages.per_lane == lane
                ]
                assert len(right) == self.cache.blocks_per_lane[slot, lane]
                assert [self.rows[slot, lane, index] for index in range(len(right))] == right


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 2**32 - 1))
def test_a_device_that_gets_the_updates_has_the_hosts_tables(seed):
    """Slots are admitted, extended, regrouped and released at random, several times between two
    steps; rows count up to the slot's blocks per lane."""
    rng = np.random.default_rng(seed)
    slots = 4
    cache = CacheManager(
        CacheConfig(block_size=4, pages=int(rng.integers(6, 20))),
        LANES,
        slots,
        placement=str(rng.choice(["grow", "round_robin", "random"])),
    )
    hashes = cache.block_hashes("", lambda a, b: np.arange(a, b, dtype=np.int32))
    device = DeviceTable(cache)
    taken = [False] * slots
    for _ in range(40):
        slot = int(rng.integers(slots))
        action = rng.random()
        if not taken[slot]:
            pages = cache.match(hashes, int(rng.integers(8))).pages
            cache.admit(slot, pages, int(rng.integers(LANES)))
            taken[slot] = True
        elif action < 0.4:
            cache.extend(slot, int(rng.integers(min(6, cache.available) + 1)))
            if rng.random() < 0.5:
                cache.publish(slot, 0, len(cache.tables[slot]), hashes)
        elif action < 0.8:
            lanes = rng.permutation(LANES)[: rng.integers(1, LANES + 1)]
            cache.regroup(slot, tuple(lanes.tolist()))
        else:
            cache.release(slot)
            taken[slot] = False
        if rng.random() < 0.5:
            device.step()
    device.step()
    cache.check()


def test_after_a_regroup_only_entries_that_differ_are_sent():
    """Ten blocks on lane 0, of which the last five move to lane 1; then to lane 2 too, where each
    of the others gives what it has too many, from its end."""
    cache = CacheManager(CacheConfig(block_size=4, pages=20), 3, 1)
    cache.admit(0, np.empty(0, np.intp), 0)
    cache.extend(0, 10)
    assert len(cache.take_table_updates()) == 10
    assert cache.regroup(0, (0, 1)) and cache.blocks_per_lane[0].tolist() == [5, 5, 0]
    assert cache.take_table_updates().tolist() == [
        [1, 0, index, 4 - index, 5 + index] for index in range(5)
    ]
    assert not len(cache.take_table_updates())
    assert cache.regroup(0, (0, 1, 2)) and cache.blocks_per_lane[0].tolist() == [4, 3, 3]
    assert len(cache.take_table_updates()) == 3
    assert cache.regroup(0, (0, 1, 2)) and not len(cache.take_table_updates())
