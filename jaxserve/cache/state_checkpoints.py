"""Checkpoints of recurrent states: copies of them at the ends of blocks, from which later sequences
with the same prefix go on.

Layers with states (Gated DeltaNet) know a prefix by the state after it alone: blocks of KV do not
bring it back. A checkpoint lies on pages of the same pools as KV, under keys of its own, so that it
is found, locked and evicted as blocks are, and takes memory only while it is worth it. All pages of
one are on the lane that is home to its sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxserve.api.batch import NO_COPIES
from jaxserve.cache.hashes import BlockHashes, state_keys
from jaxserve.cache.pages import PageAllocator
from jaxserve.cache.prefix_match import PrefixMatch


class StateCopies(NamedTuple):
    """Copies of states that a step makes, see `Batch`."""

    restores: np.ndarray = NO_COPIES
    saves: np.ndarray = NO_COPIES


class _Saved(NamedTuple):
    """A checkpoint that an issued batch writes, and whose block is not published yet."""

    blocks: int  # of the sequence, that it is behind
    pages: list[int]


class StateCheckpoints:
    """The checkpoints of one cache. parts: pages of each. spacing: tokens of a sequence between two
    of them, where nothing says that one will be used. renewed: is called with each page that gets
    a part of one."""

    def __init__(
        self, pages: PageAllocator, parts: int, spacing: int, renewed: Callable[[int], None]
    ):
        self.parts = parts
        self.spacing = spacing
        self._renewed = renewed
        self._pages = pages
        self._saved: dict[int, _Saved] = {}  # by slot
        self._reached: dict[int, int] = {}  # by slot: blocks before its deepest checkpoint
        self._restores: list[list[int]] = []
        self._saves: list[list[int]] = []
        self._restored: list[int] = []  # pages, held until the next batch is made

    # --- what is there

    def on_pages(self, key: bytes) -> list[int] | None:
        """Returns the pages of the checkpoint behind a block; None if it has none."""
        found = []
        for part in state_keys(key, self.parts):
            copies = self._pages.with_key.get(part)
            if copies is None:
                return None
            found.append(copies[0])
        return found

    def shortened(self, match: PrefixMatch, hashes: BlockHashes) -> PrefixMatch:
        """Returns as much of a match as ends with a checkpoint, with its lane."""
        for blocks in range(len(match.pages), 0, -1):
            pages = self.on_pages(hashes[blocks - 1])
            if pages is not None:
                lane = pages[0] // self._pages.per_lane
                return self._cut(match, blocks, lane)
        return self._cut(match, 0, None)

    @staticmethod
    def _cut(match: PrefixMatch, blocks: int, lane: int | None) -> PrefixMatch:
        pages = match.pages[:blocks]
        return PrefixMatch(pages, match.generation[:blocks], len(match.pages), lane)

    def keys(self, blocks: int, hashes: BlockHashes) -> list[bytes]:
        """Returns the keys of the checkpoint's pages behind the first `blocks`."""
        return list(state_keys(hashes[blocks - 1], self.parts)) if blocks else []

    def behind(self, pages: list[int]) -> list[int]:
        """Returns the pages of the checkpoints behind the blocks published on these pages."""
        keys = [key for key in map(self._pages.key_of.get, pages) if key is not None]
        return [page for key in keys for page in self.on_pages(key) or ()]

    # --- what is copied

    def restore(self, slot: int, blocks: int, hashes: BlockHashes) -> None:
        """Has the next batch give a slot the states of the checkpoint behind its first `blocks`
        blocks."""
        pages = self.on_pages(hashes[blocks - 1])
        assert pages is not None, "a matched prefix has no checkpoint"
        self._reached[slot] = blocks
        self._pages.ref(np.array(pages))
        self._restored += pages
        self._restores.append(self._row(slot, pages))

    def save(self, slot: int, lane: int, blocks: int) -> bool:
        """Has the next batch, which fills the slot's first `blocks` blocks, keep the states behind
        them on pages of its home lane, to be found once the last of the blocks is published.
        Returns whether there was room, beside locked pages and the slot's checkpoint before it."""
        if slot in self._saved or self._pages.available_unlocked()[lane] < self.parts:
            return False
        pages = [self._pages.allocate(lane) for _ in range(self.parts)]
        for page in pages:
            self._renewed(page)
        self._saved[slot] = _Saved(blocks, pages)
        self._saves.append(self._row(slot, pages))
        return True

    def _row(self, slot: int, pages: list[int]) -> list[int]:
        lane = pages[0] // self._pages.per_lane
        return [lane, slot, *(page - lane * self._pages.per_lane for page in pages)]

    def take(self) -> StateCopies:
        """Returns the copies since the last call."""
        restores, saves = (
            np.array(rows, np.int32).reshape(-1, 2 + self.parts)
            for rows in (self._restores, self._saves)
        )
        self._pages.unref(self._restored)
        self._restores = []
        self._saves = []
        self._restored = []
        return StateCopies(restores, saves)

    def published(self, slot: int, blocks: range, hashes: BlockHashes) -> None:
        """Lets the checkpoint of a slot be found, if the last of its blocks is among these, which
        are published now."""
        saved = self._saved.get(slot)
        if saved is None or saved.blocks - 1 not in blocks:
            return
        for page, key in zip(saved.pages, state_keys(hashes[saved.blocks - 1], self.parts)):
            self._pages.publish(page, key)
        self._give_up(slot)
        self._reached[slot] = saved.blocks

    def reached(self, slot: int) -> int:
        """Returns how many of a slot's blocks are before its deepest checkpoint: none goes on from
        those behind it."""
        return self._reached.get(slot, 0)

    def release(self, slot: int) -> None:
        """Forgets the checkpoints of a slot that is emptied; published ones stay cached."""
        self._give_up(slot)
        self._reached.pop(slot, None)

    def _give_up(self, slot: int) -> None:
        """Gives up the pages of a slot's checkpoint, which is published, or never will be."""
        saved = self._saved.pop(slot, None)
        if saved is not None:
            self._pages.unref(saved.pages)

    def held(self) -> list[int]:
        """Returns the pages that checkpoints hold which are not published, or are being
        restored."""
        return [page for saved in self._saved.values() for page in saved.pages] + self._restored
