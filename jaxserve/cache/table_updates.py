"""What the device's page tables do not have yet: new entries and page moves, sent with the next
batch.

The device keeps a row of pages per lane and slot (see `manager`). Only entries that are new or
differ from those sent before are sent, so that what a step sends does not depend on how long a
context is (medha.md M13).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

# columns of an entry: lane, slot, index in the row, page on the lane, block of the sequence
LANE, SLOT, INDEX, PAGE, BLOCK = range(5)


class TableUpdates:
    """Page table entries that were not taken yet."""

    def __init__(self) -> None:
        self._many: list[np.ndarray] = []  # [m, 5] each
        self._single: list[int] = []  # five numbers per entry

    def add(self, lane: int, slot: int, index: int, page: int, block: int) -> None:
        """Adds an entry behind the last of its row."""
        self._single += (lane, slot, index, page, block)

    def add_all(self, entries: np.ndarray) -> None:
        """Adds the entries [m, 5] of a slot that has none."""
        self._many = [self.take(), entries]

    def rewrite(self, lane: int, slot: int, start: int, entries: np.ndarray) -> None:
        """Adds the entries [m, 5] that a row has from index `start` on, in the place of what is
        pending of it there."""
        pending = self.take()
        elsewhere = (pending[:, LANE] != lane) | (pending[:, SLOT] != slot)
        self._many = [pending[elsewhere | (pending[:, INDEX] < start)], entries]

    def drop(self, slot: int) -> None:
        """Drops the pending entries of a slot that is emptied."""
        if self._many or self._single:
            pending = self.take()
            self._many = [pending[pending[:, SLOT] != slot]]

    def take(self) -> np.ndarray:
        """Entries [m, 5] int32 since the last call, columns as above, none twice."""
        entries = np.array(self._single, np.int32).reshape(-1, 5)
        if self._many:
            entries = np.concatenate([*self._many, entries])
        self._many = []
        self._single = []
        return entries


class PageMoves:
    """Pages that the next batch moves from lane to lane, all at once: all are read before any is
    written. pages: of a lane; most: from a lane to another."""

    def __init__(self, pages: int, most: int):
        self._per_lane = pages
        self._most = most
        self._source: dict[int, int] = {}  # by target
        self._count: Counter[tuple[int, int]] = Counter()  # by lane and target lane

    def room(self, lane: int, to_lane: int) -> int:
        """How many more pages the batch can move from a lane to another."""
        return self._most - self._count[lane, to_lane]

    def writes(self, page: int) -> bool:
        """Whether the page is a target: what it will hold cannot move on in the same batch."""
        return page in self._source

    def add(self, lane: int, to_lane: int, pages: Sequence[int], targets: Sequence[int]) -> None:
        """Moves pages of a lane to those of another. A target that was one before is no longer held
        by whom that move was for."""
        self._source.update(zip(targets, pages))
        self._count[lane, to_lane] += len(pages)

    def take(self) -> np.ndarray:
        """Moves [m, 4] int32 since the last call: lane, page, to lane, to page."""
        moves = np.empty((len(self._source), 4), np.int32)
        if self._source:
            moves[:, 0], moves[:, 1] = divmod(
                np.fromiter(self._source.values(), np.int64), self._per_lane
            )
            moves[:, 2], moves[:, 3] = divmod(np.fromiter(self._source, np.int64), self._per_lane)
            self._source = {}
            self._count.clear()
        return moves
