"""State that a sender keeps of each receiver: the slices that wait, the connections that carry
them, and the receiver's addresses, which they share out among them.

The caller holds the sender's lock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from jaxserve.transfer.failures import RecentFailures
from jaxserve.transfer.link import SendingLink
from jaxserve.transfer.protocol import addresses_of
from jaxserve.transfer.writes import Slice

BURST_BYTES = 1 << 20  # that a connection sends before it waits for answers
BURST_SLICES = 64


class Peer:
    """One receiver, by its addresses: its queue and its connections."""

    def __init__(self, address: str, lock: threading.Lock):
        self.address = address
        self.addresses = addresses_of(address)
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

    def next_address(self, failed: RecentFailures[str]) -> str:
        """Returns the address for one more connection: of those that have not failed lately, if
        there are any, the one with the fewest connections."""
        used = [link.address for link in self.links]
        return min(self.addresses, key=lambda one: (one in failed, used.count(one)))

    def has_others(self, address: str, failed: RecentFailures[str]) -> bool:
        """Returns whether the peer has an address beside this one that has not failed lately."""
        return any(one != address and one not in failed for one in self.addresses)

    def bursts(self) -> int:
        """Number of connections that the queue deserves."""
        return -(-self._size // BURST_BYTES)

    def wanted(self, paths: int) -> int:
        """Number of connections to be added."""
        waiting = sum(link.idle or link.fresh for link in self.links)
        paths = max(paths, len(self.addresses))
        return min(self.bursts() - waiting, paths - len(self.links))


class PeerLink:
    """A connection's thread, as the others see it. address: of the peer's, that it goes to."""

    def __init__(self, peer: Peer, address: str, link: SendingLink):
        self.peer = peer
        self.address = address
        self.link = link
        self.fresh = True  # it has not looked for work yet
        self.idle = False
        self.evicted = False
