"""Memory of failures: keys that failed lately are tried after others."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
MAX_KEYS = 4096  # beyond these the oldest are forgotten


class RecentFailures(Generic[Key]):
    """Keys that failed within the last `seconds`. Any thread may call."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._lock = threading.Lock()
        self._until: dict[Key, float] = {}  # monotonic seconds, oldest first

    def note(self, key: Key) -> None:
        with self._lock:
            self._until.pop(key, None)
            self._until[key] = time.monotonic() + self._seconds
            if len(self._until) > MAX_KEYS:
                self._until.pop(next(iter(self._until)))

    def __contains__(self, key: Key) -> bool:
        with self._lock:
            return time.monotonic() < self._until.get(key, 0.0)
