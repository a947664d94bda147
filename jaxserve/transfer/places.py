"""Places for a bounded number of transfers at one time, given in the order of their deadlines."""

from __future__ import annotations

import heapq
import itertools
import threading


class Places:
    """At most `count` callers have a place at one time; others wait for one, the one that is due
    first before all others. Any thread may call."""

    def __init__(self, count: int):
        self.count = count
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._taken = 0
        self._waiting: list[tuple[float, int, Place]] = []  # a heap

    @property
    def taken(self) -> int:
        """Places that callers have."""
        return self._taken

    @property
    def waiting(self) -> int:
        """Callers that wait."""
        return sum(not place.left for *_, place in list(self._waiting))

    def ask(self, due: float) -> Place:
        """Asks for a place, for a transfer that is due at this second of any one clock. The caller
        must leave it, whether it was given or not."""
        place = Place(self)
        with self._lock:
            heapq.heappush(self._waiting, (due, next(self._numbers), place))
            self._give()
        return place

    def _leave(self, place: Place) -> None:
        with self._lock:
            if place.left:
                return
            place.left = True
            self._taken -= place.given.is_set()
            self._give()

    def _give(self) -> None:
        """Gives free places to those that are due first. The lock is held."""
        while self._waiting and (self._taken < self.count or self._waiting[0][-1].left):
            *_, place = heapq.heappop(self._waiting)
            if not place.left:
                self._taken += 1
                place.given.set()


class Place:
    """A place that was asked for. given: set once it is the caller's. left: it is no more."""

    def __init__(self, places: Places):
        self._places = places
        self.given = threading.Event()
        self.left = False

    def leave(self) -> None:
        """Gives the place back, or waits for it no longer."""
        self._places._leave(self)
