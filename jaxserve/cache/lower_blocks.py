"""Brings blocks from the tiers below the devices to pages, and has blocks kept there."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from jaxserve.api.batch import NO_STORES, PageStores
from jaxserve.api.request import KvSource
from jaxserve.cache.block_events import BlockEvents, StoredBlocks
from jaxserve.cache.hashes import BlockHashes, CacheIdentity, root_key
from jaxserve.cache.stores import PendingStores
from jaxserve.cache.tiers import Fetch, LowerTiers, SourceBlocks


class LowerBlocks:
    """The tiers below one cache, where it has any.

    stores: pages that are to be kept. events: of the cache. identity, block_size: of its blocks.
    """

    def __init__(
        self,
        tiers: LowerTiers | None,
        stores: PendingStores,
        events: BlockEvents,
        identity: CacheIdentity,
        block_size: int,
    ):
        self.tiers = tiers
        self._stores = stores
        self._events = events
        self.identity = identity
        self._block_size = block_size
        self._tickets = itertools.count()
        self._fetches: list[Fetch] = []
        self._locks = Counter[bytes]()  # of each block

    # --- locks

    def lock(self, key: bytes) -> None:
        """Adds a lock to a block, which stays in its tier meanwhile."""
        self._locks[key] += 1
        if self._locks[key] == 1 and self.tiers is not None:
            self.tiers.lock(key)

    def unlock(self, key: bytes) -> None:
        """Takes a lock from a block."""
        self._locks[key] -= 1
        if not self._locks[key]:
            del self._locks[key]
            if self.tiers is not None:
                self.tiers.unlock(key)

    # --- up

    def holds(self, key: bytes) -> bool:
        """Returns whether lower tiers hold a page."""
        return self.tiers is not None and self.tiers.holds(key)

    def fetchable(self, hashes: BlockHashes, first: int, last: int) -> list[bytes]:
        """Returns the keys of the blocks from `first` on, to before `last`, that lower tiers hold
        without a gap."""
        if self.tiers is None:
            return []
        return list(itertools.takewhile(self.tiers.holds, hashes.keys(first, last)))

    def source_blocks(
        self, hashes: BlockHashes, first: int, last: int, size: int
    ) -> SourceBlocks | None:
        """Returns the blocks of `size` tokens, of another replica, that cover the blocks `first` to
        before `last` of a sequence; None where its blocks have the size of those of this cache."""
        if size in (0, self._block_size):
            return None
        begin, end = first * self._block_size, last * self._block_size
        far = hashes.resized(root_key(self.identity, size, hashes.salt), size)
        keys = [far[block] for block in range(begin // size, -(-end // size))]
        return SourceBlocks(keys, size, begin % size)

    def keep(self, keys: Sequence[bytes], retention: int) -> None:
        """Has blocks kept for as long as a request of this retention asks."""
        if self.tiers is not None:
            self.tiers.keep(keys, retention)

    def fetch(
        self,
        keys: list[bytes],
        places: np.ndarray,
        source: KvSource | None,
        far: SourceBlocks | None,
        time_left: float,
    ) -> int:
        """Asks for blocks, see `Fetch`. Returns the fetch's ticket."""
        ticket = next(self._tickets)
        self._fetches.append(Fetch(ticket, keys, places, source, far, time_left))
        return ticket

    def take_fetches(self) -> list[Fetch]:
        """Returns fetches since the last call."""
        fetches = self._fetches
        self._fetches = []
        return fetches

    # --- down

    def evicted(self, page: int, key: bytes) -> None:
        """Has a block kept that is about to leave its page, the last one that has it."""
        if self.tiers is not None and self._stores.evicted(page, key) and self._events:
            self.tiers.events.coming(key, self._events)

    def stores_at_the_end(self) -> PageStores:
        """Returns the pages whose blocks should outlast the devices; none where nothing below them
        does. No more batch may come."""
        return self._stores.all() if self.tiers is not None and self.tiers.outlasts else NO_STORES

    # --- events

    def present(self) -> Iterator[StoredBlocks]:
        """Returns the blocks that lower tiers hold, as far as listeners know."""
        return iter(()) if self.tiers is None else self.tiers.events.present()

    def tell(self) -> None:
        """Sends listeners what has changed in lower tiers. To be called now and then."""
        if self.tiers is not None:
            self.tiers.events.tell(self._events)

    def recheck(self) -> None:
        """Compares, with the next `tell`, what listeners know with what lower tiers hold: blocks
        that were to leave the devices may not have been kept."""
        if self.tiers is not None:
            self.tiers.events.recheck()
