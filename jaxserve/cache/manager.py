"""Gives the running sequences their pages, and keeps the page tables as the device will see them.

A sequence's blocks are numbered in the order of its tokens; each is on one page of one lane. The
host knows a sequence by its slot, and keeps for each slot the pages of its blocks in order; the
device keeps a row of pages per slot and lane (see `table_updates`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from jaxserve.api.batch import NO_STORES
from jaxserve.api.lane_groups import size_of
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
from jaxserve.cache.table_updates import BLOCK, INDEX, LANE, PAGE, SLOT, TableUpdates
from jaxserve.cache.tiers import Fetch, LowerTiers, SourceBlocks
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
    fetched from.

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

    def take_stores(self) -> np.ndarray:
        """Pages [m, 7] whose blocks leave the devices, see `Batch.stores`: to be read before
        anything else is done to them."""
        return self.stores.take()

    def stores_at_the_end(self) -> np.ndarray:
        """Pages [m, 7] whose blocks should outlast the devices, see `Batch.stores`; none where
        nothing below them does. No more batch may come."""
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
        matched = self._count_by_lane(pages)
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
            self._updates.add_all(self._entries(slot))
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

    def regroup(self, slot: int, group: tuple[int, ...]) -> bool:
        """Deals the slot's blocks out over the lanes of `group`, those so far and those to come.

        As few blocks move as it takes until the lanes have equally many, but for one (Tetris,
        section 4.1). Blocks that other sequences hold too stay where they are. No page more or less
        is available after it. Returns False, with nothing changed, where a lane has no room.
        """
        table = self.tables[slot]
        pages = np.asarray(table, np.intp)
        own = np.flatnonzero(self.pages.refs[pages] == 1)
        own_per_lane = self._count_by_lane(pages[own])
        fixed = self.blocks_per_lane[slot] - own_per_lane
        wanted = np.array(_even(group, fixed.tolist(), own_per_lane.tolist()))
        if (wanted - own_per_lane > self.pages.available()).any():
            return False
        before = self._entries(slot)
        targets = [lane for lane in group for _ in range(wanted[lane] - own_per_lane[lane])]
        too_many = (own_per_lane - wanted).tolist()
        for block in own[::-1].tolist():
            lane, _ = self.pages.locate(table[block])
            if too_many[lane] > 0:
                too_many[lane] -= 1
                table[block] = self._move(slot, table[block], targets.pop())
        self._group[slot] = group
        self._recount(slot)
        if len(own):
            self._updates.replace(before, self._entries(slot))
        return True

    def _move(self, slot: int, page: int, lane: int) -> int:
        """Moves a block of the slot to a page of `lane`; returns that."""
        new = self.pages.move(page, lane)
        self._updates.add_move(*self.pages.locate(page), *self.pages.locate(new))
        self.stores.renewed(new)
        self.stores.retain(new, self.stores.retention(page))
        for watcher in self._watchers:
            watcher.released(slot, [page])
            watcher.taken(slot, [new])
        return new

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
        self.pages.unref(pages)
        self._updates.drop(slot)
        self._recount(slot)
        for watcher in self._watchers:
            watcher.released(slot, pages)

    def _recount(self, slot: int) -> None:
        """Sets what is kept of the slot's page table."""
        table = self.tables[slot]
        by_lane = self._count_by_lane(np.asarray(table, np.intp))
        self.blocks_per_lane[slot] = by_lane
        self.capacity[slot] = len(table) * self.block_size
        self.group_size[slot] = size_of(int(self.home[slot]), by_lane.tolist())

    def _count_by_lane(self, pages: np.ndarray) -> np.ndarray:
        lanes, _ = self.pages.locate(pages)
        return np.bincount(lanes, minlength=self.pages.lanes)

    # --- what the device is told

    def _entries(self, slot: int) -> np.ndarray:
        """The slot's page table as entries [blocks, 5], see TableUpdates."""
        pages = np.asarray(self.tables[slot], np.intp)
        entries = np.empty((len(pages), 5), np.int32)
        entries[:, LANE], entries[:, PAGE] = self.pages.locate(pages)
        entries[:, SLOT] = slot
        entries[:, BLOCK] = np.arange(len(pages))
        for lane in range(self.pages.lanes):
            on_lane = entries[:, LANE] == lane
            entries[on_lane, INDEX] = np.arange(np.count_nonzero(on_lane))
        return entries

    def take_table_updates(self) -> np.ndarray:
        """Page table entries [m, 5] that are new since the last call, none twice: lane, slot, index
        in the row, page on the lane, block."""
        return self._updates.take()

    def take_moves(self) -> np.ndarray:
        """Pages [m, 4] to be moved before the next batch, in this order: lane, page, to lane, to
        page."""
        return self._updates.take_moves()

    def check(self) -> None:
        """Errors: AssertionError with what differs."""
        self.pages.check(page for table in self.tables for page in table)
        for slot, table in enumerate(self.tables):
            counted = self._count_by_lane(np.asarray(table, np.intp))
            assert (counted == self.blocks_per_lane[slot]).all(), (
                f"slot {slot}: blocks per lane are {self.blocks_per_lane[slot]}, counted {counted}"
            )
            assert self.capacity[slot] == len(table) * self.block_size, (
                f"slot {slot}: capacity {self.capacity[slot]} with {len(table)} blocks"
            )
            size = size_of(int(self.home[slot]), counted.tolist())
            assert self.group_size[slot] == size, (
                f"slot {slot}: groups of {self.group_size[slot]} with {counted} from "
                f"{self.home[slot]}"
            )


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
