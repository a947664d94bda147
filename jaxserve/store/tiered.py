"""Blocks of KV below the devices: in host memory, on disk behind it where a folder is given, and in
a store that replicas share if one is given.

A block that comes from a device is put into host memory; the one that makes room for it goes to
disk and to the shared store. Blocks of that store come back by `prefetch` only. A block is read
from wherever it is, and one that is wrong or gone is a miss, never wrong bytes. All methods may be
called from any thread; none keeps a lock while bytes are copied, checked or written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from jaxserve.api.request import NORMAL_RETENTION
from jaxserve.cache.block_events import Medium
from jaxserve.cache.tier_events import TierEvents
from jaxserve.cache.tiers import Fetched, Lookup, LowerTiers, TierCounts
from jaxserve.clock import Clock
from jaxserve.store.backing import BackingTiers
from jaxserve.store.disk import DiskBlocks
from jaxserve.store.filling import Filling
from jaxserve.store.host_index import LOCKED_SHARE, kept_until
from jaxserve.store.host_memory import HostBlocks
from jaxserve.store.host_tier import HostTier
from jaxserve.store.peers import Route
from jaxserve.store.prefetch import Prefetcher
from jaxserve.store.shared import SharedTier
from jaxserve.store.tally import PeerFetches, Tally

FILL_SECONDS = 5.0  # to wait for a block that is on its way or being put
FLUSH_SECONDS = 10.0  # at the end, for the shared store to take blocks


class TieredBlocks(LowerTiers):
    """Blocks of `block_bytes` bytes each by their keys: `slots` of them in host memory, others on
    `disk` and in `shared`. clock: of retentions."""

    def __init__(
        self,
        slots: int,
        block_bytes: int,
        clock: Clock,
        disk: DiskBlocks | None = None,
        shared: SharedTier | None = None,
    ):
        self.block_bytes = block_bytes
        self.most_locked = slots // LOCKED_SHARE
        self.events = TierEvents(self._keys)
        self._clock = clock
        self._tally = Tally()
        self.behind = BackingTiers(clock, self._tally, self.events, disk, shared)
        blocks = HostBlocks(slots, block_bytes)
        self.host = HostTier(blocks, clock, self._tally, self.events, self.behind)
        self.prefetcher = Prefetcher(self.host, self.behind, self._tally)
        self._fetches = PeerFetches()

    # --- what there is

    def holds(self, key: bytes) -> bool:
        return self.host.holds(key) or key in self.behind

    def _arrived(self, key: bytes) -> bool:
        """Returns whether the block can be read without waiting for what puts it."""
        return key in self.host or key in self.behind

    def _keys(self, tier: Medium) -> list[bytes]:
        return self.host.keys() if tier is Medium.HOST else self.behind.keys()

    @property
    def outlasts(self) -> bool:
        return self.behind.disk is not None or self.shared

    @property
    def shared(self) -> bool:
        return self.behind.shared is not None

    @property
    def prefetch_room(self) -> int:
        return self.prefetcher.most

    def seconds(self, keys: Sequence[bytes]) -> float:
        near_blocks = sum(self.host.holds(key) for key in keys)
        far_blocks = len(keys) - near_blocks
        host, disk = self.bandwidths()
        return self.block_bytes * (near_blocks / host + far_blocks / disk)

    def bandwidths(self) -> tuple[float, float]:
        """Bytes per second of host memory and of disk, as learnt so far."""
        return self.host.bandwidth.value, self.behind.bandwidth.value

    def counts(self) -> TierCounts:
        others = {"host_blocks": len(self.host)}
        if self.behind.disk is not None:
            others["disk_blocks"] = self.behind.disk.counts().blocks
        if self.behind.shared is not None:
            others["to_shared"] = self.behind.shared.stored
            others["shared_dropped"] = self.behind.shared.dropped
        return self._tally.counts(**others)

    # --- what comes

    def expect(self, keys: Iterable[bytes]) -> None:
        """Counts blocks that are on their way as held, until `settle` is called with them."""
        self.host.expect(keys)

    def settle(self, keys: Sequence[bytes]) -> None:
        """Ends the expectation of blocks: each was put, or never will be."""
        self.host.settle(keys)

    def put(
        self,
        key: bytes,
        fill: Callable[[np.ndarray], None],
        retention: int = NORMAL_RETENTION,
    ) -> bool:
        """Stores a block that `fill` writes to the array [block_bytes] uint8 that it is given.
        retention: see `Request`; an ephemeral block passes through host memory and gets no further.
        False where it is in host memory already or there is no room. Errors: those of `fill`; then
        it is not stored."""
        return self.host.put(key, fill, self._until(retention))

    def begin(self, key: bytes, retention: int = NORMAL_RETENTION) -> Filling | None:
        """Gives a block a slot of host memory, see `HostTier.begin`."""
        return self.host.begin(key, self._until(retention))

    def _until(self, retention: int) -> float:
        return kept_until(retention, self._clock.now())

    def keep(self, keys: Sequence[bytes], retention: int) -> None:
        self.host.keep(keys, self._until(retention))

    def lock(self, key: bytes) -> None:
        self.host.lock(key)
        if self.behind.disk is not None:
            self.behind.disk.lock(key)

    def unlock(self, key: bytes) -> None:
        self.host.unlock(key)
        if self.behind.disk is not None:
            self.behind.disk.unlock(key)

    def prefetch(self, keys: Sequence[bytes]) -> Lookup:
        return self.prefetcher.prefetch(keys)

    # --- what goes

    def read(self, key: bytes, into: np.ndarray, use: bool = True) -> bool:
        """Copies a block to `into` [block_bytes] uint8; False where it is not here, or was not what
        was put: then it is forgotten. Waits, at most FILL_SECONDS, for one that comes. use: it
        counts as used."""
        self.host.wait(lambda: self._arrived(key) or not self.host.holds(key), FILL_SECONDS)
        if self.host.read(key, into, use):
            self._tally.add_read("host_reads", key)
            return True
        if self.behind.read(key, into):
            self._tally.add_read("disk_reads", key)
            self.host.put(key, lambda view: np.copyto(view, into), self.behind.until(key))
            return True
        self._tally.add("missed")
        return False

    def read_part(
        self, key: bytes, number: int, part: Sequence[slice], into: np.ndarray, seconds: float
    ) -> bool:
        """Copies a part of a block that is on its way, see `HostTier.read_part`; waits for it at
        most so long, for another than the first only while the block is on its way."""

        def over() -> bool:
            lost = number and not self.host.holds(key)
            return lost or self.host.parts(key) > number or self._arrived(key)

        self.host.wait(over, seconds)
        return self.host.read_part(key, number, part, into)

    def wait(self, key: bytes, seconds: float) -> bool:
        return self.host.wait(lambda: self._arrived(key), seconds)

    def count_from_peer(
        self, key: bytes, source: str, route: Route, came: bool, seconds: float
    ) -> None:
        """Counts a block that was asked of another replica, and waited for that long. source: its
        first address."""
        self._fetches.add(source, route, came, seconds)
        if came:
            self._tally.add_read("peer_reads", key)
        else:
            self._tally.add("missed")

    def fetched(self) -> list[Fetched]:
        return self._fetches.all()

    def keep_all(self) -> None:
        """Keeps what is in host memory on disk, and in the shared store as far as FLUSH_SECONDS go,
        for the next start."""
        deadline = time.monotonic() + FLUSH_SECONDS
        self.host.keep_all_behind(lambda: max(deadline - time.monotonic(), 0.0))

    def close(self) -> None:
        """Writes what should outlast this process to disk, and closes it."""
        self.prefetcher.close()
        if self.outlasts:
            self.keep_all()
        self.behind.close()
