"""Counts what was fetched from each of the other replicas."""

from __future__ import annotations

import dataclasses
import threading

from jaxserve.cache.tiers import Fetched

MAX_SOURCES = 1024  # as many as a conductor has replicas; of further ones nothing is counted


class PeerFetches:
    """Blocks that came from other replicas, by the address of their source. All methods may be
    called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sources: dict[str, Fetched] = {}

    def add(self, source: str, came: bool, seconds: float) -> None:
        """Counts a block that was asked for, and waited for that long."""
        with self._lock:
            fetched = self._sources.get(source)
            if fetched is None:
                if len(self._sources) >= MAX_SOURCES:
                    return
                fetched = self._sources[source] = Fetched(source)
            fetched.blocks += came
            fetched.seconds += seconds

    def all(self) -> list[Fetched]:
        """A copy, in the order of first asking."""
        with self._lock:
            return [dataclasses.replace(fetched) for fetched in self._sources.values()]
