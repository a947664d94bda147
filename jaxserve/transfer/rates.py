"""Rates at which bytes came from others, learnt from what they took."""

from __future__ import annotations

import math
import threading

# newer bytes by which older ones come to count less, by a factor e: a few small groups, of which
# most is latency, change little of what large ones taught
REMEMBERED_BYTES = 64 << 20
MAX_KEYS = 4096  # pairs of a source and a plane; of further ones nothing is learnt


class Rates:
    """Bytes per second by source and plane: bytes over seconds, older ones counting less. Any
    thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, str], tuple[float, float]] = {}  # bytes and seconds

    def learn(self, source: str, plane: str, size: int, seconds: float) -> None:
        """Takes in `size` bytes that came in `seconds`."""
        key = (source, plane)
        kept = math.exp(-size / REMEMBERED_BYTES)
        with self._lock:
            if key not in self._seen and len(self._seen) >= MAX_KEYS:
                return
            known_bytes, known_seconds = self._seen.get(key, (0.0, 0.0))
            self._seen[key] = (kept * known_bytes + size, kept * known_seconds + max(seconds, 1e-9))

    def of(self, source: str, plane: str) -> float:
        """Returns bytes per second; 0 where nothing was learnt."""
        with self._lock:
            size, seconds = self._seen.get((source, plane), (0.0, 0.0))
        return size / seconds if seconds else 0.0
