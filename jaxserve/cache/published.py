"""Publishes the blocks of running sequences, so that later ones find them by their keys and share
their pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from jaxserve.cache.block_events import BlockEvents, StoredBlocks
from jaxserve.cache.hashes import STATE_PART, BlockHashes, CacheIdentity, group_key, state_keys
from jaxserve.cache.lower_blocks import LowerBlocks
from jaxserve.cache.pages import PageAllocator
from jaxserve.cache.prefix_match import (
    OLDEST,
    BlockPage,
    ChooseCopy,
    PrefixMatch,
    ReachablePrefix,
    SeenPages,
    find_prefix,
)
from jaxserve.cache.stores import PendingStores
from jaxserve.cache.tiers import LowerTiers
from jaxserve.lanes.layout import SequenceLayout


class PublishedBlocks:
    """The blocks that can be found in one cache, on its pages and below them.

    `events` tells listeners what is stored and lost; `stores` has the pages that lower tiers are to
    keep; `below` asks these tiers. `choose`: which of several pages with a block a match takes;
    `seen`: the pages of blocks in further page groups.
    """

    def __init__(
        self,
        lanes: int,
        pages_per_lane: int,
        block_size: int,
        identity: CacheIdentity,
        tiers: LowerTiers | None,
        reach: Sequence[int] = (),
        states: int = 0,
    ):
        """reach, states: see `SeenPages`."""
        self.events = BlockEvents(self._present)
        self.pages = PageAllocator(lanes, pages_per_lane, self.events)
        self.seen = SeenPages(self.pages, reach, states)
        self.choose: ChooseCopy = self.seen.fullest if reach else OLDEST
        self.stores = PendingStores(self.pages)
        self.below = LowerBlocks(tiers, self.stores, self.events, identity, block_size)
        if tiers is not None:
            self.pages.on_evict = self._evicted

    def match(self, hashes: BlockHashes, blocks: int, last: PrefixMatch) -> PrefixMatch:
        """Finds pages that hold the first blocks of a sequence, at most `blocks`. last: what was
        found before for it."""
        found = find_prefix(self.pages, hashes, blocks, last, self.choose)
        return self.seen.shortened(found, hashes)

    def matched(
        self, pages: np.ndarray, hashes: BlockHashes | None, received: int = 0
    ) -> ReachablePrefix:
        """Returns the prefix that a match has found, of which nothing is to be fetched. received:
        first blocks that come with the request, if these are more."""
        blocks = max(len(pages), received)
        if hashes is None:
            return ReachablePrefix(pages, blocks, [], [], [])
        further = self.seen.behind(blocks, pages, hashes)
        states: list[int] = []
        if blocks == len(pages):  # else states come with the request too
            states = self.seen.checkpoint_after(blocks, hashes)
        return ReachablePrefix(pages, blocks, further, [], states)

    def reachable(
        self,
        hashes: BlockHashes,
        blocks: int,
        pages: np.ndarray,
        far: int = 0,
        home: int | None = None,
    ) -> ReachablePrefix:
        """Finds the longest prefix of a sequence, of at most `blocks` blocks, that can be had from
        pages and lower tiers. pages: a match of its first blocks. far: as many have another
        replica, which is asked for what is not here, with what is seen behind them. home: the lane
        that needs its states; None: any."""
        if self.seen:  # more blocks have pages than end where groups see published ones alone
            known = PrefixMatch(pages, pages, self.pages.generation[pages])
            pages = find_prefix(self.pages, hashes, blocks, known, self.choose).pages
        below = self.below
        known_blocks = len(pages) + len(below.fetchable(hashes, len(pages), blocks))
        on_pages = pages.tolist()
        keys = list(hashes.keys(0, known_blocks))

        def there(block: int, group: int) -> bool:
            key = group_key(keys[block], group)
            if group == STATE_PART:
                parts = state_keys(keys[block], self.seen.states)
                on_lane = bool(self.seen.checkpoint(keys[block], home))
                return on_lane or all(map(below.holds, parts))
            beside = block < len(on_pages) and self.seen.page(key, on_pages[block]) is not None
            return beside or below.holds(key)

        end = max(self.seen.depth(known_blocks, there), min(far, blocks))
        pages = pages[:end]
        further = self.seen.behind(end, pages, hashes)
        states = self.seen.checkpoint_after(end, hashes, home)
        missing = [BlockPage(block) for block in range(len(pages), end)]
        firsts = self.seen.firsts(end)
        for part in self.seen.parts(end):
            if part.of_states:
                if not states:
                    missing.append(part)
                continue
            at = part.block - firsts[part.group - 1]
            if part.block >= len(pages) or further[part.group - 1][at] is None:
                missing.append(part)
        return ReachablePrefix(pages, end, further, sorted(missing), states)

    def keys_of(
        self, prefix: ReachablePrefix, hashes: BlockHashes
    ) -> tuple[list[bytes], list[bytes]]:
        """Returns the keys of what is on pages of a prefix, and of what is missing."""
        missing = prefix.keys(hashes)
        lacks = set(missing)
        seen = [key for key in self.seen.keys(prefix.blocks, hashes) if key not in lacks]
        return [*hashes.keys(0, len(prefix.pages)), *seen], missing

    def publish(
        self, table: Sequence[int], blocks: range, hashes: BlockHashes, retention: int
    ) -> None:
        """Publishes blocks of a sequence that has the pages `table`. retention: of its request."""
        publish = self.pages.publish
        parent = hashes[blocks.start - 1] if blocks.start else None
        new: list[int] = []
        for block in blocks:
            key = hashes[block]
            if publish(table[block], key, parent):
                new.append(block)
            parent = key
        if self.below.tiers is not None:
            self._retain(table, blocks, new, hashes, retention)
        if self.stores.wanted:
            self.stores.published((table[block], hashes[block]) for block in new)
        if new and self.events:
            self._tell(new, hashes)

    def publish_fetched(
        self,
        layout: SequenceLayout,
        fetched: Sequence[BlockPage],
        hashes: BlockHashes,
        retention: int,
    ) -> None:
        """Publishes pages of a sequence that a fetch has filled. retention: of its request."""
        blocks = [part.block for part in fetched if not part.group]
        if blocks:
            of_blocks = range(min(blocks), max(blocks) + 1)
            self.publish(layout.pages, of_blocks, hashes, retention)
        further = [part for part in fetched if part.group and not part.of_states]
        self.publish_further(layout, further, hashes, retention)

    def publish_states(self, pages: Sequence[int], key: bytes, retention: int) -> None:
        """Publishes the pages of the checkpoint of the states after the block with this key, which
        are all on one lane. retention: of its request."""
        self._publish_beside(zip(pages, state_keys(key, len(pages))), retention)

    def publish_further(
        self,
        layout: SequenceLayout,
        parts: Iterable[BlockPage],
        hashes: BlockHashes,
        retention: int,
    ) -> None:
        """Publishes pages of a sequence in the groups behind the first, on lanes that have a page
        which was published for the first group, and none for theirs. retention: of its request."""
        beside: list[tuple[int, bytes]] = []
        for part in parts:
            page = layout.page(part.block, part.group)
            if self.pages.on_lane(hashes[part.block], page // self.pages.per_lane) is not None:
                beside.append((page, part.key(hashes)))
        self._publish_beside(beside, retention)

    def _publish_beside(self, parts: Iterable[tuple[int, bytes]], retention: int) -> None:
        """Publishes pages by their keys, of parts beside a block, where their lanes have no page
        with these. retention: of their request."""
        new: list[tuple[int, bytes]] = []
        for page, key in parts:
            if self.pages.on_lane(key, page // self.pages.per_lane) is not None:
                self.stores.retain_longer(self.pages.with_key[key], retention)
            elif self.pages.publish(page, key):
                new.append((page, key))
                self.stores.retain(page, retention)
            else:
                self.pages.add_copy(page, key)
                self.stores.retain(page, retention)
        if self.stores.wanted:
            self.stores.published(new)

    def _retain(
        self,
        table: Sequence[int],
        blocks: range,
        new: list[int],
        hashes: BlockHashes,
        retention: int,
    ) -> None:
        """Notes for how long blocks, of which the `new` ones were not published before, should
        outlast their pages."""
        for block in new:
            self.stores.retain(table[block], retention)
        for block in set(blocks).difference(new):
            self.stores.retain_longer(self.pages.with_key[hashes[block]], retention)

    def _tell(self, blocks: list[int], hashes: BlockHashes) -> None:
        """Sends listeners these blocks of a sequence, which were published just now."""
        for first, last in _runs(blocks):
            self.events.stored(
                StoredBlocks(
                    list(hashes.keys(first, last)),
                    parent=hashes[first - 1] if first else None,
                    tokens=hashes.tokens(first, last),
                    salt=hashes.salt,
                )
            )

    def _present(self) -> Iterator[StoredBlocks]:
        """Yields the blocks that can be found now, without their sequences, which are not known any
        more."""
        if self.pages.with_key:
            yield StoredBlocks(list(self.pages.with_key))
        yield from self.below.present()

    def _evicted(self, page: int, key: bytes) -> None:
        """Has the block on a page kept, on the other pages that have it or below."""
        others = [copy for copy in self.pages.with_key[key] if copy != page]
        if others:
            self.stores.retain_longer(others, self.stores.retention(page))
        else:
            self.below.evicted(page, key)

    def retract(self, table: Sequence[int]) -> None:
        """Takes the keys from the blocks on these pages, whose content is damaged, and from their
        copies."""
        self.stores.drop(copy for page in table for copy in self.pages.copies(page))
        self.pages.retract(table)
        self.below.recheck()


def _runs(blocks: list[int]) -> Iterator[tuple[int, int]]:
    """Yields the first and the one after the last of each run of consecutive numbers in ascending
    ones."""
    first = 0
    for place in range(1, len(blocks) + 1):
        if place == len(blocks) or blocks[place] != blocks[place - 1] + 1:
            yield blocks[first], blocks[place - 1] + 1
            first = place
