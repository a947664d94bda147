"""The blocks of a sequence are dealt out anew over other lanes: evenly, by as few moves as that
takes, a few in each batch, and nothing is lost on the way."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.cache import CacheManager, LaneRules
from jaxserve.lanes.layout import SequenceLayout
from jaxserve.settings.schema import CacheConfig
from tests.examples import examples

LANES = 5
NOTHING = np.empty(0, np.intp)


class Watcher:
    """Keeps what each slot holds by what the cache tells of it."""

    def __init__(self, cache: CacheManager, slots: int):
        self.held = [Counter() for _ in range(slots)]
        cache.watchers.append(self)

    def taken(self, slot, pages):
        self.held[slot].update(pages)

    def released(self, slot, pages):
        self.held[slot].subtract(pages)

    def agrees(self, cache: CacheManager) -> bool:
        return [+held for held in self.held] == [Counter(layout.held()) for layout in cache.layouts]


def fewest(held: list[int], group: tuple[int, ...]) -> int:
    """Blocks that must move until the lanes of the group have equally many, but for one, and others
    none: the best of all ways."""
    whole, more = divmod(sum(held), len(group))
    ways = itertools.combinations(group, more)
    return min(sum(max(0, whole + (lane in way) - held[lane]) for lane in group) for way in ways)


class DeviceTable:
    """The device's page tables, as the updates make them, and what its pages hold."""

    def __init__(self, cache: CacheManager):
        self.cache = cache
        self.rows: dict[tuple[int, int, int], tuple[int, int]] = {}
        self.further: dict[tuple[int, int, int], list[int]] = {}  # pages of further groups
        # by page: slot, block and page group that it is of
        self.content: dict[int, tuple[int, int, int]] = {}

    def step(self) -> np.ndarray:
        """Takes what the next batch would take, and compares each slot's rows with the host's;
        returns the moves."""
        moves = self.cache.moves.take()
        self.move(moves)
        updates = self.cache.table_updates.take().tolist()
        assert len({tuple(entry[:3]) for entry in updates}) == len(updates), "an entry twice"
        for lane, slot, index, page, block, *further in updates:
            self.rows[slot, lane, index] = page, block
            self.further[slot, lane, index] = further
        self.cache.check()
        self.compare_further()
        for slot, table in enumerate(layout.pages for layout in self.cache.layouts):
            for lane in range(self.cache.pages.lanes):
                right = [
                    (page % self.cache.pages.per_lane, block)
                    for block, page in enumerate(table)
                    if page // self.cache.pages.per_lane == lane
                ]
                assert len(right) == self.cache.blocks_per_lane[slot, lane]
                row = [self.rows[slot, lane, index] for index in range(len(right))]
                blocks = [block for _, block in row]
                ascends = self.cache.group_size[slot] == 1
                assert row == right if ascends else set(row) == set(right), (row, right)
                assert len(set(blocks)) == len(blocks)
        return moves

    def compare_further(self) -> None:
        """Compares the pages of further groups that see a block."""
        for (slot, lane, index), pages in self.further.items():
            layout = self.cache.layouts[slot]
            if index >= layout.by_lane[lane]:
                continue
            block = layout.rows[lane][index]
            mine = [pages[group - 1] for group in layout.groups_of(block)]
            assert [lane * layout.per_lane + page for page in mine] == layout.of_block(block)[1:]
            assert all(0 <= page < layout.per_lane for page in pages), "beyond the pool"

    def move(self, moves: np.ndarray) -> None:
        """Moves pages as the device does: all are read before any is written."""
        per_lane = self.cache.pages.per_lane
        sources = (moves[:, 0] * per_lane + moves[:, 1]).tolist()
        targets = (moves[:, 2] * per_lane + moves[:, 3]).tolist()
        assert len(set(targets)) == len(targets), "a page is written twice"
        read = [self.content.get(page) for page in sources]
        self.content |= {page: what for page, what in zip(targets, read) if what is not None}


