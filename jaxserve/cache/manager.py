"""The page tables of the running sequences, as the device will see them.

Per slot and lane the device keeps a row of pages, in ascending order of the blocks on them. This is
the host's copy; what changed since the last batch is told in deltas, so that what is sent per step
does not depend on how long a context is (medha.md M13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from jaxserve.cache.hashes import BlockHashes, root_key
from jaxserve.cache.pages import PageAllocator
from jaxserve.cache.placement import PLACEMENTS, Placement, PlacementView
from jaxserve.settings.schema import CacheConfig, ConfigError


class PageWatcher(Protocol):
    """Told which pages the sequence in a slot holds, as these change."""

    def taken(self, slot: int, pages: Sequence[int]) -> None:
        """The slot holds these pages too."""

    def released(self, slot: int, pages: Sequence[int]) -> None:
        """The slot holds these pages no more."""


class CacheManager:
    """PageAllocator of `lanes` lanes for sequences in `slots` slots. `config.pages` is per lane and must be
    given.

    Arrays by slot, for all to read: `home` (lane), `spread` (has blocks elsewhere than at home),
    `blocks_per_lane` [slots, lanes] and `room` (tokens that the slot's pages hold).
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
    ):
        if config.pages is None:
            raise ConfigError("pages", "must be known before the cache is made")
        self.block_size = config.block_size
        self.prefix_caching = config.prefix_caching
        self.pages = PageAllocator(lanes, config.pages)
        self.home = np.zeros(slots, np.int32)
        self.spread = np.zeros(slots, bool)
        self.blocks_per_lane = np.zeros((slots, lanes), np.int32)
        self.room = np.zeros(slots, np.int32)
        self.tables: list[list[int]] = [[] for _ in range(slots)]  # page of every block, in order
        self._watchers: list[PageWatcher] = []
        self._identity = (fingerprint, dtype, config.block_size)
        placement = config.placement if placement is None else placement
        self._place = PLACEMENTS[placement] if isinstance(placement, str) else placement
        self._stripe = stripe
        self._blocks = [0] * slots
        self._group: list[tuple[int, ...]] = [()] * slots
        self._limit = (
            2**31 if config.lane_tokens is None else -(-config.lane_tokens // config.block_size)
        )
        self._lane = [0] * slots
        self._told: list[np.ndarray] = []  # deltas, oldest first; newest are in `_deltas`
        self._deltas: list[int] = []
        self._moves: list[tuple[int, int, int, int]] = []

    def block_hashes(self, salt: str, tokens: Callable[[int, int], np.ndarray]) -> BlockHashes:
        """Block keys of a sequence, in this cache and under this salt. `tokens(a, b)` gives its
        tokens [b - a] int32."""
        return BlockHashes(root_key(*self._identity, salt), self.block_size, tokens)

    @property
    def total(self) -> int:
        return self.pages.lanes * self.pages.per_lane

    @property
    def available(self) -> int:
        """PageAllocator that can be had on all lanes together, free or by eviction."""
        return sum(self.pages.available())

    @property
    def reach(self) -> int:
        """Tokens of a sequence that a lane holds before the next one joins."""
        return min(self._limit, self.pages.per_lane) * self.block_size

    def blocks(self, tokens: int) -> int:
        """Blocks, and so pages, that this many tokens take."""
        return -(-tokens // self.block_size)

    def match(self, chain: BlockHashes, blocks: int) -> np.ndarray:
        """PageAllocator [n] that hold the first blocks of a sequence, at most `blocks` of them."""
        if not self.prefix_caching:
            return chain.pages
        # only what changed is looked up again
        page_of = self.pages.page_of
        stamps = self.pages.generation
        last = chain.pages
        same = stamps[last] == chain.generation
        known = len(last) if same.all() else int(same.argmin())
        found: list[int] = []
        while (
            known + len(found) < blocks
            and (page := page_of.get(chain[known + len(found)])) is not None
        ):
            found.append(page)
        if found or known < len(last):
            chain.pages = np.concatenate([last[:known], np.array(found, np.intp)])
            chain.generation = stamps[chain.pages]
        return chain.pages[:blocks]

    def evictable(self, pages: np.ndarray) -> int:
        """How many of these nobody holds: taking them makes that many fewer available."""
        return int(np.count_nonzero(self.pages.refs[pages] == 0)) if len(pages) else 0

    def choose_home(
        self, pages: np.ndarray, lanes: list[int], need: int, pending: list[float]
    ) -> int:
        """A home out of `lanes` for a sequence with these matched `pages`, whose next chunk will
        `need` that many more (medha.md M12).

        The lane with most of the matched pages, if it has room for the chunk; else, of those with
        room, the one with the least `pending` work (seconds per lane) and then the most room.
        """
        if len(lanes) == 1:
            return lanes[0]
        matched = self._by_lane(pages)
        room = self.pages.available()
        fits = [lane_room >= need for lane_room in room]
        return max(
            lanes,
            key=lambda lane: (
                matched[lane] if fits[lane] else 0,
                fits[lane],
                -pending[lane],
                room[lane],
                -lane,
            ),
        )

    def watch(self, watcher: PageWatcher) -> None:
        """Tells `watcher` from now on which pages slots take and give back."""
        self._watchers.append(watcher)

    def admit(self, slot: int, pages: np.ndarray, home: int, blocks: int = 0) -> None:
        """Gives an empty slot the matched `pages` and its home lane; blocks: of the whole
        prompt."""
        assert not self.tables[slot], f"slot {slot} is taken"
        self.home[slot] = self._lane[slot] = home
        self.tables[slot] = pages.tolist()
        self.room[slot] = len(pages) * self.block_size
        self._blocks[slot], self._group[slot] = (
            blocks,
            tuple(range(self.pages.lanes)) if blocks > self._limit else (),
        )
        if len(pages):
            self.pages.ref(pages)
            for watcher in self._watchers:
                watcher.taken(slot, self.tables[slot])
            self.blocks_per_lane[slot] = matched = self._by_lane(pages)
            self.spread[slot] = matched.sum() > matched[home]
            self._told.append(self._rows(slot, pages))

    def _by_lane(self, pages: np.ndarray) -> np.ndarray:
        return np.bincount(pages // self.pages.per_lane, minlength=self.pages.lanes)

    def _rows(self, slot: int, ids: np.ndarray) -> np.ndarray:
        """Deltas [m, 5] of a slot's first blocks."""
        rows = np.empty((len(ids), 5), np.int32)
        rows[:, 0], rows[:, 3] = np.divmod(ids, self.pages.per_lane)
        rows[:, 1], rows[:, 4] = slot, np.arange(len(ids))
        for lane in range(self.pages.lanes):
            on_lane = rows[:, 0] == lane
            rows[on_lane, 2] = np.arange(np.count_nonzero(on_lane))
        return rows

    def extend(self, slot: int, blocks: int) -> None:
        """PageAllocator for the next `blocks` blocks of the slot, which must be available."""
        table = self.tables[slot]
        per_lane = self.pages.per_lane
        held = self.blocks_per_lane[slot].tolist()
        lane = self._lane[slot]
        fixed = int(self.home[slot]), self._blocks[slot], self._group[slot], self._stripe
        for _ in range(blocks):
            block = len(table)
            if len(held) > 1:
                lane = self._place(
                    PlacementView(
                        self.pages.available(), held, lane, self._limit, block, slot, *fixed
                    )
                )
            page = self.pages.allocate(lane)
            self._deltas += (lane, slot, held[lane], page - lane * per_lane, block)
            held[lane] += 1
            table.append(page)
        for watcher in self._watchers:
            watcher.taken(slot, table[len(table) - blocks :])
        self._lane[slot] = lane
        self.blocks_per_lane[slot] = held
        self.room[slot] = len(table) * self.block_size
        self.spread[slot] = held[self.home[slot]] < len(table)

    def regroup(self, slot: int, group: tuple[int, ...]) -> bool:
        """The slot's next blocks go over the lanes of `group`, and its blocks so far are moved, as
        few as that takes, until those have equally many, but for one (Tetris, section 4.1). Blocks
        that others hold too stay where they are. False, with nothing changed, where a lane has no
        room. No page more or less is available after it."""
        table = self.tables[slot]
        per_lane = self.pages.per_lane
        ids = np.asarray(table, np.intp)
        own = np.flatnonzero(self.pages.refs[ids] == 1)
        mine = self._by_lane(ids[own])
        wanted = _even(group, (self.blocks_per_lane[slot] - mine).tolist(), mine.tolist())
        if any(
            want - has > room
            for want, has, room in zip(wanted, mine.tolist(), self.pages.available())
        ):
            return False
        takers = [lane for lane in group for _ in range(wanted[lane] - int(mine[lane]))]
        left = (mine - wanted).tolist()
        for block in own[::-1].tolist():
            lane = table[block] // per_lane
            if left[lane] > 0:
                left[lane] -= 1
                table[block] = self._move(slot, table[block], takers.pop())
        self._group[slot], ids = group, np.asarray(table, np.intp)
        self.blocks_per_lane[slot] = self._by_lane(ids)
        self.spread[slot] = self.blocks_per_lane[slot, self.home[slot]] < len(table)
        if len(own):
            # what was told of this one no longer holds
            others = [rows[rows[:, 1] != slot] for rows in (*self._told, self._grown())]
            self._told = [*others, self._rows(slot, ids)]
        return True

    def _move(self, slot: int, page: int, lane: int) -> int:
        new = self.pages.move(page, lane)
        per_lane = self.pages.per_lane
        for watcher in self._watchers:
            watcher.released(slot, [page])
            watcher.taken(slot, [new])
        self._moves.append((page // per_lane, page % per_lane, lane, new % per_lane))
        return new

    def group(self, slot: int) -> tuple[int, ...]:
        """The lanes over which the slot's next blocks are dealt out; none where one lane may hold
        them."""
        return self._group[slot]

    def take_moves(self) -> np.ndarray:
        """PageAllocator [m, 4] to be moved before the next batch, in this order: lane, page, to lane,
        page."""
        moves = np.array(self._moves, np.int32).reshape(-1, 4)
        self._moves = []
        return moves

    def lanes_of(self, slot: int, first: int, last: int) -> np.ndarray:
        """The lane of each of the slot's blocks `first` to before `last`."""
        return np.asarray(self.tables[slot][first:last], np.int32) // self.pages.per_lane

    def publish(self, slot: int, first: int, last: int, chain: BlockHashes) -> None:
        """Blocks `first` to before `last` of the slot are full and part of an issued batch: later
        batches may share them."""
        if self.prefix_caching:
            for block in range(first, last):
                self.pages.publish(self.tables[slot][block], chain[block])

    def retract(self, slot: int) -> None:
        """What the slot's pages hold is damaged: nobody shall match it from now on."""
        self.pages.retract(self.tables[slot])

    def flush(self) -> int:
        """Forgets the blocks that no slot holds; how many pages are free by that."""
        return self.pages.flush()

    def release(self, slot: int) -> None:
        """Empties the slot."""
        self.pages.unref(self.tables[slot])
        for watcher in self._watchers:
            watcher.released(slot, self.tables[slot])
        self.tables[slot] = []
        self.blocks_per_lane[slot] = 0
        self.room[slot] = 0
        self.spread[slot] = False

    def take_table_updates(self) -> np.ndarray:
        """New page table entries [m, 5] since the last call: lane, slot, index in the row, page,
        block; ascending blocks per row."""
        deltas = np.concatenate([*self._told, self._grown()]) if self._told else self._grown()
        self._told = []
        return deltas

    def _grown(self) -> np.ndarray:
        """Entries that `extend` made and nothing else came after."""
        deltas = np.array(self._deltas, np.int32).reshape(-1, 5)
        self._deltas = []
        return deltas

    def counts(self) -> tuple[int, int, int]:
        """PageAllocator of all lanes: free, cached, held."""
        free, cached, held = zip(*self.by_lane())
        return sum(free), sum(cached), sum(held)

    def by_lane(self) -> list[tuple[int, int, int]]:
        """PageAllocator of each lane: free, cached, held."""
        pages = self.pages
        return [
            (len(free), len(cached), pages.per_lane - len(free) - len(cached))
            for free, cached in zip(pages.free, pages.cached)
        ]

    def check(self) -> None:
        """Errors: AssertionError with what differs."""
        self.pages.check(page for table in self.tables for page in table)
        for slot, table in enumerate(self.tables):
            on = np.bincount(
                np.asarray(table, np.intp) // self.pages.per_lane, minlength=self.pages.lanes
            )
            assert (on == self.blocks_per_lane[slot]).all(), (
                f"slot {slot}: held {self.blocks_per_lane[slot]} but its pages are on {on}"
            )
            assert self.room[slot] == len(table) * self.block_size, (
                f"slot {slot}: room {self.room[slot]} with {len(table)} blocks"
            )
            assert self.spread[slot] == (on.sum() > on[self.home[slot]]), (
                f"slot {slot}: spread {self.spread[slot]} with {on}"
            )


def _even(group: tuple[int, ...], fixed: list[int], own: list[int]) -> list[int]:
    """How many of its own blocks each lane shall have, so that with `fixed` ones the lanes of the
    group have equally many, but for one, as far as that goes; others have none. Lanes that have
    most keep the odd ones."""
    total = sum(own)
    lanes = sorted(group, key=lambda lane: (fixed[lane], -own[lane], lane))
    while (level := (total + sum(fixed[lane] for lane in lanes)) // len(lanes)) < fixed[lanes[-1]]:
        lanes.pop()  # has more than that already
    out = [0] * len(fixed)
    more = total + sum(fixed[lane] for lane in lanes) - level * len(lanes)
    for place, lane in enumerate(
        sorted(lanes, key=lambda lane: (-(fixed[lane] + own[lane]), lane))
    ):
        out[lane] = level - fixed[lane] + (place < more)
    return out
