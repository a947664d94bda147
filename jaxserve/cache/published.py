"""Publishes the blocks of running sequences, so that later ones find them by their keys and share
their pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxserve.cache.block_events import BlockEvents, StoredBlocks
from jaxserve.cache.hashes import BlockHashes, CacheIdentity, group_key, is_block
from jaxserve.cache.lower_blocks import LowerBlocks
from jaxserve.cache.pages import PageAllocator
from jaxserve.cache.prefix_match import OLDEST, ChooseCopy, PrefixMatch, SeenPages, find_prefix
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
    ):
        """reach: see `SeenPages`."""
        self.events = BlockEvents(self._present)
        self.pages = PageAllocator(lanes, pages_per_lane, self.events)
        self.seen = SeenPages(self.pages, reach)
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

    def publish_further(self, layout: SequenceLayout, blocks: range, hashes: BlockHashes) -> None:
        """Publishes the pages of blocks in the groups behind the first, where they have some, on
        lanes that have a page which was published for the first group, and none for theirs."""
        allocator = self.pages
        for group, (pages, first) in enumerate(zip(layout.further, layout.first_seen), 1):
            for block in range(max(first, blocks.start), blocks.stop):
                page = pages[block]
                lane = page // allocator.per_lane
                key = group_key(hashes[block], group)
                if allocator.on_lane(hashes[block], lane) is None:
                    continue
                if allocator.on_lane(key, lane) is None and not allocator.publish(page, key):
                    allocator.add_copy(page, key)

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
            yield StoredBlocks(list(filter(is_block, self.pages.with_key)))
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
