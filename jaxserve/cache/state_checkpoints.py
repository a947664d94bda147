"""Checkpoints of recurrent states: copies of them at the ends of blocks, from which later sequences
with the same prefix go on.

Layers with states (Gated DeltaNet) know a prefix by the state after it alone: blocks of KV do not
bring it back. A checkpoint lies on pages of the same pools as KV, under keys of its own, so that it
is found (`cache.prefix_match`), locked, evicted, kept below the devices and fetched as blocks are,
and takes memory only while it is worth it. All pages of one are on the lane that is home to its
sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxserve.api.batch import NO_COPIES
from jaxserve.cache.hashes import BlockHashes
from jaxserve.cache.prefix_match import ReachablePrefix
from jaxserve.cache.published import PublishedBlocks


class StateCopies(NamedTuple):
    """Copies of states that a step makes, see `Batch`."""

    restores: np.ndarray = NO_COPIES
    saves: np.ndarray = NO_COPIES


class _Checkpoint(NamedTuple):
    """A checkpoint of a slot on pages that it holds meanwhile. blocks: of the sequence, that it is
    behind."""

    blocks: int
    pages: list[int]


class StateCheckpoints:
    """The checkpoints of sequences with slots. published: finds those that are published. take:
    takes a page of a lane, to be written to. spacing: tokens of a sequence between two of them,
    where nothing says that one will be used."""

    def __init__(self, published: PublishedBlocks, take: Callable[[int], int], spacing: int):
        self.parts = published.seen.states
        self.spacing = spacing
        self._published = published
        self._pages = published.pages
        self._take = take
        # by slot: what an issued batch writes, and whose block is not published yet; what the
        # slot's fetch brings; what the next batch restores
        self._saved: dict[int, _Checkpoint] = {}
        self._awaited: dict[int, _Checkpoint] = {}
        self._restores: dict[int, _Checkpoint] = {}
        self._saves: list[list[int]] = []
        self._reached: dict[int, int] = {}  # by slot: blocks before its newest checkpoint

    def admit(self, slot: int, prefix: ReachablePrefix) -> None:
        """Has the next batch give a slot the states behind its prefix, whose pages it holds, or,
        where others of these are missing, keeps their checkpoint until `fetched`."""
        held = _Checkpoint(prefix.blocks, prefix.states)
        if not prefix.states:  # a fetch brings them, or the request does
            come = prefix.missing or prefix.blocks > len(prefix.pages)
            assert come, "a matched prefix has no checkpoint"
        elif prefix.missing:
            self._awaited[slot] = held
        else:
            self._restore(slot, held)

    def _restore(self, slot: int, held: _Checkpoint) -> None:
        self._reached[slot] = held.blocks
        self._restores[slot] = held

    def fetch(self, slot: int, lane: int, blocks: int) -> list[int]:
        """Takes pages of a slot's home lane, which must be available, for the checkpoint behind its
        first `blocks` blocks, which a fetch is to bring. Returns them."""
        pages = [self._take(lane) for _ in range(self.parts)]
        self._awaited[slot] = _Checkpoint(blocks, pages)
        return pages

    def fetched(self, slot: int, hashes: BlockHashes, retention: int) -> None:
        """Has the next batch give a slot the states for which it waited, as all of its prefix is on
        pages now. retention: of its request."""
        held = self._awaited.pop(slot)
        self._published.publish_states(held.pages, hashes[held.blocks - 1], retention)
        self._restore(slot, held)

    def save(self, slot: int, lane: int, blocks: int) -> None:
        """Has the next batch, which fills the slot's first `blocks` blocks, keep the states behind
        them on pages of its home lane, to be found once the last of the blocks is published.
        Does nothing without room beside locked pages and the slot's checkpoint before it."""
        if slot in self._saved or self._pages.available_unlocked()[lane] < self.parts:
            return
        pages = [self._take(lane) for _ in range(self.parts)]
        self._saved[slot] = _Checkpoint(blocks, pages)
        self._saves.append(self._row(slot, pages))
        self._reached[slot] = blocks

    def _row(self, slot: int, pages: list[int]) -> list[int]:
        lane = pages[0] // self._pages.per_lane
        return [lane, slot, *(page - lane * self._pages.per_lane for page in pages)]

    def take(self) -> StateCopies:
        """Returns the copies since the last call."""
        restored = [self._row(slot, held.pages) for slot, held in self._restores.items()]
        restores, saves = (
            np.array(rows, np.int32).reshape(-1, 2 + self.parts) for rows in (restored, self._saves)
        )
        for slot in list(self._restores):
            self._give_up(self._restores, slot)
        self._saves = []
        return StateCopies(restores, saves)

    def publish(self, slot: int, blocks: range, hashes: BlockHashes, retention: int) -> None:
        """Lets the checkpoint of a slot be found, if the last of its blocks is among these, which
        are published now. retention: of its request."""
        saved = self._saved.get(slot)
        if saved is None or saved.blocks - 1 not in blocks:
            return
        self._published.publish_states(saved.pages, hashes[saved.blocks - 1], retention)
        self._give_up(self._saved, slot)

    def reached(self, slot: int) -> int:
        """Returns how many of a slot's blocks are before its newest checkpoint, which it saved or
        was given: none goes on from those behind it."""
        return self._reached.get(slot, 0)

    def release(self, slot: int) -> None:
        """Forgets the checkpoints of a slot that is emptied; published ones stay cached."""
        for held in (self._saved, self._awaited, self._restores):
            self._give_up(held, slot)
        self._reached.pop(slot, None)

    def _give_up(self, held: dict[int, _Checkpoint], slot: int) -> None:
        """Gives up the pages of a slot's checkpoint, if it holds one of this kind."""
        checkpoint = held.pop(slot, None)
        if checkpoint is not None:
            self._pages.unref(checkpoint.pages)

    def held(self) -> list[int]:
        """Returns the pages that slots hold for checkpoints."""
        return [
            page
            for kind in (self._saved, self._awaited, self._restores)
            for held in kind.values()
            for page in held.pages
        ]
