"""What the device's page tables do not have yet: new entries and page moves, sent with the next
batch.

The device keeps a row of pages per lane and slot, in ascending order of the blocks on them. Only
entries that are new or differ from those sent before are sent, so that what a step sends does not
depend on how long a context is (medha.md M13).
"""

from __future__ import annotations

import numpy as np

# columns of an entry: lane, slot, index in the row, page on the lane, block of the sequence
LANE, SLOT, INDEX, PAGE, BLOCK = range(5)


class TableUpdates:
    """Page table entries and page moves that were not taken yet."""

    def __init__(self) -> None:
        self._many: list[np.ndarray] = []  # [m, 5] each
        self._single: list[int] = []  # five numbers per entry
        self._moves: list[int] = []  # four numbers per move

    def add(self, lane: int, slot: int, index: int, page: int, block: int) -> None:
        """Adds an entry behind the last of its row."""
        self._single += (lane, slot, index, page, block)

    def add_all(self, entries: np.ndarray) -> None:
        """Adds the entries [m, 5] of a slot that has none; they come before those that `add`
        added."""
        self._many.append(entries)

    def add_move(self, lane: int, page: int, to_lane: int, to_page: int) -> None:
        """Moves a page before the next step, after the moves that were added before."""
        self._moves += (lane, page, to_lane, to_page)

    def replace(self, before: np.ndarray, after: np.ndarray) -> None:
        """Replaces a slot's entries, [blocks, 5] in the order of the blocks: adds those that
        differ, and drops what is pending of them."""
        changed = (before != after).any(1)
        if not changed.any():
            return
        pending = self.take()
        mine = pending[:, SLOT] == after[0, SLOT]
        still_right = pending[mine][~changed[pending[mine, BLOCK]]]
        own = np.concatenate([still_right, after[changed]])
        self._many = [pending[~mine], own[np.argsort(own[:, BLOCK])]]

    def drop(self, slot: int) -> None:
        """Drops the pending entries of a slot that is emptied."""
        if self._many or self._single:
            pending = self.take()
            self._many = [pending[pending[:, SLOT] != slot]]

    def take(self) -> np.ndarray:
        """Entries [m, 5] int32 since the last call, columns as above: none twice, and ascending
        blocks per row."""
        entries = np.array(self._single, np.int32).reshape(-1, 5)
        if self._many:
            entries = np.concatenate([*self._many, entries])
        self._many = []
        self._single = []
        return entries

    def take_moves(self) -> np.ndarray:
        """Moves [m, 4] int32 since the last call, to be made in this order before the next step:
        lane, page, to lane, to page."""
        moves = np.array(self._moves, np.int32).reshape(-1, 4)
        self._moves = []
        return moves
