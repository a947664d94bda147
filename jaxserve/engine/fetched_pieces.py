"""Pieces of fetches that have come to the devices and are not written to their pages yet."""

from __future__ import annotations

import threading
from typing import NamedTuple

from jaxserve.engine.page_io import GatheredBlocks


class Arrival(NamedTuple):
    """A piece of a fetch that can be written to its pages: `blocks` of them, the next ones of the
    fetch. last: nothing comes after it; what is missing then was not found."""

    ticket: int
    piece: int
    blocks: int
    last: bool


class FetchedPieces:
    """Pieces by fetch: at most `most` at once, and one more of the fetch that began first. So that
    one ends whatever others have come, also where other processes bring them in another order. All
    methods may be called from any thread."""

    def __init__(self, most: int):
        self._most = most
        self._closed = False
        self._changed = threading.Condition()
        self._pieces: dict[int, dict[int, GatheredBlocks | None]] = {}  # by ticket and number
        self._taken: dict[int, int] = {}  # places by ticket, in the order of beginning

    def __len__(self) -> int:
        """Fetches that are under way."""
        return len(self._taken)

    def begin(self, ticket: int) -> None:
        """Notes that a fetch begins."""
        with self._changed:
            self._taken[ticket] = 0
            self._pieces[ticket] = {}

    def wait(self, ticket: int) -> bool:
        """Waits for a place for the next piece of a fetch, and takes it; False where nothing more
        of the fetch is wanted."""
        with self._changed:
            self._changed.wait_for(lambda: self._over(ticket) or self._has_place(ticket))
            if self._over(ticket):
                return False
            self._taken[ticket] += 1
            return True

    def _over(self, ticket: int) -> bool:
        return self._closed or ticket not in self._taken

    def _has_place(self, ticket: int) -> bool:
        is_first = next(iter(self._taken)) == ticket and not self._taken[ticket]
        return is_first or sum(self._taken.values()) < self._most

    def put(self, ticket: int, piece: int, blocks: GatheredBlocks | None) -> bool:
        """Keeps a piece, in the place that it has; False where nothing more is wanted."""
        with self._changed:
            if self._over(ticket):
                return False
            self._pieces[ticket][piece] = blocks
            return True

    def take(self, ticket: int, piece: int, last: bool) -> GatheredBlocks | None:
        """Takes a piece out. last: nothing more of its fetch is wanted, it is over."""
        with self._changed:
            if ticket not in self._taken:  # of a group that was lost
                return None
            blocks = self._pieces[ticket].pop(piece, None)
            self._taken[ticket] -= 1
            if last:
                del self._taken[ticket]
                del self._pieces[ticket]
            self._changed.notify_all()
            return blocks

    def close(self) -> None:
        """Ends all waits; no more pieces come."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
