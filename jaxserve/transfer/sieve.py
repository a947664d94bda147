"""SIEVE eviction (Zhang et al., NSDI 2024), as Mooncake 3.2.3 uses it for pooled connections."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Sieve(Generic[Key]):
    """Chooses which of its keys to evict: those that were not used since the hand passed them last.

    Keys stay in the order in which they were added; the hand goes from the oldest to the newest
    and stays where it was between evictions.
    """

    def __init__(self) -> None:
        self._used: dict[Key, bool] = {}  # oldest first
        self._passed: dict[Key, None] = {}  # that the hand has behind it

    def __len__(self) -> int:
        return len(self._used)

    def keys(self) -> list[Key]:
        return list(self._used)

    def add(self, key: Key) -> None:
        self._used[key] = False

    def use(self, key: Key) -> None:
        """Spares a key once, when the hand comes to it."""
        self._used[key] = True

    def remove(self, key: Key) -> None:
        self._used.pop(key, None)
        self._passed.pop(key, None)

    def evict(self, may: Callable[[Key], bool]) -> Key | None:
        """Removes and returns a key for which `may` is true; None if no key is."""
        if not any(may(key) for key in self._used):
            return None
        while True:
            for key in [key for key in self._used if key not in self._passed]:
                if may(key) and not self._used[key]:
                    self.remove(key)
                    if len(self._passed) == len(self._used):  # it was the newest
                        self._passed.clear()
                    return key
                if may(key):
                    self._used[key] = False
                self._passed[key] = None
            self._passed.clear()
