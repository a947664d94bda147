"""Tiers below the devices of a virtual replica: which blocks are in host memory and on disk, and
when they come back. Blocks have no bytes here; copies take as long as the links need, one after
another.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import numpy as np

from jaxserve.api.batch import PageStores
from jaxserve.cache.block_events import Medium
from jaxserve.cache.hashes import is_block
from jaxserve.cache.tier_events import TierEvents
from jaxserve.cache.tiers import Fetch, Fetched, Lookup, LowerTiers, TierCounts
from jaxserve.clock import VirtualClock
from jaxserve.store.host_index import (
    LOCKED_SHARE,
    NORMAL,
    PASSING,
    PREFETCHED_SHARE,
    HostIndex,
    kept_until,
)


@dataclasses.dataclass(eq=False)
class Link:
    """A link that copies one block after another. bytes_per_s: its rate. free: clock second from
    which on it has nothing to do."""

    bytes_per_s: float
    free: float = 0.0

    def copy(self, size: float, now: float) -> float:
        """Queues a copy of `size` bytes that can begin at clock second `now`; returns when it
        ends."""
        self.free = max(self.free, now) + size / self.bytes_per_s
        return self.free


@dataclasses.dataclass(frozen=True)
class TierSizes:
    """Sizes of the tiers of a replica. block_bytes: of a block, over all its devices. host, disk:
    blocks that each holds. host_bytes_per_s: between host memory and the devices, each way;
    disk_bytes_per_s: of the disk."""

    block_bytes: int
    host: int
    disk: int
    host_bytes_per_s: float
    disk_bytes_per_s: float


class VirtualTiers(LowerTiers):
    """Tiers of a virtual replica, under its clock. A block that leaves the devices goes to host
    memory, and from there to disk, as `store.tiered.TieredBlocks` has it."""

    def __init__(self, sizes: TierSizes, clock: VirtualClock):
        self.block_bytes = sizes.block_bytes
        self.most_locked = sizes.host // LOCKED_SHARE
        self.events = TierEvents(self._keys)
        self.clock = clock
        self._host = HostIndex(sizes.host)
        self._disk = HostIndex(sizes.disk)
        self._has_disk = sizes.disk > 0
        self._prefetched_at_once = max(sizes.host // PREFETCHED_SHARE, 1)
        self._up = Link(sizes.host_bytes_per_s)
        self._down = Link(sizes.host_bytes_per_s)
        self._reads = Link(sizes.disk_bytes_per_s)
        self._here: dict[bytes, float] = {}  # clock second at which a block of host memory is whole
        self._counts = Counter[str]()

    # --- what there is

    def holds(self, key: bytes) -> bool:
        return key in self._host or key in self._disk

    def _keys(self, tier: Medium) -> list[bytes]:
        index = {Medium.HOST: self._host, Medium.DISK: self._disk}[tier]
        return [key for key, _ in index.whole()]

    def seconds(self, keys: Sequence[bytes]) -> float:
        far = sum(key not in self._host for key in keys)
        up = len(keys) / self._up.bytes_per_s
        return self.block_bytes * (up + far / self._reads.bytes_per_s)

    @property
    def outlasts(self) -> bool:
        return self._has_disk

    @property
    def shared(self) -> bool:
        return False

    @property
    def prefetch_room(self) -> int:
        return self._prefetched_at_once

    def counts(self) -> TierCounts:
        blocks = {"host_blocks": len(self._host), "disk_blocks": len(self._disk)}
        return TierCounts(**self._counts, **blocks)

    def fetched(self) -> list[Fetched]:
        return []

    # --- what comes and stays

    def store(self, stores: PageStores) -> None:
        """Takes blocks that leave the devices now."""
        now = self.clock.now()
        for key, retention in zip(stores.keys, stores.retention.tolist()):
            if key not in self._host:
                self._counts["stored"] += 1
                until = kept_until(retention, now)
                self._place(key, until, self._down.copy(self.block_bytes, now))

    def _place(self, key: bytes, until: float, whole: float) -> None:
        """Gives a block a slot of host memory, in which it is whole at a clock second."""
        placed = self._host.reserve(key, self.clock.now(), until)
        if placed is None:
            return
        self._host.commit(key)
        self._here[key] = whole
        self.events.changed(Medium.HOST, key, True)
        if placed.leaves is not None:
            self._let_go(*placed.leaves)

    def _let_go(self, key: bytes, until: float) -> None:
        """Moves a block that leaves host memory to disk, if the replica has one."""
        del self._here[key]
        if until != PASSING and key not in self._disk:
            placed = self._disk.reserve(key, self.clock.now(), until)
            if placed is not None:
                self._disk.commit(key)
                self._counts["to_disk"] += 1
                self.events.changed(Medium.DISK, key, True)
                if placed.leaves is not None:
                    self.events.changed(Medium.DISK, placed.leaves[0], False)
        self.events.changed(Medium.HOST, key, False)

    def keep(self, keys: Sequence[bytes], retention: int) -> None:
        until = kept_until(retention, self.clock.now())
        for key in keys:
            for index in (self._host, self._disk):
                if key in index:
                    index.keep(key, until)

    def lock(self, key: bytes) -> None:
        for index in (self._host, self._disk):
            index.lock(key)

    def unlock(self, key: bytes) -> None:
        for index in (self._host, self._disk):
            index.unlock(key)

    # --- what goes

    def prefetch(self, keys: Sequence[bytes]) -> Lookup:
        now = self.clock.now()
        far = [key for key in keys if key not in self._host and key in self._disk]
        for key in far[: self._prefetched_at_once]:
            self._counts["prefetched"] += 1
            self._read_disk(key, now)
        return Lookup(answered=True)

    def _read_disk(self, key: bytes, now: float) -> float:
        """Brings a block from disk to host memory; returns when it is whole there."""
        self._disk.touch(key)
        whole = self._reads.copy(self.block_bytes, now)
        self._place(key, NORMAL, whole)
        return whole

    def fetch(self, fetch: Fetch) -> tuple[int, float]:
        """Brings blocks to the devices: how many of the first ones are there, and the clock second
        at which they all are on their pages."""
        now = self.clock.now()
        blocks, end = 0, now
        for key in fetch.keys:
            if key in self._host:
                self._host.touch(key)
                self._counts["host_reads" if is_block(key) else "further_reads"] += 1
                whole = self._here[key]
            elif key in self._disk:
                self._counts["disk_reads" if is_block(key) else "further_reads"] += 1
                whole = self._read_disk(key, now)
            else:
                self._counts["missed"] += 1
                break
            end = self._up.copy(self.block_bytes, max(now, whole))
            blocks += 1
        return blocks, end

    def wait(self, key: bytes, seconds: float) -> bool:
        return self.holds(key)

    def read(self, key: bytes, into: np.ndarray, use: bool = True) -> bool:
        """Returns False: blocks of a simulation have no bytes."""
        return False
