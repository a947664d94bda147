"""Gives the running sequences their pages, and keeps the page tables as the device will see them.

A sequence's blocks are numbered in the order of its tokens; each is on one page of one lane. The
host knows a sequence by its slot, and keeps for each slot the pages of its blocks in order; the
device keeps a row of pages per slot and lane, each with the number of its block.

In a row the blocks of the newest chunk ascend, behind all older ones. These ascend too, unless
blocks have moved there from other lanes: attention sees them whole, in whatever order. Rows of
sequences on one lane, and of models with sliding windows, always ascend.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from jaxserve.api.batch import NO_STORES, PageStores
from jaxserve.api.request import NORMAL_RETENTION, KvSource
from jaxserve.cache.block_events import BlockEvents, StoredBlocks
from jaxserve.cache.hashes import BlockHashes, root_key
from jaxserve.cache.pages import PageAllocator, PageCounts
from jaxserve.cache.placement import (
    DEALING,
    PLACEMENTS,
    SCATTERING,
    Placement,
    PlacementView,
)
from jaxserve.cache.prefix_match import NO_MATCH, PrefixMatch, find_prefix
from jaxserve.cache.stores import PendingStores
from jaxserve.cache.table_updates import (
    BLOCK,
    INDEX,
    LANE,
    PAGE,
    SLOT,
    PageMoves,
    TableUpdates,
)
from jaxserve.cache.tiers import Fetch, LowerTiers, SourceBlocks
from jaxserve.lanes.groups import size_of
from jaxserve.settings.schema import CacheConfig, ConfigError

UNLIMITED = 2**31  # blocks of a sequence on a lane


class PageWatcher(Protocol):
    """Told which pages the sequence in a slot holds, as these change."""

    def taken(self, slot: int, pages: Sequence[int]) -> None:
        """The slot holds these pages too."""

    def released(self, slot: int, pages: Sequence[int]) -> None:
        """The slot holds these pages no more."""


class CacheManager:
    """The pages of `lanes` lanes for sequences in `slots` slots.

    config: `pages`, which is per lane, must be given. fingerprint, dtype: what besides tokens tells
    the blocks of one model from another's. placement: instead of the config's, by name or as a
    function. stripe: see PlacementView. lower: where blocks that leave the devices are kept, and
    fetched from. most_moves: pages that a batch moves from a lane to another. ascending: the blocks
    of every row must ascend, as for models with sliding windows.

    To be read by all, by slot: `tables` (the page of every block, in order), `home` (lane),
    `group_size` (of the smallest group of lanes that has home and all blocks; above 1 the sequence
    is `spread`), `blocks_per_lane` [slots, lanes] and `capacity` (tokens for which the slot has
    pages). `events` tells what is stored and lost, `stores` has the pages that are to be kept in
    lower tiers.
    """

    def __init__(
        self,
        config: CacheConfig,
        lanes: int,
        slots: int,
        fingerprint: str = "",
        dtype: str = "",
        placement: str | Placement | None = None,
        stripe: int = 1,
        lower: LowerTiers | None = None,
        most_moves: int = 0,
        ascending: bool = False,
    ):
        if config.pages is None:
            raise ConfigError("pages", "must be known before the cache is made")
        self.block_size = config.block_size
        self.prefix_caching = config.prefix_caching
        self.events = BlockEvents(self._present)
        self.pages = PageAllocator(lanes, config.pages, self.events)
        self.tables: list[list[int]] = [[] for _ in range(slots)]
        self.home = np.zeros(slots, np.int32)
        self.group_size = np.ones(slots, np.int32)
        self.blocks_per_lane = np.zeros((slots, lanes), np.int32)
        self.capacity = np.zeros(slots, np.int32)
        self.lower = lower
        self._updates = TableUpdates()
        self._moves = PageMoves(config.pages, most_moves)
        self._ascending = ascending
        self.stores = PendingStores(self.pages)
        if lower is not None:
            self.pages.on_evict = self._evicted
        self._tickets = itertools.count()
        self._fetches: list[Fetch] = []
        self._watchers: list[PageWatcher] = []
        self.fingerprint = fingerprint
        self.dtype = dtype
        placement = config.placement if placement is None else placement
        self._place = PLACEMENTS[placement] if isinstance(placement, str) else placement
        self._stripe = stripe
        self._lane_limit = UNLIMITED  # blocks of a sequence on a lane before the next lane joins
        if config.lane_tokens is not None:
            self._lane_limit = self.blocks(config.lane_tokens)
        # by slot: lane of the last block, blocks of the whole prompt, retention of the request,
        # lanes to deal blocks out to
        self._last_lane = [0] * slots
        self._prompt_blocks = [0] * slots
        self._retention = [NORMAL_RETENTION] * slots
        self._group: list[tuple[int, ...]] = [()] * slots
        # by slot: the blocks of each lane's row, where there are several lanes; and, until its
        # blocks are dealt evenly, how many each lane has too many (below 0: too few)
        self._rows: list[list[list[int]]] = [[[] for _ in range(lanes)] for _ in range(slots)]
        self._surplus: dict[int, list[int]] = {}

    # --- what there is

    @property
    def total(self) -> int:
        """Pages of all lanes."""
        return self.pages.lanes * self.pages.per_lane

    @property
    def spread(self) -> np.ndarray:
        """[slots] bool; whether any block is on another lane than home."""
        return self.group_size > 1

    @property
    def available(self) -> int:
        """Pages that can be had on all lanes together, free or by eviction."""
        return sum(self.pages.available())

    @property
    def reach(self) -> int:
        """Tokens of a sequence that a lane holds before the next one joins."""
        return min(self._lane_limit, self.pages.per_lane) * self.block_size

    @property
    def deals(self) -> bool:
        """Whether lanes share a long prompt's blocks from its first ones on; else they fill one
        after the other."""
        return self._place in DEALING + SCATTERING

    def dealt_over(self, blocks: int) -> tuple[int, ...]:
        """The lanes that share a prompt of so many blocks from its first ones on, if nobody plans;
        none where they fill one after the other, or one holds it."""
        shared = self._place in SCATTERING or (self._place in DEALING and blocks > self._lane_limit)
        return tuple(range(self.pages.lanes)) if shared else ()

    def blocks(self, tokens: int) -> int:
        """Blocks, and so pages, that this many tokens take."""
        return -(-tokens // self.block_size)

    def by_lane(self) -> list[PageCounts]:
        """Free, cached and held pages of each lane."""
        return [self.pages.counts(lane) for lane in range(self.pages.lanes)]

    def counts(self) -> PageCounts:
        """Free, cached and held pages of all lanes."""
        return PageCounts(*map(sum, zip(*self.by_lane())))

    def watch(self, watcher: PageWatcher) -> None:
        """Tells `watcher` from now on which pages slots take and give back."""
        self._watchers.append(watcher)

    # --- prefixes

    def block_hashes(self, salt: str, tokens: Callable[[int, int], np.ndarray]) -> BlockHashes:
        """Block keys of a sequence, in this cache and under this salt. `tokens(a, b)` gives its
        tokens [b - a] int32."""
        root = root_key(self.fingerprint, self.dtype, self.block_size, salt)
        return BlockHashes(root, self.block_size, tokens, salt)

    def source_blocks(
        self, hashes: BlockHashes, first: int, last: int, size: int
    ) -> SourceBlocks | None:
        """The blocks of `size` tokens, of another replica, that cover the blocks `first` to before
        `last` of a sequence; None where its blocks have the size of those here."""
        if size in (0, self.block_size):
            return None
        begin, end = first * self.block_size, last * self.block_size
        far = hashes.resized(root_key(self.fingerprint, self.dtype, size, hashes.salt), size)
        keys = [far[block] for block in range(begin // size, -(-end // size))]
        return SourceBlocks(keys, size, begin % size)

    def match(self, hashes: BlockHashes, blocks: int, last: PrefixMatch = NO_MATCH) -> PrefixMatch:
        """Pages that hold the first blocks of a sequence, at most `blocks`. `last`: what was found
        for it before, if that is known."""
        if not self.prefix_caching:
            return NO_MATCH
        return find_prefix(self.pages, hashes, blocks, last)

    def evictable(self, pages: np.ndarray) -> int:
        """How many of these nobody holds: taking them makes that many fewer available."""
        return int(np.count_nonzero(self.pages.refs[pages] == 0)) if len(pages) else 0

    def publish(self, slot: int, first: int, last: int, hashes: BlockHashes) -> None:
        """Lets later batches share the slot's blocks `first` to before `last`, which are full and
        part of an issued batch."""
        if not self.prefix_caching:
            return
        table = self.tables[slot]
        new = [
            block for block in range(first, last) if self.pages.publish(table[block], hashes[block])
        ]
        if self.lower is not None:
            self._retain(slot, range(first, last), new, hashes)
        self.stores.published((table[block], hashes[block]) for block in new)
        if new and self.events:
            self._tell_stored(new, hashes)

    def _retain(self, slot: int, blocks: range, new: list[int], hashes: BlockHashes) -> None:
        """Notes for how long these blocks of the slot, of which the new ones were found by nobody
        so far, should outlast their pages."""
        table = self.tables[slot]
        retention = self._retention[slot]
        for block in new:
            self.stores.retain(table[block], retention)
        known = set(blocks).difference(new)
        self.stores.retain_longer((self.pages.page_of[hashes[block]] for block in known), retention)

    def _tell_stored(self, blocks: list[int], hashes: BlockHashes) -> None:
        """Tells of these blocks of a sequence, which were published just now."""
        for first, last in _runs(blocks):
            self.events.stored(
                StoredBlocks(
                    [hashes[block] for block in range(first, last)],
                    parent=hashes[first - 1] if first else None,
                    tokens=hashes.tokens(first, last),
                    salt=hashes.salt,
                )
            )

    def _present(self) -> Iterator[StoredBlocks]:
        """The blocks that can be found now; of which sequences is not known any more."""
        if self.pages.page_of:
            yield StoredBlocks(list(self.pages.page_of))
        if self.lower is not None:
            yield from self.lower.events.present()

    def _evicted(self, page: int, key: bytes) -> None:
        """The block with this key is about to leave its page."""
        assert self.lower is not None
        if self.stores.evicted(page, key) and self.events:
            self.lower.events.coming(key, self.events)

    def tell_of_lower_tiers(self) -> None:
        """Tells listeners what has changed below the devices. To be called now and then."""
        if self.lower is not None:
            self.lower.events.tell(self.events)

    def recheck_lower_tiers(self) -> None:
        """Blocks that were to leave the devices may not have been kept."""
        if self.lower is not None:
            self.lower.events.recheck()

    def retract(self, slot: int) -> None:
        """Lets nobody share the slot's blocks from now on: what its pages hold is damaged."""
        self.stores.drop(self.tables[slot])
        self.pages.retract(self.tables[slot])
        self.recheck_lower_tiers()

    def flush(self) -> int:
        """Forgets the blocks that no slot holds; returns how many pages are free by that."""
        return self.pages.flush()

    # --- lower tiers

    def fetchable(self, hashes: BlockHashes, first: int, last: int) -> list[bytes]:
        """Keys of the blocks from `first` on, to before `last`, that lower tiers hold without a
        gap."""
        if self.lower is None or not self.prefix_caching:
            return []
        keys: list[bytes] = []
        while first + len(keys) < last and self.lower.holds(hashes[first + len(keys)]):
            keys.append(hashes[first + len(keys)])
        return keys

    def fetch(
        self,
        slot: int,
        keys: list[bytes],
        source: KvSource | None = None,
        there: SourceBlocks | None = None,
    ) -> int:
        """Gives the slot pages for its next blocks, which have these keys, and asks lower tiers to
        fill them, and `source` (see Fetch) for those that they do not hold; so many must be
        available. Returns the fetch's ticket."""
        first = len(self.tables[slot])
        if self.lower is not None:
            self.lower.keep(keys, self._retention[slot])
        self.extend(slot, len(keys))
        places = np.stack(self.pages.locate(np.array(self.tables[slot][first:], np.int32)), axis=1)
        ticket = next(self._tickets)
        self._fetches.append(Fetch(ticket, keys, places, source, there))
        return ticket

    def take_fetches(self) -> list[Fetch]:
        """Fetches that were asked for since the last call."""
        fetches = self._fetches
        self._fetches = []
        return fetches

    def take_stores(self) -> PageStores:
        """Pages whose blocks leave the devices: to be read before anything else is done to them."""
        return self.stores.take()

    def stores_at_the_end(self) -> PageStores:
        """Pages whose blocks should outlast the devices; none where nothing below them does. No
        more batch may come."""
        if self.lower is None or not self.lower.outlasts:
            return NO_STORES
        return self.stores.all()

    # --- the pages of a slot

    def choose_home(
        self, pages: np.ndarray, lanes: list[int], need: int, pending: list[float]
    ) -> int:
        """Chooses a home out of `lanes` for a sequence with these matched `pages` (medha.md M12).

        The lane with most of the matched pages, if it has the `need` pages that the next chunk
        takes; else, of those that have them, the one with the least `pending` work (seconds per
        lane), then with the most pages available.
        """
        if len(lanes) == 1:
            return lanes[0]
        matched = self.count_by_lane(pages)
        available = self.pages.available()

        def preference(lane: int) -> tuple[int, bool, float, int, int]:
            fits = available[lane] >= need
            return int(matched[lane]) * fits, fits, -pending[lane], available[lane], -lane

        return max(lanes, key=preference)

    def admit(
        self,
        slot: int,
        pages: np.ndarray,
        home: int,
        blocks: int = 0,
        retention: int = NORMAL_RETENTION,
    ) -> None:
        """Gives an empty slot its home lane and the matched `pages`, which hold its first blocks.
        blocks: of the whole prompt. retention: of the request."""
        assert not self.tables[slot], f"slot {slot} is taken"
        lanes = self.pages.lanes
        self.home[slot] = self._last_lane[slot] = home
        self._prompt_blocks[slot] = blocks
        self._retention[slot] = retention
        self._group[slot] = tuple(range(lanes)) if blocks > self._lane_limit else ()
        self.tables[slot] = pages.tolist()
        self.stores.retain_longer(self.tables[slot], retention)
        if len(pages):
            self.pages.ref(pages)
            entries = self._entries(slot)
            self._updates.add_all(entries)
            if lanes > 1:
                by_lane = (entries[entries[:, LANE] == lane, BLOCK] for lane in range(lanes))
                self._rows[slot] = [row.tolist() for row in by_lane]
            for watcher in self._watchers:
                watcher.taken(slot, self.tables[slot])
        self._recount(slot)

    def extend(self, slot: int, blocks: int) -> None:
        """Gives the slot pages for its next `blocks` blocks, which must be available."""
        table = self.tables[slot]
        held = self.blocks_per_lane[slot].tolist()
        lane = self._last_lane[slot]
        first = len(table)
        for block in range(first, first + blocks):
            if len(held) > 1:
                lane = self._next_lane(slot, block, held, lane)
                self._rows[slot][lane].append(block)
            page = self.pages.allocate(lane)
            self.stores.renewed(page)
            self._updates.add(lane, slot, held[lane], self.pages.locate(page)[1], block)
            held[lane] += 1
            table.append(page)
        self.capacity[slot] = len(table) * self.block_size
        self.blocks_per_lane[slot] = held
        if len(held) > 1:
            self._last_lane[slot] = lane
            self.group_size[slot] = size_of(int(self.home[slot]), held)
        for watcher in self._watchers:
            watcher.taken(slot, table[first:])

    def _next_lane(self, slot: int, block: int, held: list[int], lane: int) -> int:
        """The lane for a block after those `held` per lane, of which the last is on `lane`."""
        view = PlacementView(
            self.pages.available(),
            held,
            lane,
            self._lane_limit,
            block,
            slot,
            int(self.home[slot]),
            self._prompt_blocks[slot],
            self._group[slot],
            self._stripe,
        )
        return self._place(view)

    def regroup(self, slot: int, group: tuple[int, ...]) -> None:
        """Deals the slot's next blocks out over the lanes of `group`, and those so far, which the
        calls of `rebalance` move bit by bit: as few as it takes until the lanes have equally many,
        but for one (Tetris, section 4.1). Blocks that other sequences hold too stay where they
        are."""
        pages = np.asarray(self.tables[slot], np.intp)
        own = self.count_by_lane(pages[self.pages.refs[pages] == 1])
        fixed = self.blocks_per_lane[slot] - own
        wanted = _even(group, fixed.tolist(), own.tolist())
        self._group[slot] = group
        self._surplus[slot] = (own - wanted).tolist()

    def rebalance(self, slot: int, before: int) -> int:
        """Moves blocks of a regrouped slot, of those before number `before`, as many as the next
        batch has room for; returns how many. No page more or less is available after it."""
        surplus = self._surplus.get(slot)
        if surplus is None:
            return 0
        starts: dict[int, int] = {}  # by lane: where its row begins to differ
        moved = 0
        givers = [lane for lane, count in enumerate(surplus) if count > 0]
        takers = [lane for lane, count in enumerate(surplus) if count < 0]
        for lane in givers:
            for to_lane in sorted(takers, key=surplus.__getitem__):
                moved += self._give(slot, lane, to_lane, before, starts)
        if max(surplus) <= 0 or min(surplus) >= 0:
            del self._surplus[slot]
        if moved:
            home = int(self.home[slot])
            held = [len(row) for row in self._rows[slot]]
            self.blocks_per_lane[slot] = held
            self.group_size[slot] = size_of(home, held)
            if self.group_size[slot] == 1:
                self._rows[slot][home].sort()
                starts = {home: 0}
            for lane, start in starts.items():
                self._updates.rewrite(lane, slot, start, self._row_entries(slot, lane, start))
        return moved

    def behind(self, slot: int) -> int:
        """Blocks of a regrouped slot that have yet to move."""
        return sum(max(0, count) for count in self._surplus.get(slot, ()))

    def _give(self, slot: int, lane: int, to_lane: int, before: int, starts: dict[int, int]) -> int:
        """Moves blocks from a lane that has too many to one that has too few, the last of its row
        first; returns how many."""
        surplus = self._surplus[slot]
        room = min(self._moves.room(lane, to_lane), self.pages.available()[to_lane])
        count = min(surplus[lane], -surplus[to_lane], room)
        if count <= 0:
            return 0
        blocks, start = self._pop_movable(slot, lane, before, count)
        surplus[lane] -= count  # where fewer can move, the others stay
        if not blocks:
            return 0
        surplus[to_lane] += len(blocks)
        starts[lane] = min(start, starts.get(lane, start))
        start = self._insert(slot, to_lane, before, blocks)
        starts[to_lane] = min(start, starts.get(to_lane, start))
        self._move(slot, lane, to_lane, blocks)
        return len(blocks)

    def _pop_movable(self, slot: int, lane: int, before: int, count: int) -> tuple[list[int], int]:
        """Takes the last `count` blocks from a lane's row, of those before number `before` that the
        slot alone holds: these, and where the row begins to differ."""
        row = self._rows[slot][lane]
        table = self.tables[slot]
        refs = self.pages.refs
        blocks: list[int] = []
        others: list[int] = []
        start = len(row)
        while row and len(blocks) < count:
            block = row.pop()
            page = table[block]
            if block < before and refs[page] == 1 and not self._moves.writes(page):
                blocks.append(block)
                start = len(row)
            else:
                others.append(block)
        row += reversed(others)
        return blocks[::-1], start

    def _insert(self, slot: int, lane: int, before: int, blocks: list[int]) -> int:
        """Puts blocks into a lane's row, in front of those from number `before` on; returns where
        it begins to differ."""
        row = self._rows[slot][lane]
        if self._ascending:
            start = bisect.bisect(row, min(blocks))
            row += blocks
            row.sort()
            return start
        current: list[int] = []
        while row and row[-1] >= before:
            current.append(row.pop())
        start = len(row)
        row += blocks
        row += reversed(current)
        return start

    def _move(self, slot: int, lane: int, to_lane: int, blocks: list[int]) -> None:
        """Moves these blocks of the slot from pages of a lane to those of another."""
        table = self.tables[slot]
        pages = [table[block] for block in blocks]
        targets = self.pages.move(pages, to_lane)
        self._moves.add(lane, to_lane, pages, targets)
        self.stores.moved(pages, targets)
        for block, target in zip(blocks, targets):
            table[block] = target
        for watcher in self._watchers:
            watcher.released(slot, pages)
            watcher.taken(slot, targets)

    def group(self, slot: int) -> tuple[int, ...]:
        """The lanes over which the slot's next blocks are dealt out; none where one lane may hold
        them."""
        return self._group[slot]

    def lanes_of(self, slot: int, first: int, last: int) -> np.ndarray:
        """The lane of each of the slot's blocks `first` to before `last`, int32."""
        lanes, _ = self.pages.locate(np.asarray(self.tables[slot][first:last], np.int32))
        return lanes

    def release(self, slot: int) -> None:
        """Empties the slot: its published blocks stay cached, its other pages are free."""
        pages = self.tables[slot]
        self.tables[slot] = []
        self._rows[slot] = [[] for _ in range(self.pages.lanes)]
        self._surplus.pop(slot, None)
        self.pages.unref(pages)
        self._updates.drop(slot)
        self._recount(slot)
        for watcher in self._watchers:
            watcher.released(slot, pages)

    def _recount(self, slot: int) -> None:
        """Sets what is kept of the slot's page table."""
        table = self.tables[slot]
        by_lane = self.count_by_lane(np.asarray(table, np.intp))
        self.blocks_per_lane[slot] = by_lane
        self.capacity[slot] = len(table) * self.block_size
        self.group_size[slot] = size_of(int(self.home[slot]), by_lane.tolist())

    def count_by_lane(self, pages: np.ndarray) -> np.ndarray:
        """How many of these pages each lane has."""
        lanes, _ = self.pages.locate(pages)
        return np.bincount(lanes, minlength=self.pages.lanes)

    # --- what the device is told

    def _entries(self, slot: int) -> np.ndarray:
        """The entries [blocks, 5] of a slot whose rows all ascend, see TableUpdates."""
        pages = np.asarray(self.tables[slot], np.intp)
        entries = np.empty((len(pages), 5), np.int32)
        entries[:, LANE], entries[:, PAGE] = self.pages.locate(pages)
        entries[:, SLOT] = slot
        entries[:, BLOCK] = np.arange(len(pages))
        for lane in range(self.pages.lanes):
            on_lane = entries[:, LANE] == lane
            entries[on_lane, INDEX] = np.arange(np.count_nonzero(on_lane))
        return entries

    def _row_entries(self, slot: int, lane: int, start: int) -> np.ndarray:
        """The entries [m, 5] of a slot's row on a lane, from index `start` on."""
        blocks = self._rows[slot][lane][start:]
        table = self.tables[slot]
        entries = np.empty((len(blocks), 5), np.int32)
        entries[:, LANE] = lane
        entries[:, SLOT] = slot
        entries[:, INDEX] = np.arange(start, start + len(blocks))
        entries[:, BLOCK] = blocks
        entries[:, PAGE] = np.array([table[block] for block in blocks], np.int64)
        entries[:, PAGE] -= lane * self.pages.per_lane
        return entries

    def take_table_updates(self) -> np.ndarray:
        """Page table entries [m, 5] that are new since the last call, none twice: lane, slot, index
        in the row, page on the lane, block."""
        return self._updates.take()

    def take_moves(self) -> np.ndarray:
        """Pages [m, 4] that the next batch moves, see `Batch.moves`."""
        return self._moves.take()

    def check(self) -> None:
        """Errors: AssertionError with what differs."""
        self.pages.check(page for table in self.tables for page in table)
        for slot, table in enumerate(self.tables):
            counted = self.count_by_lane(np.asarray(table, np.intp))
            assert (counted == self.blocks_per_lane[slot]).all(), (
                f"slot {slot}: blocks per lane are {self.blocks_per_lane[slot]}, counted {counted}"
            )
            assert self.capacity[slot] == len(table) * self.block_size, (
                f"slot {slot}: capacity {self.capacity[slot]} with {len(table)} blocks"
            )
            self._check_rows(slot)
            size = size_of(int(self.home[slot]), counted.tolist())
            assert self.group_size[slot] == size, (
                f"slot {slot}: groups of {self.group_size[slot]} with {counted} from "
                f"{self.home[slot]}"
            )

    def _check_rows(self, slot: int) -> None:
        lanes, _ = self.pages.locate(np.asarray(self.tables[slot], np.intp))
        for lane, row in enumerate(self._rows[slot] if self.pages.lanes > 1 else ()):
            blocks = np.flatnonzero(lanes == lane).tolist()
            in_order = row if self._ascending or self.group_size[slot] == 1 else sorted(row)
            assert in_order == blocks, f"slot {slot}: a row of lane {lane} has {row}, not {blocks}"


