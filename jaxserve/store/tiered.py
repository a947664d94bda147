"""Blocks of KV below the devices: in host memory, on disk behind it where a folder is given, and in
a store that replicas share where there is one.

A block that comes from a device is put into host memory; the one that makes room for it goes to
disk and to the shared store. What is in that store comes back by `prefetch` only. A block that has
left a device and is not put yet is expected: it counts as there, and who reads it waits for it. A
block is read from wherever it lies, and one that is wrong or gone is a miss, never wrong bytes. All
methods may be called from any thread; none holds a lock while bytes are copied, checked or written.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from jaxserve.api.request import EPHEMERAL, NORMAL_RETENTION
from jaxserve.cache.block_events import Medium
from jaxserve.cache.tier_events import TierEvents
from jaxserve.cache.tiers import Fetched, Lookup, TierCounts
from jaxserve.clock import Clock
from jaxserve.store.fetches import PeerFetches
from jaxserve.store.host_index import NORMAL, PASSING, HostIndex, Placed
from jaxserve.store.host_memory import HostBlocks
from jaxserve.store.shared import SharedTier

# bytes per second that are believed until something was read
HOST_BANDWIDTH = 2e9
DISK_BANDWIDTH = 3e8
FILL_SECONDS = 5.0  # to wait for a block that is on its way or being put
CLOCK_SECONDS = 1.0  # by which a block on disk may be kept for less than asked
FLUSH_SECONDS = 10.0  # at the end, for the shared store to take blocks
FORGETTING = 0.2  # weight of the newest measurement
PREFETCHED_SHARE = 4  # one in so many slots of host memory may be taken by prefetches under way
log = logging.getLogger(__name__)


class _Missing(Exception):
    """A block is not on disk after all."""


class SlowTier(Protocol):
    """A tier behind host memory, as a disk. Errors of what it lies on are misses."""

    def __contains__(self, key: bytes) -> bool: ...

    def counts(self) -> Any:
        """`blocks`: how many are there."""

    def put(
        self, key: bytes, data: np.ndarray, expires: float = 0.0, keep: bool = False
    ) -> bool: ...

    def get(self, key: bytes, into: np.ndarray) -> bool: ...

    def expires(self, key: bytes) -> float | None:
        """Unix seconds until which a block is kept, 0 for one that nobody asked to keep; None where
        it is not there."""

    def keys(self) -> list[bytes]:
        """Keys of all blocks there."""

    def listen(self, changed: Callable[[bytes, bool], None]) -> None:
        """Tells `changed` from now on of each block that came (True) or went."""

    def close(self) -> None: ...


class Bandwidth:
    """Bytes per second of a tier, learnt from what was read."""

    def __init__(self, believed: float):
        self.value = believed

    def seen(self, size: int, seconds: float) -> None:
        self.value += FORGETTING * (size / max(seconds, 1e-9) - self.value)


class TieredBlocks:
    """Blocks of `block_bytes` bytes each by their keys: `slots` of them in host memory, others on
    `disk` and in `shared`. clock: for how long blocks are kept."""

    def __init__(
        self,
        slots: int,
        block_bytes: int,
        clock: Clock,
        disk: SlowTier | None = None,
        shared: SharedTier | None = None,
    ):
        self.block_bytes = block_bytes
        self._clock = clock
        self._disk = disk
        self._shared = shared
        self._host = HostBlocks(slots, block_bytes)
        self._index = HostIndex(slots)
        self._expected: Counter[bytes] = Counter()  # how often each block is on its way
        self._lock = threading.Lock()
        self._put = threading.Condition(self._lock)  # notified when a block was put, or was not
        self._count: dict[str, int] = dict.fromkeys(TierCounts.__slots__, 0)
        self._host_bandwidth = Bandwidth(HOST_BANDWIDTH)
        self._disk_bandwidth = Bandwidth(DISK_BANDWIDTH)
        self._fetches = PeerFetches()
        self._closing = False
        self.events = TierEvents(self._keys)
        if disk is not None:
            disk.listen(functools.partial(self.events.changed, Medium.DISK))
        self._prefetching = 0  # blocks that are to be prefetched
        self._prefetcher = ThreadPoolExecutor(1, "kv-prefetch")

    # --- what there is

    def holds(self, key: bytes) -> bool:
        """Whether the block is believed to be there, or on its way."""
        return self._in_host_memory(key) or self._on_disk(key)

    def _in_host_memory(self, key: bytes) -> bool:
        """Whether the block is there, being put or on its way, there or from there to disk."""
        return key in self._index or key in self._expected

    def _on_disk(self, key: bytes) -> bool:
        return self._disk is not None and key in self._disk

    def _arrived(self, key: bytes) -> bool:
        """Whether the block can be read without waiting for whoever puts it."""
        in_host_memory = key in self._index and not self._index.filling(key)
        return in_host_memory or self._on_disk(key)

    def _keys(self, tier: Medium) -> list[bytes]:
        """Keys of the blocks that are whole in host memory, or on disk."""
        if tier is Medium.HOST:
            with self._lock:
                return [key for key, _ in self._index.whole()]
        return [] if self._disk is None else self._disk.keys()

    def _note(self, keys: Iterable[bytes]) -> None:
        """Notes for listeners whether host memory holds these blocks now. The caller holds the
        lock."""
        for key in keys:
            there = key in self._index and not self._index.filling(key)
            self.events.changed(Medium.HOST, key, there)

    @property
    def outlasts(self) -> bool:
        """Whether what is there is there after a restart."""
        return self._disk is not None or self.shared

    @property
    def shared(self) -> bool:
        """Whether there is a store with blocks of other replicas."""
        return self._shared is not None

    @property
    def prefetch_room(self) -> int:
        """Blocks that may be on their way from slower tiers at once."""
        return self._host.slots // PREFETCHED_SHARE

    def seconds(self, keys: Sequence[bytes]) -> float:
        """How long it should take to read these blocks."""
        near = sum(self._in_host_memory(key) for key in keys)
        far = len(keys) - near
        return self.block_bytes * (
            near / self._host_bandwidth.value + far / self._disk_bandwidth.value
        )

    def bandwidths(self) -> tuple[float, float]:
        """Bytes per second of host memory and of disk, as learnt so far."""
        return self._host_bandwidth.value, self._disk_bandwidth.value

    def counts(self) -> TierCounts:
        with self._lock:
            counts = dict(self._count, host_blocks=len(self._index))
        if self._disk is not None:
            counts["disk_blocks"] = self._disk.counts().blocks
        if self._shared is not None:
            counts.update(to_shared=self._shared.stored, shared_dropped=self._shared.dropped)
        return TierCounts(**counts)

    # --- what comes

    def expect(self, keys: Iterable[bytes]) -> None:
        """These blocks are on their way: they count as there until `settle` is told of them."""
        with self._lock:
            self._expected.update(keys)

    def settle(self, keys: Sequence[bytes]) -> None:
        """These blocks, expected before, are on their way no more: each was put, or never will."""
        with self._put:
            for key in keys:
                self._expected[key] -= 1
                if self._expected[key] <= 0:
                    del self._expected[key]
            self._note(keys)
            self._put.notify_all()

    def put(
        self,
        key: bytes,
        fill: Callable[[np.ndarray], None],
        retention: int = NORMAL_RETENTION,
    ) -> bool:
        """Stores a block that `fill` writes to the array [block_bytes] uint8 that it is given.
        retention: see `Request`; an ephemeral block passes through host memory and gets no further.
        False where it is there already or there is no room. Errors: those of `fill`; then it is not
        stored."""
        return self._put_until(key, fill, self._until(retention))

    def _until(self, retention: int) -> float:
        """The clock second until which a block of this retention stays, see `HostIndex`."""
        if retention == EPHEMERAL:
            return PASSING
        return self._clock.now() + retention if retention else NORMAL

    def keep(self, keys: Sequence[bytes], retention: int) -> None:
        """These blocks are asked for by a request of this retention (see `Request`): those in host
        memory are kept for as long, if not for longer."""
        until = self._until(retention)
        with self._lock:
            for key in keys:
                if key in self._index:
                    self._index.keep(key, until)

    def _put_until(self, key: bytes, fill: Callable[[np.ndarray], None], until: float) -> bool:
        now = self._clock.now()
        with self._lock:
            placed = self._index.reserve(key, now, until)
            leaving = self._leaving(placed)
            self._expected.update(leaving)
            if placed is not None and placed.leaves is not None and not leaving:
                self._note([placed.leaves[0]])
        if placed is None:
            return False
        try:
            try:
                self._make_room(placed)
            finally:
                self.settle(leaving)
            fill(self._host.view(placed.slot))
            self._host.seal(placed.slot, key)
        except BaseException:
            with self._put:
                self._index.forget(key)
                self._note([key])
                self._put.notify_all()
            raise
        with self._put:
            self._index.commit(key)
            self._note([key])
            self._count["stored"] += 1
            self._put.notify_all()
        return True

    def _leaving(self, placed: Placed | None) -> list[bytes]:
        """The block that leaves host memory for the disk, if one does: it is on its way there."""
        if self._disk is None or placed is None or placed.leaves is None:
            return []
        key, until = placed.leaves
        return [] if until == PASSING else [key]

    def _make_room(self, placed: Placed) -> None:
        """Keeps the block that leaves host memory."""
        if placed.leaves is not None:
            key, until = placed.leaves
            self._keep_behind(placed.slot, key, until)

    def _keep_behind(self, slot: int, key: bytes, until: float, patience: float = 0.0) -> None:
        """Keeps a block that stays until this clock second on disk and in the shared store, if it
        is right and may be stored. patience: seconds to wait for the latter."""
        if until == PASSING:
            return
        seconds = until - self._clock.now()
        expires = time.time() + seconds if seconds > 0 else 0.0
        disk = None if self._is_on_disk(key, expires) else self._disk
        if (disk is None and self._shared is None) or not self._host.verify(slot, key):
            return
        block = self._host.view(slot)
        if disk is not None and disk.put(key, block, expires, keep=bool(expires)):
            self._add("to_disk")
        if self._shared is not None:
            self._shared.offer(key, block, expires, patience)

    def _is_on_disk(self, key: bytes, expires: float) -> bool:
        """Whether a block is on disk, and for as long already."""
        there = None if self._disk is None else self._disk.expires(key)
        return there is not None and there >= expires - CLOCK_SECONDS

    def _until_on_disk(self, key: bytes) -> float:
        """The clock second until which a block that comes back from disk stays."""
        assert self._disk is not None
        expires = self._disk.expires(key)
        return self._clock.now() + expires - time.time() if expires else NORMAL

    # --- what goes

    def read(self, key: bytes, into: np.ndarray) -> bool:
        """Copies a block to `into` [block_bytes] uint8; False where it is not there, or was not
        what was put: then it is forgotten. Waits, at most FILL_SECONDS, for one that comes."""
        self._wait_for_put(key)
        began = self._clock.now()
        if self._read_host(key, into):
            self._host_bandwidth.seen(self.block_bytes, self._clock.now() - began)
            self._add("host_reads")
            return True
        if self._disk is not None and self._disk.get(key, into):
            self._disk_bandwidth.seen(self.block_bytes, self._clock.now() - began)
            self._add("disk_reads")
            self._put_until(key, lambda view: np.copyto(view, into), self._until_on_disk(key))
            return True
        self._add("missed")
        return False

    def wait(self, key: bytes, seconds: float) -> bool:
        """Waits until a block is there, at most so long; whether it is."""
        with self._put:
            return self._put.wait_for(lambda: self._arrived(key), seconds)

    def _wait_for_put(self, key: bytes) -> None:
        """Waits, at most FILL_SECONDS, until the block can be read or does not come."""
        with self._put:
            self._put.wait_for(
                lambda: self._arrived(key) or not self._in_host_memory(key), FILL_SECONDS
            )

    def _read_host(self, key: bytes, into: np.ndarray) -> bool:
        with self._lock:
            slot = self._index.pin(key)
        if slot is None:
            return False
        np.copyto(into, self._host.view(slot))
        right = self._host.verify(slot, key)
        with self._lock:
            self._index.unpin(key)
            if not right:
                self._count["wrong"] += 1
                self._index.forget(key)
                self._note([key])
        return right

    def prefetch(self, keys: Sequence[bytes]) -> Lookup:
        """Has blocks of a prompt that are on disk, or in the shared store behind those that are
        here, brought to host memory by threads: the first of them, as far as PREFETCHED_SHARE
        goes."""
        on_disk = self._disk is not None and [key for key in keys if self._on_disk(key)]
        if on_disk:
            self._prefetch_from_disk(on_disk)
        if self._shared is None:
            return Lookup(answered=True)
        with self._lock:
            room = max(self.prefetch_room - self._prefetching, 0)
        missing = itertools.dropwhile(self.holds, keys)
        return self._shared.look(list(itertools.islice(missing, room)), Arrivals(self))

    def _prefetch_from_disk(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            if self._closing:
                return
            room = self.prefetch_room - self._prefetching
            wanted = [key for key in keys if not self._in_host_memory(key)][: max(room, 0)]
            if wanted:
                self._prefetching += len(wanted)
                self._prefetcher.submit(self._prefetch, wanted)

    def _prefetch(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            try:
                if not self._closing and self._bring(key):
                    self._add("prefetched")
            except _Missing:
                pass
            except Exception:
                log.exception("a block was not prefetched")
            finally:
                with self._lock:
                    self._prefetching -= 1

    def _bring(self, key: bytes) -> bool:
        fill = functools.partial(self._fill, key)
        return self._put_until(key, fill, self._until_on_disk(key))

    def _fill(self, key: bytes, into: np.ndarray) -> None:
        """Reads a block from disk. Errors: _Missing."""
        assert self._disk is not None
        began = self._clock.now()
        if not self._disk.get(key, into):
            raise _Missing
        self._disk_bandwidth.seen(self.block_bytes, self._clock.now() - began)

    def count_from_peer(self, source: str, came: bool, seconds: float) -> None:
        """Counts a block that was asked of another replica, and waited for that long."""
        self._fetches.add(source, came, seconds)
        self._add("peer_reads" if came else "missed")

    def fetched(self) -> list[Fetched]:
        """What came from each of the other replicas."""
        return self._fetches.all()

    def count_prefetching(self, more: int) -> None:
        """Counts blocks on their way from slower tiers, or (less than 0) no longer."""
        with self._lock:
            self._prefetching += more

    def count_shared_read(self) -> None:
        self._add("shared_reads")

    def _add(self, name: str) -> None:
        with self._lock:
            self._count[name] += 1

    def keep_all(self) -> None:
        """Keeps what is in host memory on disk, and in the shared store as far as FLUSH_SECONDS go,
        for the next start."""
        deadline = time.monotonic() + FLUSH_SECONDS
        with self._lock:
            blocks = self._index.whole()
        for key, until in blocks:
            with self._lock:
                slot = self._index.pin(key)
            if slot is None:
                continue
            self._keep_behind(slot, key, until, max(deadline - time.monotonic(), 0.0))
            with self._lock:
                self._index.unpin(key)

    def close(self) -> None:
        """Writes what should outlast this process to disk, and closes it."""
        with self._lock:
            self._closing = True
        self._prefetcher.shutdown()
        if self.outlasts:
            self.keep_all()
        if self._disk is not None:
            self._disk.close()
        if self._shared is not None:
            self._shared.close()


class Arrivals:
    """Takes what comes from the shared store for one prompt."""

    def __init__(self, tiers: TieredBlocks):
        self._tiers = tiers

    def expect(self, keys: Sequence[bytes]) -> None:
        self._tiers.count_prefetching(len(keys))
        self._tiers.expect(keys)

    def came(self, key: bytes, block: np.ndarray) -> None:
        if self._tiers.put(key, lambda view: np.copyto(view, block)):
            self._tiers.count_shared_read()

    def settle(self, keys: Sequence[bytes]) -> None:
        self._tiers.settle(keys)
        self._tiers.count_prefetching(-len(keys))
