"""Page table entries that the device does not have yet, sent with the next batch.

Only entries that are new or differ from those sent before are sent, so that what a step sends does
not depend on how long a context is (medha.md M13).
"""

from __future__ import annotations

import numpy as np

from jaxserve.lanes.layout import FURTHER, INDEX, LANE, SLOT


class TableUpdates:
    """Page table entries that were not taken yet; their columns: see `lanes.layout`. further: page
    groups behind the first."""

    def __init__(self, further: int = 0) -> None:
        self._columns = FURTHER + further
        self._none = np.zeros((0, self._columns), np.int32)
        self._many: list[np.ndarray] = []  # [m, columns] each
        self._single: list[int] = []  # the numbers of one entry after the other

    def add(self, *entry: int) -> None:
        """Adds an entry behind the last of its row."""
        self._single += entry

    def rewrite(self, lane: int, slot: int, start: int, entries: np.ndarray) -> None:
        """Adds the entries that a row has from index `start` on, in the place of what is
        pending of it there."""
        pending = self.take()
        elsewhere = (pending[:, LANE] != lane) | (pending[:, SLOT] != slot)
        self._many = [pending[elsewhere | (pending[:, INDEX] < start)], entries]

    def add_all(self, entries: np.ndarray) -> None:
        """Adds the entries of all rows of a slot that has none."""
        self._many = [self.take(), entries]

    def drop(self, slot: int) -> None:
        """Drops the pending entries of a slot that is emptied."""
        if self._many or self._single:
            pending = self.take()
            self._many = [pending[pending[:, SLOT] != slot]]

    def take(self) -> np.ndarray:
        """Returns the entries [m, columns] int32 since the last call, none twice."""
        if not self._single and not self._many:
            return self._none
        entries = np.array(self._single, np.int32).reshape(-1, self._columns)
        if self._many:
            entries = np.concatenate([*self._many, entries])
        self._many = []
        self._single = []
        return entries
