"""Tiers behind host memory: a disk, and a store that replicas share."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import numpy as np

from jaxserve.cache.block_events import Medium
from jaxserve.cache.tier_events import TierEvents
from jaxserve.clock import Clock
from jaxserve.store.disk import DiskBlocks
from jaxserve.store.host_index import NORMAL, PASSING
from jaxserve.store.shared import SharedTier
from jaxserve.store.tally import Bandwidth, Tally

DISK_BANDWIDTH = 3e8  # bytes per second that are assumed until something was read
CLOCK_SECONDS = 1.0  # by which a block on disk may be kept for less than asked


class BackingTiers:
    """Takes the blocks that leave host memory; gives back those on disk. Times are seconds of
    `clock`, as in `HostIndex`. All methods may be called from any thread."""

    def __init__(
        self,
        clock: Clock,
        tally: Tally,
        events: TierEvents,
        disk: DiskBlocks | None = None,
        shared: SharedTier | None = None,
    ):
        self.disk = disk
        self.shared = shared
        self.bandwidth = Bandwidth(DISK_BANDWIDTH)
        self._clock = clock
        self._tally = tally
        if disk is not None:
            disk.listen(functools.partial(events.changed, Medium.DISK))

    def __contains__(self, key: bytes) -> bool:
        """Returns whether the block is on disk; the shared store is asked by `SharedTier.look`
        only."""
        return self.disk is not None and key in self.disk

    def keys(self) -> list[bytes]:
        """Keys of the blocks on disk."""
        return [] if self.disk is None else self.disk.keys()

    def takes(self, until: float) -> bool:
        """Returns whether a block that was to stay in host memory until then goes to disk."""
        return self.disk is not None and until != PASSING

    def keep(
        self, key: bytes, block: Callable[[], np.ndarray | None], until: float, patience: float = 0
    ) -> None:
        """Keeps a block until a clock second on disk and in the shared store. block: returns its
        bytes, None where they are wrong. patience: seconds to wait for the shared store."""
        if until == PASSING:
            return
        seconds = until - self._clock.now()
        expires = time.time() + seconds if seconds > 0 else 0.0
        disk = None if self._is_on_disk(key, expires) else self.disk
        if disk is None and self.shared is None:
            return
        data = block()
        if data is None:
            return
        if disk is not None and disk.put(key, data, expires, keep=bool(expires)):
            self._tally.add("to_disk")
        if self.shared is not None:
            self.shared.offer(key, data, expires, patience)

    def _is_on_disk(self, key: bytes, expires: float) -> bool:
        """Returns whether a block is on disk, and for as long already."""
        kept_until = None if self.disk is None else self.disk.expires(key)
        return kept_until is not None and kept_until >= expires - CLOCK_SECONDS

    def until(self, key: bytes) -> float:
        """The clock second until which a block that comes back from disk stays."""
        expires = None if self.disk is None else self.disk.expires(key)
        return self._clock.now() + expires - time.time() if expires else NORMAL

    def read(self, key: bytes, into: np.ndarray) -> bool:
        """Copies a block from disk; False where it is not on disk."""
        began = self._clock.now()
        if self.disk is None or not self.disk.get(key, into):
            return False
        self.bandwidth.seen(into.nbytes, self._clock.now() - began)
        return True

    def close(self) -> None:
        if self.disk is not None:
            self.disk.close()
        if self.shared is not None:
            self.shared.close()
