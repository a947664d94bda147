"""Counts and bandwidths of the tiers below the devices, learnt while they are used."""

from __future__ import annotations

import dataclasses
import threading

from jaxserve.cache.hashes import is_block
from jaxserve.cache.tiers import Fetched, TierCounts
from jaxserve.store.peers import Route

FORGETTING = 0.2  # weight of the newest measurement
MAX_SOURCES = 2048  # by plane; of further ones nothing is counted


class Bandwidth:
    """Bytes per second of a tier. assumed: until something was read."""

    def __init__(self, assumed: float):
        self.value = assumed

    def seen(self, size: int, seconds: float) -> None:
        """Takes in a read of `size` bytes."""
        self.value += FORGETTING * (size / max(seconds, 1e-9) - self.value)


class Tally:
    """Counts blocks by the names of `TierCounts`, for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(TierCounts.__slots__, 0)

    def add(self, name: str) -> None:
        """Counts one block."""
        with self._lock:
            self._counts[name] += 1

    def add_read(self, name: str, key: bytes) -> None:
        """Counts a block that was read; under another name a page of a further page group, which is
        no block of its own."""
        self.add(name if is_block(key) else "further_reads")

    def counts(self, **others: int) -> TierCounts:
        """Returns all counts; `others` are known elsewhere."""
        with self._lock:
            return TierCounts(**{**self._counts, **others})


class PeerFetches:
    """Blocks that came from other replicas, by the address of their source and by plane. All
    methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str], Fetched] = {}  # that which was asked last at the end

    def add(self, source: str, route: Route, came: bool, seconds: float) -> None:
        """Counts a block that was asked for, and waited for that long."""
        key = (source, route.plane)
        with self._lock:
            fetched = self._known.pop(key, None)
            if fetched is None:
                if len(self._known) >= MAX_SOURCES:
                    return
                fetched = Fetched(source, route.plane)
            self._known[key] = fetched
            fetched.blocks += came
            fetched.missed += not came
            fetched.seconds += seconds
            fetched.bytes_per_s = route.bytes_per_s

    def all(self) -> list[Fetched]:
        """A copy, what was asked last at the end."""
        with self._lock:
            return [dataclasses.replace(fetched) for fetched in self._known.values()]
