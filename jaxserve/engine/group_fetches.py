"""Fetches that the workers of a group bring in parts: what all of them have of each piece."""

from __future__ import annotations

import threading

from jaxserve.engine.fetched_pieces import Arrival


class GroupFetches:
    """Pieces of fetches, as the workers report them. All methods may be called from any thread."""

    def __init__(self, workers: int):
        self._workers = workers
        self._lock = threading.Lock()
        self._pieces: dict[int, dict[int, dict[int, Arrival]]] = {}  # by ticket, piece, worker

    def begin(self, ticket: int) -> None:
        """Notes a fetch that all workers begin."""
        with self._lock:
            self._pieces[ticket] = {}

    def end(self, ticket: int) -> None:
        """Forgets a fetch, of which nothing more is wanted."""
        with self._lock:
            self._pieces.pop(ticket, None)

    def clear(self) -> None:
        """Forgets all fetches."""
        with self._lock:
            self._pieces.clear()

    def arrived(self, worker: int, arrival: Arrival) -> Arrival | None:
        """Notes a piece at a worker. Returns the piece once all have it: with as many blocks as
        every one has, and the last where one has no more; None before, and for a fetch that is
        over."""
        with self._lock:
            pieces = self._pieces.get(arrival.ticket)
            if pieces is None:
                return None
            found = pieces.setdefault(arrival.piece, {})
            found[worker] = arrival
            if len(found) < self._workers:
                return None
            del pieces[arrival.piece]
            blocks = min(each.blocks for each in found.values())
            last = any(each.last for each in found.values())
            if last or any(each.blocks > blocks for each in found.values()):
                last = True
                del self._pieces[arrival.ticket]
            return Arrival(arrival.ticket, arrival.piece, blocks, last)
