"""Index of the blocks that the processes of one replica keep in parts.

Each process keeps its part of every block in tiers of its own, and reports what it has. A block is
there where all of them have their part: one that a process has lost, or could not keep, is lost.
The process that decides has this index and no bytes.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxserve.cache.block_events import Medium
from jaxserve.cache.tier_events import TierEvents
from jaxserve.cache.tiers import Fetched, Lookup, LowerTiers, TierCounts
from jaxserve.store.block_part import PartBytes
from jaxserve.store.host_index import LOCKED_SHARE

ASSUMED_BANDWIDTHS = (2e9, 3e8)  # bytes per second of host memory and disk, until one reports


class Part:
    """State of one process's part of the blocks, as it reported it. keys: by tier. expected: blocks
    that it was asked to store and has not settled, and how often."""

    def __init__(self) -> None:
        self.keys: dict[Medium, set[bytes]] = {Medium.HOST: set(), Medium.DISK: set()}
        self.expected: Counter[bytes] = Counter()
        self.counts = TierCounts()
        self.fetched: list[Fetched] = []
        self.block_bytes = 0
        self.bandwidths = ASSUMED_BANDWIDTHS

    def has(self, key: bytes) -> bool:
        return any(key in keys for keys in self.keys.values())

    def holds(self, key: bytes) -> bool:
        return self.has(key) or key in self.expected

    def settle(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.expected[key] -= 1
            if self.expected[key] <= 0:
                del self.expected[key]


class PartIndex(LowerTiers):
    """`LowerTiers` of a replica with `parts` processes. layout: of a block, all its parts. slots:
    in the host memory of each process, at least. outlasts: whether there are disks. ask: has all
    processes do what is named, with blocks of these keys. All methods may be called from any
    thread."""

    shared = False
    prefetch_room = 0

    def __init__(
        self,
        parts: int,
        layout: PartBytes,
        slots: int,
        outlasts: bool,
        ask: Callable[[str, Sequence[bytes], int], None],
    ):
        self.layout = layout
        self.block_bytes = layout.bytes
        self.most_locked = slots // LOCKED_SHARE
        self.events = TierEvents(self._keys)
        self._outlasts = outlasts
        self._ask = ask
        self._lock = threading.Condition()
        self._parts = [Part() for _ in range(parts)]
        self._held: set[bytes] = set()  # of which every process has its part, or will have
        self._medium: dict[bytes, Medium] = {}  # the slowest of a block's parts, if all are there

    # --- what the processes say

    def expect(self, keys: Sequence[bytes]) -> None:
        """Counts blocks that all processes are asked to store as held, until each has settled."""
        with self._lock:
            for part in self._parts:
                part.expected.update(keys)
            self._look(keys)

    def report(self, number: int, report: Mapping[str, Any]) -> None:
        """Takes in a report of a process, see `TierReports`. Errors: KeyError, TypeError,
        ValueError for one that is not understood."""
        part = self._parts[number]
        settled = list(map(bytes.fromhex, report["settled"]))
        with self._lock:
            changed = [*settled]
            for name, came, keys in report["changes"]:
                named = list(map(bytes.fromhex, keys))
                tier = part.keys[Medium(name)]
                (tier.update if came else tier.difference_update)(named)
                changed += named
            part.settle(settled)
            part.counts = TierCounts(**report["counts"])
            part.fetched = [Fetched(**each) for each in report["fetched"]]
            part.block_bytes = report["block_bytes"]
            part.bandwidths = tuple(report["bandwidths"])
            self._look(changed)
            for key in settled:  # listeners expect it in host memory
                self.events.changed(Medium.HOST, key, self._medium.get(key) is Medium.HOST)
            self._lock.notify_all()

    def reset(self) -> None:
        """Forgets all blocks: other processes will report what they have."""
        with self._lock:
            self._parts = [Part() for _ in self._parts]
            self._held.clear()
            self._medium.clear()
            self.events.recheck()

    def _look(self, keys: Iterable[bytes]) -> None:
        """Updates where blocks are. The lock is held."""
        for key in keys:
            if all(part.holds(key) for part in self._parts):
                self._held.add(key)
            else:
                self._held.discard(key)
            before = self._medium.pop(key, None)
            now = self._slowest(key)
            if now is not None:
                self._medium[key] = now
            if now is not before:
                for medium in filter(None, (before, now)):
                    self.events.changed(medium, key, medium is now)

    def _slowest(self, key: bytes) -> Medium | None:
        if not all(part.has(key) for part in self._parts):
            return None
        in_host = all(key in part.keys[Medium.HOST] for part in self._parts)
        return Medium.HOST if in_host else Medium.DISK

    def _keys(self, tier: Medium) -> list[bytes]:
        with self._lock:
            return [key for key, medium in self._medium.items() if medium is tier]

    # --- what there is

    @property
    def settled(self) -> bool:
        """Returns whether all processes have stored what they were asked to."""
        with self._lock:
            return not any(part.expected for part in self._parts)

    @property
    def outlasts(self) -> bool:
        return self._outlasts

    def holds(self, key: bytes) -> bool:
        return key in self._held

    def seconds(self, keys: Sequence[bytes]) -> float:
        far = sum(self._medium.get(key) is Medium.DISK for key in keys)
        near = len(keys) - far
        return max(
            part.block_bytes * (near / part.bandwidths[0] + far / part.bandwidths[1])
            for part in self._parts
        )

    def counts(self) -> TierCounts:
        """Counts of the process that has most, of each."""
        every = [part.counts for part in self._parts]
        names = TierCounts.__slots__
        return TierCounts(**{name: max(getattr(one, name) for one in every) for name in names})

    def fetched(self) -> list[Fetched]:
        """Blocks by source and plane of which all parts came; seconds of the process that waited
        longest; bytes per second of all processes together, if each were as slow as the slowest."""
        merged: dict[tuple[str, str], Fetched] = {}
        for part in self._parts:
            for each in part.fetched:
                known = merged.pop((each.source, each.plane), each)
                merged[each.source, each.plane] = Fetched(
                    each.source,
                    each.plane,
                    min(known.blocks, each.blocks),
                    max(known.missed, each.missed),
                    max(known.seconds, each.seconds),
                    min(known.bytes_per_s, each.bytes_per_s),
                )
        for each in merged.values():
            each.bytes_per_s *= len(self._parts)
        return list(merged.values())

    # --- what is asked of them

    def keep(self, keys: Sequence[bytes], retention: int) -> None:
        if retention > 0:
            self._ask("keep", keys, retention)

    def lock(self, key: bytes) -> None:
        self._ask("lock", [key], 0)

    def unlock(self, key: bytes) -> None:
        self._ask("unlock", [key], 0)

    def prefetch(self, keys: Sequence[bytes]) -> Lookup:
        self._ask("prefetch", [key for key in keys if self._medium.get(key) is Medium.DISK], 0)
        return Lookup(answered=True)

    def wait(self, key: bytes, seconds: float) -> bool:
        with self._lock:
            return self._lock.wait_for(lambda: key in self._medium, seconds)

    def read(self, key: bytes, into: np.ndarray, use: bool = True) -> bool:
        return False
