"""Gives the running sequences their pages, and keeps the page tables as the device will see them.

The host knows a sequence by its slot. Where its blocks lie is in the slot's `SequenceLayout`; what
the packer of batches reads of all slots at once is in arrays beside.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from jaxserve.api.request import NORMAL_RETENTION, KvSource
from jaxserve.cache.hashes import BlockHashes, CacheIdentity, root_key
from jaxserve.cache.locks import BlockLocks
from jaxserve.cache.page_needs import PageNeeds
from jaxserve.cache.pages import PageCounts
from jaxserve.cache.prefix_match import NO_MATCH, BlockPage, PrefixMatch, ReachablePrefix
from jaxserve.cache.published import PublishedBlocks
from jaxserve.cache.state_checkpoints import StateCheckpoints
from jaxserve.cache.table_updates import TableUpdates
from jaxserve.cache.tiers import LowerTiers, SourceBlocks
from jaxserve.lanes.dealing import PromptLanes
from jaxserve.lanes.groups import group_around
from jaxserve.lanes.layout import SequenceLayout
from jaxserve.lanes.moves import PageMoves, Rebalance, deal_anew
from jaxserve.lanes.placement import PLACEMENTS, UNLIMITED
from jaxserve.settings.schema import CacheConfig, ConfigError


class PageWatcher(Protocol):
    """Counts which pages the sequence in a slot holds, as these change."""

    def taken(self, slot: int, pages: Sequence[int]) -> None:
        """Notes further pages of the slot."""

    def released(self, slot: int, pages: Sequence[int]) -> None:
        """Notes pages that the slot holds no more."""


class LaneRules(NamedTuple):
    """Rules for the places of blocks that come from a replica's programs.

    stripe: consecutive blocks on a lane, of a prompt that is dealt out. most_moves: pages that a
    batch moves from a lane to another. ascending: the blocks of every row ascend, as for models
    with sliding windows. windows: of the page groups behind the first, see
    `checkpoint.page_groups`. has_states: layers keep states, without which a sequence cannot go on
    from blocks. state_pages: of a checkpoint of a sequence's states; 0: none can be kept.
    """

    stripe: int = 1
    most_moves: int = 0
    ascending: bool = False
    has_states: bool = False
    windows: tuple[int, ...] = ()
    state_pages: int = 0


# shares of all pages that are locked at most, for prompts that wait, by leases and for sessions
PROMISED_SHARE = 1 / 4
LEASED_SHARE = 1 / 4
SESSION_SHARE = 1 / 2
ANONYMOUS = CacheIdentity()
NO_RULES = LaneRules()


class CacheManager:
    """The pages of `lanes` lanes for sequences in `slots` slots.

    config: `pages`, which is per lane, must be given. lower: where blocks that leave the devices
    are kept, and fetched from.

    To be read by all, by slot: `layouts`, and of these as arrays `home` (lane), `group_size` (of
    the smallest group of lanes that has home and all blocks; above 1 the sequence is spread),
    `blocks_per_lane` [slots, lanes] and `capacity` (tokens for which the slot has pages).
    `published` has the blocks that can be found, `promises` locks those that waiting prompts found,
    `leases` those that operators asked for; `placement` chooses lanes, `prompt_lanes` says on which
    ones prompts will lie; `copying`: blocks that many read are copied; `windows`: see `LaneRules`;
    `needs` counts the pages of sequences; `usable`: the most of one; `states`: the checkpoints of
    states, of a model with such layers. `table_updates`, `moves`, `stores` and what `states` copies
    are taken with each batch. `watchers` see pages come and go.
    """

    def __init__(
        self,
        config: CacheConfig,
        lanes: int,
        slots: int,
        identity: CacheIdentity = ANONYMOUS,
        lower: LowerTiers | None = None,
        rules: LaneRules = NO_RULES,
    ):
        if config.pages is None:
            raise ConfigError("pages", "must be known before the cache is made")
        self.block_size = config.block_size
        self.prefix_caching = config.prefix_caching and (
            not rules.has_states or rules.state_pages > 0
        )
        state_pages = rules.state_pages * self.prefix_caching
        self.copying = config.copies and lanes > 1
        self.identity = identity
        self.lower = lower
        self.windows = rules.windows
        self.needs = PageNeeds(self.block_size, self.windows)
        self.usable = self.needs.usable(config.pages, lanes)
        self.published = PublishedBlocks(
            lanes,
            config.pages,
            self.block_size,
            identity,
            lower,
            [seen - 1 for seen in self.needs.seen],
            state_pages,
        )
        self.pages = self.published.pages
        self.stores = self.published.stores
        self.events = self.published.events
        self.below = self.published.below
        self.states: StateCheckpoints | None = None
        if state_pages:
            spacing = config.checkpoint_tokens or 2 * state_pages * self.block_size
            take = functools.partial(_take, self)
            self.states = StateCheckpoints(self.published, take, spacing)
        most_below = 0 if lower is None else lower.most_locked // 2
        most_promised = int(PROMISED_SHARE * self.total)
        self.promises = BlockLocks(self.pages, self.below, most_promised, most_below)
        most_leased = int(LEASED_SHARE * self.total)
        self.leases = BlockLocks(self.pages, self.below, most_leased, most_below)
        self.sessions = BlockLocks(self.pages, self.below, int(SESSION_SHARE * self.total), 0)
        self.pages.on_shortage = self._give_up_locks
        self.table_updates = TableUpdates(len(self.windows))
        self.moves = PageMoves(config.pages, rules.most_moves)
        self.watchers: list[PageWatcher] = []
        limit = UNLIMITED
        if config.lane_tokens is not None:
            limit = self.blocks(config.lane_tokens)
        pool = config.pool(lanes)
        self.placement = PLACEMENTS[config.placement](lanes, limit, rules.stripe, pool)
        self.prompt_lanes = PromptLanes(self.placement, self.block_size, config.pages)
        self._layout = functools.partial(
            SequenceLayout,
            lanes=lanes,
            per_lane=config.pages,
            ascending=rules.ascending,
            further=len(self.windows),
        )
        self.layouts = [self._layout(slot) for slot in range(slots)]
        self.home = np.zeros(slots, np.int32)
        self.group_size = np.ones(slots, np.int32)
        self.blocks_per_lane = np.zeros((slots, lanes), np.int32)
        self.capacity = np.zeros(slots, np.int32)
        self._retention = [NORMAL_RETENTION] * slots

    # --- all pages

    @property
    def total(self) -> int:
        """Pages of all lanes."""
        return self.pages.lanes * self.pages.per_lane

    @property
    def available(self) -> int:
        """Pages that can be had on all lanes together, free or by eviction."""
        return sum(self.pages.available())

    @property
    def available_blocks(self) -> int:
        """Blocks for which pages of all page groups can be had on one lane each."""
        available = self.pages.available()
        if len(available) == 1:
            return available[0] // self.needs.per_block
        return sum(pages // self.needs.per_block for pages in available)

    @property
    def available_unlocked(self) -> int:
        """Pages that can be had on all lanes together without giving up a promise."""
        return sum(self.pages.available_unlocked())

    @property
    def reads(self) -> np.ndarray:
        """Blocks on each lane [lanes] that a step reads in which all running sequences decode."""
        return self.blocks_per_lane.sum(0)

    def blocks(self, tokens: int) -> int:
        """Returns the blocks that this many tokens take."""
        return -(-tokens // self.block_size)

    def counts(self) -> PageCounts:
        """Counts free, cached and held pages of all lanes."""
        return PageCounts(*map(sum, zip(*self.pages.by_lane())))

    # --- prefixes

    def block_hashes(self, salt: str, tokens: Callable[[int, int], np.ndarray]) -> BlockHashes:
        """Makes the block keys of a sequence, in this cache and under this salt. `tokens(a, b)`
        gives its tokens [b - a] int32."""
        root = root_key(self.identity, self.block_size, salt)
        return BlockHashes(root, self.block_size, tokens, salt)

    def match(self, hashes: BlockHashes, blocks: int, last: PrefixMatch = NO_MATCH) -> PrefixMatch:
        """Finds pages that hold the first blocks of a sequence, at most `blocks`. last: what was
        found for it before, if that is known."""
        if not self.prefix_caching:
            return NO_MATCH
        return self.published.match(hashes, blocks, last)

    def promise(self, number: int, due: float, hashes: BlockHashes, blocks: int) -> PrefixMatch:
        """Locks the first blocks that are known of a waiting sequence, at most `blocks`, on the
        devices and below them, until `promises` are released. number: of the sequence; due: clock
        second of its first token. Returns the pages that hold them."""
        found = self.match(hashes, blocks)
        if self.prefix_caching:
            prefix = self.published.reachable(hashes, blocks, found.pages)
            self.promises.lock(number, due, *self.published.keys_of(prefix, hashes))
        return found

    def publish(self, slot: int, first: int, last: int, hashes: BlockHashes) -> None:
        """Lets later batches share the slot's blocks `first` to before `last`, which are full and
        part of an issued batch."""
        if self.prefix_caching:
            layout = self.layouts[slot]
            retention = self._retention[slot]
            self.published.publish(layout.pages, range(first, last), hashes, retention)
            further = [
                BlockPage(block, group)
                for group, seen in enumerate(layout.first_seen, 1)
                for block in range(max(first, seen), last)
            ]
            self.published.publish_further(layout, further, hashes, retention)
            if self.states is not None:
                self.states.publish(slot, range(first, last), hashes, retention)

    def retract(self, slot: int) -> None:
        """Takes the keys from the slot's blocks: what its pages hold is damaged."""
        layout = self.layouts[slot]
        # windows have passed some of them
        behind = self.published.seen.beside(layout.pages)
        self.published.retract([*layout.held(), *behind])

    def flush(self) -> int:
        """Forgets the blocks that no slot holds, promised and leased ones too; returns how many
        pages are free by that."""
        self.promises.clear()
        self.sessions.clear()
        self.leases.clear()
        return self.pages.flush()

    def _give_up_locks(self, lane: int) -> bool:
        """Gives up what is kept for sessions, then promises, then leases, until a page of a lane
        can be evicted."""
        locks = (self.sessions, self.promises, self.leases)
        return any(each.make_room(lane) for each in locks)

    # --- the pages of a slot

    def choose_home(
        self, pages: np.ndarray, lanes: list[int], need: int, pending: list[float]
    ) -> int:
        """Chooses a home out of `lanes` for a sequence with these matched `pages` (medha.md M12).

        The lane with most of the matched blocks, as copies or not, if it has the `need` pages that
        the next chunk takes; else, of those that have them, the one with the least `pending` work
        (seconds per lane), then, where blocks have copies, the one that is read least, then with
        the most pages available.
        """
        if len(lanes) == 1:
            return lanes[0]
        matched = self.pages.readable_by_lane(pages).tolist()
        available = self.pages.available()
        reads = [0] * self.pages.lanes
        if self.pages.copied:
            reads = self.reads.tolist()

        def preference(lane: int) -> tuple[int, bool, float, int, int, int]:
            fits = available[lane] >= need
            load = -pending[lane], -reads[lane], available[lane]
            return matched[lane] * fits, fits, *load, -lane

        return max(lanes, key=preference)

    def dealt_over(self, home: int, pages: np.ndarray, blocks: int) -> tuple[int, ...]:
        """Returns the lanes over which the next blocks are dealt out of a prompt of `blocks`
        blocks, of which the matched `pages` hold the first: where a copied prefix is all at home,
        as of a prompt of the others alone."""
        if self.copying and len(pages) and (pages // self.pages.per_lane == home).all():
            blocks -= len(pages)
        return self.placement.dealt_over(home, blocks)

    def prefill_lanes(self, slot: int) -> Sequence[int]:
        """Returns the lanes that compute the slot's prompt where no plan says so: those over which
        it is dealt out, or those of the group that has its blocks, whichever are more."""
        layout = self.layouts[slot]
        around = group_around(layout.home, int(self.group_size[slot]))
        return max(around, layout.group, key=len)

    def admit(
        self,
        slot: int,
        pages: np.ndarray,
        home: int,
        blocks: int = 0,
        retention: int = NORMAL_RETENTION,
        hashes: BlockHashes | None = None,
        prefix: ReachablePrefix | None = None,
    ) -> None:
        """Gives an empty slot its home lane and the matched `pages`, which hold its first blocks.
        blocks: of the whole prompt. retention: of the request. hashes: of the sequence, for
        placements by key. prefix: with these pages, of which `fetch` brings what is missing."""
        assert not self.layouts[slot].pages, f"slot {slot} is taken"
        key_of = None
        if hashes is not None and self.prefix_caching:
            key_of = hashes.__getitem__
        layout = self._layout(slot, home=home, prompt_blocks=blocks, key_of=key_of)
        layout.group = self.dealt_over(home, pages, blocks)
        self.layouts[slot] = layout
        self._retention[slot] = retention
        if prefix is None and len(pages):
            prefix = self.published.matched(pages, hashes)
        if prefix is not None:
            self.pages.ref(prefix.on_pages)  # before others are taken, which could evict them
            if self.states is not None:
                self.states.admit(slot, prefix)
            self.stores.retain_longer(prefix.on_pages.tolist(), retention)
            firsts = self.published.seen.firsts(prefix.blocks)
            further = [
                [
                    _take(self, int(beside) // self.pages.per_lane) if page is None else page
                    for page, beside in zip(seen, pages[first:])
                ]
                for seen, first in zip(prefix.further, firsts)
            ]
            self.table_updates.add_all(layout.start(pages, further, firsts))
        self._changed(layout, taken=layout.held())

    def pass_windows(self, slot: int, start: int) -> None:
        """Takes back the pages that no token of a slot's sequence from position `start` on sees
        through the windows of their groups. Batches with tokens before it are issued already."""
        if not self.windows:
            return
        layout = self.layouts[slot]
        passed = self.needs.passed(layout, start)
        if passed:
            self.pages.unref(passed)
            self._changed(layout, released=passed)

    def extend(self, slot: int, blocks: int) -> None:
        """Gives the slot pages for its next `blocks` blocks, which must be available."""
        layout = self.layouts[slot]
        per_lane = self.pages.per_lane
        if self.pages.lanes == 1 and not self.windows:
            self._changed(layout, taken=_extend_alone(self, layout, blocks))
            return
        available: list[int] = []
        if self.pages.lanes > 1:
            available = self.pages.available()
        lane = layout.home
        first = len(layout.pages)
        dealt = self.placement.dealt(layout, blocks) if available else []
        new: list[int] = []
        for block in range(first, first + blocks):
            seen = [block >= seen for seen in layout.first_seen]
            need = 1 + sum(seen)
            if available:
                room = available if need == 1 else [pages // need for pages in available]
                lane = dealt[block - first] if dealt else lane
                if not (dealt and room[lane]):
                    lane = self.placement.next_lane(layout, room)
                available[lane] -= need
            page = _take(self, lane)
            further = [_take(self, lane) if sees else lane * per_lane for sees in seen]
            index = layout.append(page, lane, further)
            on_lane = [each - lane * per_lane for each in (page, *further)]
            self.table_updates.add(lane, slot, index, on_lane[0], block, *on_lane[1:])
            new += [page, *(each for each, sees in zip(further, seen) if sees)]
        self._changed(layout, taken=new)

    def regroup(self, slot: int, group: tuple[int, ...]) -> None:
        """Deals the slot's blocks out over the lanes of `group`: the next ones, and those so far by
        calls of `rebalance`."""
        self.layouts[slot].group = group
        self.deal_anew(slot, group)

    def deal_anew(self, slot: int, lanes: tuple[int, ...]) -> None:
        """Has the slot's blocks so far dealt out over `lanes` by calls of `rebalance`, wherever the
        next ones go."""
        deal_anew(self.layouts[slot], lanes, self.pages)

    def rebalance(self, slot: int, before: int) -> int:
        """Moves blocks of a regrouped slot, of those before number `before`, which are full and
        part of an issued batch, as many as the next batch has room for; returns how many pages
        move. None more or less are available after it, but for those that windows have passed."""
        layout = self.layouts[slot]
        if not layout.target:
            return 0
        self.pass_windows(slot, before * self.block_size)
        moved = Rebalance(layout, before, self.pages, self.moves)
        if moved.sources:
            self.stores.moved(moved.sources, moved.targets)
            for lane, start in moved.starts.items():
                self.table_updates.rewrite(lane, slot, start, layout.entries(lane, start))
            self._changed(layout, moved.targets, moved.sources)
        return len(moved.sources)

    def copy(self, page: int, lane: int) -> int | None:
        """Has the next batch copy a published page to a lane. Returns the copy, which is cached
        until a slot takes it, and can be found and held from now on; None where the lane has the
        block or no room for it, where the batch copies no more pages from lane to lane, or the page
        is itself written by it."""
        from_lane = page // self.pages.per_lane
        lanes = {copy // self.pages.per_lane for copy in self.pages.copies(page)}
        if page not in self.pages.key_of or lane in lanes or self.moves.writes(page):
            return None
        if self.moves.room(from_lane, lane) < 1 or not self.pages.available_unlocked()[lane]:
            return None
        copy = self.pages.copy(page, lane)
        self.moves.add(from_lane, lane, [page], [copy])
        self.stores.renewed(copy)
        self.stores.moved([page], [copy])
        return copy

    def repoint(self, slot: int, block: int, page: int, before: int) -> bool:
        """Has the slot read its `block` on another published page that has it, and on those beside
        it in the other page groups that see it; returns whether it does, which it does not where
        one of these is missing. before: the slot's blocks below this number, of which this is one,
        are full and part of an issued batch."""
        layout = self.layouts[slot]
        assert block < before and page in self.pages.key_of, f"block {block} is not on page {page}"
        self.pass_windows(slot, before * self.block_size)
        old = layout.of_block(block)
        further = self.published.seen.of_block(page, layout.groups_of(block))
        new = [page, *(each for each in further if each is not None)]
        if page == old[0] or len(new) < len(old):
            return page == old[0]
        self.pages.ref(np.array(new))
        for lane, start in layout.repoint(block, new, before).items():
            self.table_updates.rewrite(lane, slot, start, layout.entries(lane, start))
        self.pages.unref(old)
        self.stores.retain_longer([page], self._retention[slot])
        if layout.target:
            self.deal_anew(slot, layout.target)
        self._changed(layout, new, old)
        return True

    def fetch(
        self,
        slot: int,
        missing: Sequence[BlockPage],
        hashes: BlockHashes,
        source: KvSource | None = None,
        far: SourceBlocks | None = None,
        time_left: float = math.inf,
    ) -> int | None:
        """Gives the slot pages for its next blocks, and asks lower tiers to fill the `missing`
        pages of the prefix with which it was admitted, and `source` for those that they do not
        hold (see Fetch); pages must be available. Returns the fetch's ticket; None where nothing
        is asked, for the pages have what the next batch copies to others: blocks may come before
        it."""
        layout = self.layouts[slot]
        first = len(layout.pages)
        keys = [part.key(hashes) for part in missing]
        self.below.keep(keys, self._retention[slot])
        of_states: list[int] = []
        last = max(missing)
        if self.states is not None and any(part.of_states for part in missing):
            of_states = self.states.fetch(slot, layout.home, last.block + 1)
        self.extend(slot, sum(not part.group for part in missing))
        if self.moves.reads([*layout.pages[first:], *of_states]):
            return None
        parts = iter(of_states)
        on = [next(parts) if part.of_states else layout.page(*part) for part in missing]
        pages = np.array(on, np.int32)
        places = np.stack(divmod(pages, self.pages.per_lane), axis=1)
        return self.below.fetch(keys, places, source, far, time_left)

    def release(self, slot: int) -> None:
        """Empties the slot: its published blocks stay cached, its other pages are free."""
        layout = self.layouts[slot]
        held = layout.held()
        self.layouts[slot] = self._layout(slot)
        self.pages.unref(held)
        if self.states is not None:
            # no sequence goes on from blocks behind the last checkpoint
            self.pages.demote(layout.pages[self.states.reached(slot) :])
            self.states.release(slot)
        self.table_updates.drop(slot)
        self._changed(self.layouts[slot], released=held)

    def _changed(
        self, layout: SequenceLayout, taken: Sequence[int] = (), released: Sequence[int] = ()
    ) -> None:
        """Sets the arrays to what a slot's layout says, and shows watchers which pages came and
        went."""
        slot = layout.slot
        self.blocks_per_lane[slot] = layout.by_lane
        self.capacity[slot] = len(layout.pages) * self.block_size
        if self.pages.lanes > 1:
            self.home[slot] = layout.home
            self.group_size[slot] = layout.group_size
        for watcher in self.watchers:
            if released:
                watcher.released(slot, released)
            if taken:
                watcher.taken(slot, taken)

    def check(self) -> None:
        """Compares pages, layouts and arrays. Errors: AssertionError with what differs."""
        of_states = [] if self.states is None else self.states.held()
        self.pages.check([*of_states, *(page for each in self.layouts for page in each.held())])
        self.promises.check()
        self.sessions.check()
        self.leases.check()
        locked = bool(self.promises) or bool(self.leases) or bool(self.sessions)
        assert locked or not self.pages.locks, "a block stayed locked"
        for slot, layout in enumerate(self.layouts):
            layout.check()
            place = self.home[slot], self.group_size[slot], self.capacity[slot]
            right = layout.home, layout.group_size, len(layout.pages) * self.block_size
            assert place == right and self.blocks_per_lane[slot].tolist() == layout.by_lane, (
                f"slot {slot}: arrays have {place}, {self.blocks_per_lane[slot]}; "
                f"the layout {right}, {layout.by_lane}"
            )


def _take(cache: CacheManager, lane: int) -> int:
    """Takes a page of a lane, which must be available, for what is yet to be written to it."""
    page = cache.pages.allocate(lane)
    cache.moves.cancel(page)
    cache.stores.renewed(page)
    return page


def _extend_alone(cache: CacheManager, layout: SequenceLayout, blocks: int) -> list[int]:
    """Does what `extend` does where one lane has all pages, of one page group; returns the new
    pages."""
    first = len(layout.pages)
    allocate = cache.pages.allocate
    new = [allocate(0) for _ in range(blocks)]  # no block moves to one: there is one lane
    cache.stores.renewed_all(new)
    layout.extend(new)
    for block, page in enumerate(new, first):
        cache.table_updates.add(0, layout.slot, block, page, block)
    return new