def _even(group: tuple[int, ...], fixed: list[int], own: list[int]) -> list[int]:
    """How many blocks of its own a sequence shall have on each lane, so that the lanes of the group
    have equally many, but for one, as far as that goes.

    fixed, own: its blocks per lane that stay, and those that may move. Lanes outside the group get
    none; lanes that have most keep the odd ones.
    """
    lanes = sorted(group, key=lambda lane: (fixed[lane], -own[lane], lane))

    def level() -> int:
        return (sum(own) + sum(fixed[lane] for lane in lanes)) // len(lanes)

    while level() < fixed[lanes[-1]]:
        lanes.pop()  # has more than an even share in fixed ones alone
    share = level()
    odd = sum(own) + sum(fixed[lane] for lane in lanes) - share * len(lanes)
    wanted = [0] * len(fixed)
    fullest_first = sorted(lanes, key=lambda lane: (-(fixed[lane] + own[lane]), lane))
    for place, lane in enumerate(fullest_first):
        wanted[lane] = share - fixed[lane] + (place < odd)
    return wanted


def _runs(blocks: list[int]) -> Iterator[tuple[int, int]]:
    """The first and the one after the last of each run of consecutive numbers in ascending ones."""
    first = 0
    for place in range(1, len(blocks) + 1):
        if place == len(blocks) or blocks[place] != blocks[place - 1] + 1:
            yield blocks[first], blocks[place - 1] + 1
            first = place
