"""Counts and bandwidths of the tiers below the devices, learnt while they are used."""

from __future__ import annotations

import threading

from jaxserve.cache.tiers import TierCounts

FORGETTING = 0.2  # weight of the newest measurement


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

    def counts(self, **others: int) -> TierCounts:
        """Returns all counts; `others` are known elsewhere."""
        with self._lock:
            return TierCounts(**{**self._counts, **others})