@settings(deadline=None, max_examples=examples(200))
@given(st.integers(0, 2**32 - 1))
def test_blocks_go_where_they_belong_and_pages_keep_what_they_held(seed):
    rng = np.random.default_rng(seed)
    windows = ((), (9, 30))[rng.integers(2)]
    groups = 1 + len(windows)
    most = int(rng.integers(1, 4)) * groups
    cache = CacheManager(
        CacheConfig(block_size=4, pages=int(rng.integers(8, 25)) * groups, placement="random"),
        LANES,
        4,
        rules=LaneRules(most_moves=most, ascending=bool(windows), windows=windows),
    )
    watcher = Watcher(cache, 4)
    chain = cache.block_hashes("", lambda a, b: np.arange(a, b, dtype=np.int32))
    device = DeviceTable(cache)
    content = device.content
    for slot in range(3):
        # the second shares blocks with the first
        pages = cache.match(chain, 6).pages if slot == 1 else NOTHING
        cache.admit(slot, pages, int(rng.integers(LANES)), hashes=chain)
        count = int(rng.integers(1, 14))
        if count > cache.available_blocks - 4:
            cache.release(slot)
            continue
        cache.extend(slot, count)
        for (block, group), page in pages_of(cache.layouts[slot]).items():
            content.setdefault(page, (slot, block, group))
        if slot == 0:
            cache.publish(0, 0, min(6, len(cache.layouts[0].pages)), chain)
    device.step()
    for _ in range(4):
        slot = int(rng.integers(3))
        layout = cache.layouts[slot]
        before = {at: content[page] for at, page in pages_of(layout).items()}
        blocks = len(layout.pages)
        group = tuple(rng.permutation(LANES)[: rng.integers(1, LANES + 1)].tolist())
        held = cache.blocks_per_lane[slot].tolist()
        refs = cache.pages.refs
        shared = {
            block: page for block, page in enumerate(cache.layouts[slot].pages) if refs[page] > 1
        }
        available = cache.available
        room = cache.pages.available()
        cache.regroup(slot, group)
        total = 0
        while count := cache.rebalance(slot, blocks):
            total += count
            moves = device.step()
            pairs = Counter(map(tuple, moves[:, [0, 2]].tolist()))
            assert len(moves) == count and max(pairs.values()) <= most
        assert watcher.agrees(cache)
        assert cache.available == available if not windows else cache.available >= available
        after = {at: content[page] for at, page in pages_of(layout).items()}
        assert after.items() <= before.items() and sum(at[1] == 0 for at in after) == blocks
        assert all(cache.layouts[slot].pages[block] == page for block, page in shared.items())
        if min(room) < blocks * groups:
            continue  # it may have stopped where a lane was full
        counts = cache.blocks_per_lane[slot]
        own = counts.copy()
        for page in shared.values():
            own[page // cache.pages.per_lane] -= 1
        assert own.sum() == own[list(group)].sum()
        assert all(
            counts[full] - counts[other] <= 1 for full in group for other in group if own[full]
        )
        if not shared and not windows:
            assert total == fewest(held, group)
    for slot in range(3):
        cache.release(slot)
    device.step()
    assert watcher.agrees(cache)
    free, cached, used = cache.counts()
    assert used == 0 and free + cached == cache.total


def pages_of(layout: SequenceLayout) -> dict[tuple[int, int], int]:
    """The pages of a sequence by block and page group."""
    return {
        (block, group): page
        for block in range(len(layout.pages))
        for group, page in zip((0, *layout.groups_of(block)), layout.of_block(block))
    }


def test_a_block_that_only_one_sequence_holds_takes_its_key_along():
    cache = CacheManager(CacheConfig(block_size=4, pages=9), 2, 3, rules=LaneRules(most_moves=9))
    chain = cache.block_hashes("", lambda a, b: np.arange(a, b, dtype=np.int32))
    cache.admit(0, NOTHING, 0)
    cache.extend(0, 4)
    cache.publish(0, 0, 4, chain)
    cache.regroup(0, (0, 1))
    assert cache.rebalance(0, 4) == 2 and cache.blocks_per_lane[0].tolist() == [2, 2]
    assert len(cache.moves.take()) == 2
    assert cache.match(chain, 4).pages.tolist() == cache.layouts[0].pages
    cache.admit(1, cache.match(chain, 4).pages, 0)
    # the other holds them where they are
    cache.regroup(0, (1,))
    assert not cache.rebalance(0, 4) and cache.blocks_per_lane[0].tolist() == [2, 2]
    assert not len(cache.moves.take())
    cache.extend(0, 3)
    cache.regroup(0, (1,))
    assert cache.rebalance(0, 7) == 3 and cache.blocks_per_lane[0].tolist() == [2, 5]
    cache.check()


@settings(deadline=None, max_examples=examples(200))
@given(st.integers(0, 2**32 - 1))
def test_a_device_that_gets_the_updates_has_the_hosts_tables(seed):
    """Slots are admitted, extended, regrouped, rebalanced and released at random, several times
    between two steps; rows count up to the slot's blocks per lane. Blocks of the newest chunk
    ascend behind all others."""
    rng = np.random.default_rng(seed)
    slots = 4
    windows = ((), (6, 6, 20))[rng.integers(2)]
    groups = 1 + len(windows)
    ascending = bool(rng.integers(2)) or bool(windows)
    cache = CacheManager(
        CacheConfig(
            block_size=4,
            pages=int(rng.integers(6, 20)) * groups,
            placement=str(rng.choice(["grow", "round_robin", "random"])),
        ),
        LANES,
        slots,
        rules=LaneRules(
            most_moves=int(rng.integers(1, 6)) * groups, ascending=ascending, windows=windows
        ),
    )
    hashes = cache.block_hashes("", lambda a, b: np.arange(a, b, dtype=np.int32))
    device = DeviceTable(cache)
    taken = [False] * slots
    newest = [0] * slots  # first block of the newest chunk
    for _ in range(40):
        slot = int(rng.integers(slots))
        action = rng.random()
        if not taken[slot]:
            pages = cache.match(hashes, int(rng.integers(8))).pages
            cache.admit(slot, pages, int(rng.integers(LANES)), hashes=hashes)
            taken[slot] = True
            newest[slot] = len(pages)
        elif action < 0.4:
            # the chunk before may have ended within its last block
            newest[slot] = max(newest[slot], len(cache.layouts[slot].pages) - int(rng.integers(2)))
            cache.rebalance(slot, newest[slot])
            cache.extend(slot, int(rng.integers(min(6, cache.available_blocks) + 1)))
            if rng.random() < 0.5:
                cache.publish(slot, 0, len(cache.layouts[slot].pages), hashes)
        elif action < 0.6:
            lanes = rng.permutation(LANES)[: rng.integers(1, LANES + 1)]
            cache.regroup(slot, tuple(lanes.tolist()))
        elif action < 0.8:
            cache.rebalance(slot, newest[slot])
        else:
            cache.release(slot)
            taken[slot] = False
            newest[slot] = 0
        if rng.random() < 0.5:
            device.step()
        for (row, _), blocks in rows_of(device).items():
            older = [block for block in blocks if block < newest[row]]
            assert blocks[len(older) :] == sorted(set(blocks) - set(older))
            assert not ascending or older == sorted(older)
    device.step()


def rows_of(device: DeviceTable) -> dict[tuple[int, int], list[int]]:
    """The blocks of every row that was sent with the last step, by slot and lane; of slots that
    have not changed since."""
    device.step()
    return {
        (slot, lane): [device.rows[slot, lane, index][1] for index in range(count)]
        for slot, counts in enumerate(device.cache.blocks_per_lane.tolist())
        for lane, count in enumerate(counts)
    }


def test_a_rebalance_sends_entries_of_what_moved_alone():
    """Ten blocks on lane 0, of which the last five move to lane 1, two in a batch; then to lane 2
    too, where each of the others gives what it has too many, from its end."""
    cache = CacheManager(CacheConfig(block_size=4, pages=20), 3, 1, rules=LaneRules(most_moves=2))
    cache.admit(0, NOTHING, 0)
    cache.extend(0, 10)
    assert len(cache.table_updates.take()) == 10
    cache.regroup(0, (0, 1))
    sent = []
    while cache.rebalance(0, 10):
        sent.append(cache.table_updates.take()[:, 1:].tolist())
        cache.moves.take()
    assert cache.blocks_per_lane[0].tolist() == [5, 5, 0]
    # slot, index, page, block
    assert sent == [[[0, 0, 0, 8], [0, 1, 1, 9]], [[0, 2, 2, 6], [0, 3, 3, 7]], [[0, 4, 4, 5]]]
    cache.regroup(0, (0, 1, 2))
    assert cache.rebalance(0, 10) == 3 and cache.blocks_per_lane[0].tolist() == [4, 3, 3]
    assert len(cache.table_updates.take()) == 3
    cache.regroup(0, (0, 1, 2))
    assert not cache.rebalance(0, 10) and not len(cache.table_updates.take())


def test_a_block_that_is_not_full_stays_behind_older_ones():
    cache = CacheManager(CacheConfig(block_size=4, pages=20), 2, 1, rules=LaneRules(most_moves=1))
    device = DeviceTable(cache)
    cache.admit(0, NOTHING, 0)
    cache.extend(0, 6)
    cache.regroup(0, (0, 1))
    device.step()
    assert cache.rebalance(0, 5) == 1  # block 4, for the chunk goes on in block 5
    cache.extend(0, 1)  # on lane 0
    assert rows_of(device) == {(0, 0): [0, 1, 2, 3, 5, 6], (0, 1): [4]}
    assert cache.rebalance(0, 6) == 1
    assert rows_of(device) == {(0, 0): [0, 1, 2, 3, 6], (0, 1): [4, 5]}


def test_what_moves_into_a_page_moves_on_with_a_later_batch():
    """All moves of a batch read before any writes: a block that has just moved stays."""
    cache = CacheManager(CacheConfig(block_size=4, pages=20), 3, 1, rules=LaneRules(most_moves=9))
    cache.admit(0, NOTHING, 0)
    cache.extend(0, 4)
    cache.regroup(0, (1,))
    assert cache.rebalance(0, 4) == 4
    cache.regroup(0, (2,))
    assert cache.rebalance(0, 4) == 0
    assert cache.moves.take()[:, 2].tolist() == [1] * 4
    cache.regroup(0, (2,))
    assert cache.rebalance(0, 4) == 4
    cache.check()
