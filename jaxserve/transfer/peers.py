"""State that a sender keeps of each receiver: the slices that wait, and the connections that carry
them.

The caller holds the sender's lock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from jaxserve.transfer.link import SendingLink
from jaxserve.transfer.writes import Slice

BURST_BYTES = 1 << 20  # that a connection sends before it waits for answers
BURST_SLICES = 64


class Peer:
    """One receiver, as host:port: its queue and its connections."""

    def __init__(self, address: str, lock: threading.Lock):
        self.address = address
        self.links: set[PeerLink] = set()
        self.wake = threading.Condition(lock)
        self._queue: deque[Slice] = deque()
        self._size = 0  # bytes in the queue

    @property
    def busy(self) -> bool:
        """Returns whether there is something to send."""
        return bool(self._queue)

    def put(self, parts: Sequence[Slice]) -> None:
        self._queue.extend(parts)
        self._size += sum(len(part.data) for part in parts)

    def put_back(self, parts: Sequence[Slice]) -> None:
        """Puts slices before all others."""
        self._queue.extendleft(reversed(parts))
        self._size += sum(len(part.data) for part in parts)

    def burst(self, now: float) -> list[Slice]:
        """Takes slices for one connection; those whose write has failed are dropped."""
        taken: list[Slice] = []
        size = 0
        while self._queue and len(taken) < BURST_SLICES and size < BURST_BYTES:
            part = self._queue.popleft()
            self._size -= len(part.data)
            if part.write.take(now):
                taken.append(part)
                size += len(part.data)
        return taken

    def bursts(self) -> int:
        """Number of connections that the queue deserves."""
        return -(-self._size // BURST_BYTES)

    def wanted(self, paths: int) -> int:
        """Number of connections to be added."""
        waiting = sum(link.idle or link.fresh for link in self.links)
        return min(self.bursts() - waiting, paths - len(self.links))


class PeerLink:
    """A connection's thread, as the others see it."""

    def __init__(self, peer: Peer, link: SendingLink):
        self.peer = peer
        self.link = link
        self.fresh = True  # it has not looked for work yet
        self.idle = False
        self.evicted = False
