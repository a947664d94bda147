"""Moves and copies pages from lane to lane, a few with each batch: blocks of a sequence, until its
lanes have equally many, and copies of blocks that many sequences read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from jaxserve.lanes.layout import SequenceLayout

NO_MOVES = np.zeros((0, 4), np.int32)


class PageMoves:
    """Pages that the next batch copies from lane to lane, all at once: all are read before any is
    written. Its source is free after a move, and stays as it was where a block is copied.

    per_lane: pages of a lane. limit: pages that a batch copies from a lane to another.
    """

    def __init__(self, per_lane: int, limit: int):
        self._per_lane = per_lane
        self.limit = limit
        self._source: dict[int, int] = {}  # by target
        self._count: Counter[tuple[int, int]] = Counter()  # by lane and target lane

    def room(self, lane: int, to_lane: int) -> int:
        """Returns the pages that the batch can yet move from a lane to another."""
        return self.limit - self._count[lane, to_lane]

    def writes(self, page: int) -> bool:
        """Returns whether the page is a target: what it will hold cannot move on in the same
        batch."""
        return page in self._source

    def reads(self, pages: Iterable[int]) -> bool:
        """Returns whether any of these pages is a source."""
        return bool(self._source) and not set(pages).isdisjoint(self._source.values())

    def cancel(self, page: int) -> None:
        """Leaves out the move to a page, if there is one: the page has another block now."""
        self._source.pop(page, None)

    def add(self, lane: int, to_lane: int, pages: Sequence[int], targets: Sequence[int]) -> None:
        """Moves pages of a lane to those of another. A target that was one before has lost the
        sequence for which that move was."""
        self._source.update(zip(targets, pages))
        self._count[lane, to_lane] += len(pages)

    def take(self) -> np.ndarray:
        """Returns moves [m, 4] int32 since the last call: lane, page, to lane, to page."""
        if not self._source:
            return NO_MOVES
        moves = np.empty((len(self._source), 4), np.int32)
        moves[:, 0], moves[:, 1] = divmod(
            np.fromiter(self._source.values(), np.int64), self._per_lane
        )
        moves[:, 2], moves[:, 3] = divmod(np.fromiter(self._source, np.int64), self._per_lane)
        self._source = {}
        self._count.clear()
        return moves


class MovablePages(Protocol):
    """Pages of all lanes, as `cache.pages.PageAllocator` has them."""

    refs: np.ndarray  # [pages] sequences that hold each

    def available(self) -> list[int]:
        """Pages that can be had on each lane."""

    def move(self, pages: Sequence[int], lane: int) -> list[int]:
        """Allocates pages of `lane` in place of these, which become free."""


def deal_anew(layout: SequenceLayout, lanes: tuple[int, ...], pages: MovablePages) -> None:
    """Has the blocks so far, and those that come meanwhile, dealt out over `lanes` by `Rebalance`,
    bit by bit: as few move as it takes until the lanes have equally many, but for one (Tetris,
    section 4.1). Blocks that other sequences hold too, in any page group, stay where they are."""
    shared = pages.refs[np.asarray(layout.pages, np.intp)] > 1
    for further, first in zip(layout.further, layout.first_seen):
        shared[first:] |= pages.refs[np.asarray(further[first:], np.intp)] > 1
    on = layout.lanes_of(0, len(layout.pages))[shared]
    layout.fixed = np.bincount(on, minlength=len(layout.by_lane)).tolist()
    layout.target = lanes


def surplus_of(by_lane: Sequence[int], fixed: Sequence[int], lanes: tuple[int, ...]) -> list[int]:
    """Returns the blocks that each lane has too many (below 0: too few) until `lanes` have equally
    many, but for one. by_lane: a sequence's blocks on each lane; fixed: of these, those that
    stay."""
    movable = [blocks - kept for blocks, kept in zip(by_lane, fixed)]
    return [free - wanted for free, wanted in zip(movable, _even(lanes, fixed, movable))]


def batches_to_deal(surplus: Sequence[int], limit: int) -> int:
    """Returns the batches that it takes to move what lanes have too many, where a batch moves
    `limit` blocks from a lane to another."""
    givers = sum(count > 0 for count in surplus)
    takers = sum(count < 0 for count in surplus)
    if not (givers and takers and limit):
        return 0
    gives = -(-max(surplus) // (takers * limit))
    takes = -(min(surplus) // (givers * limit))
    return max(gives, takes)


class Rebalance:
    """Moves blocks of a regrouped sequence, of those before number `before`, as many as `moves` has
    room for, to pages in place of their own, in all page groups that see them.

    `sources`, `targets`: the pages. `starts`: by lane the index from which its row differs.
    """

    def __init__(self, layout: SequenceLayout, before: int, pages: MovablePages, moves: PageMoves):
        self.sources: list[int] = []
        self.targets: list[int] = []
        self.starts: dict[int, int] = {}
        self._layout = layout
        self._before = before
        self._pages = pages
        self._moves = moves
        if layout.target:
            self._run(surplus_of(layout.by_lane, layout.fixed, layout.target))

    def _run(self, surplus: list[int]) -> None:
        layout = self._layout
        givers = [lane for lane, count in enumerate(surplus) if count > 0]
        takers = [lane for lane, count in enumerate(surplus) if count < 0]
        for lane in givers:
            for to_lane in sorted(takers, key=surplus.__getitem__):
                room = min(self._moves.room(lane, to_lane), self._pages.available()[to_lane])
                count = min(surplus[lane], -surplus[to_lane], room)
                if count > 0:
                    blocks, stay = self._movable(lane, count, room)
                    surplus[lane] -= len(blocks) + stay
                    surplus[to_lane] += len(blocks)
                    layout.fixed[lane] += stay
                    self._move(blocks, lane, to_lane)
        if max(surplus) <= 0 or min(surplus) >= 0:
            layout.target = ()
        if self.sources:
            self.starts = layout.local_row(self.starts)

    def _movable(self, lane: int, count: int, room: int) -> tuple[list[int], int]:
        """Returns the last `count` blocks of a lane's row, in its order, of those that the sequence
        alone holds and that are on their pages already, or fewer that have `room` pages; and how
        many others have to stay, as there are not `count`."""
        blocks: list[int] = []
        for block in reversed(self._layout.rows[lane]):
            pages = self._layout.of_block(block)
            movable = block < self._before and (self._pages.refs[pages] == 1).all()
            if not movable or any(map(self._moves.writes, pages)):
                continue
            room -= len(pages)
            if room < 0:
                return blocks[::-1], 0
            blocks.append(block)
            if len(blocks) == count:
                break
        return blocks[::-1], count - len(blocks)

    def _move(self, blocks: list[int], lane: int, to_lane: int) -> None:
        if not blocks:
            return
        sources = [page for block in blocks for page in self._layout.of_block(block)]
        targets = self._pages.move(sources, to_lane)
        self._moves.add(lane, to_lane, sources, targets)
        self.sources += sources
        self.targets += targets
        starts = self._layout.move(blocks, to_lane, targets, self._before)
        for row, start in starts.items():
            self.starts[row] = min(start, self.starts.get(row, start))


def _even(group: tuple[int, ...], fixed: Sequence[int], movable: Sequence[int]) -> list[int]:
    """Returns the movable blocks that a sequence shall have on each lane, so that the lanes of the
    group have equally many, but for one, as far as that goes.

    fixed, movable: its blocks per lane that stay, and those that may move. Lanes outside the group
    get none; lanes that have most keep the odd ones.
    """
    lanes = sorted(group, key=lambda lane: (fixed[lane], -movable[lane], lane))

    def level() -> int:
        return (sum(movable) + sum(fixed[lane] for lane in lanes)) // len(lanes)

    while level() < fixed[lanes[-1]]:
        lanes.pop()  # has more than an even share in fixed ones alone
    share = level()
    odd = sum(movable) + sum(fixed[lane] for lane in lanes) - share * len(lanes)
    wanted = [0] * len(fixed)
    fullest_first = sorted(lanes, key=lambda lane: (-(fixed[lane] + movable[lane]), lane))
    for place, lane in enumerate(fullest_first):
        wanted[lane] = share - fixed[lane] + (place < odd)
    return wanted
