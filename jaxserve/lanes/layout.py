"""The places of the blocks of one running sequence: page, lane, and index in the lane's row.

A sequence's blocks are numbered in the order of its tokens; each is on one page of one lane. The
device keeps, per slot and lane, a row of pages, each with the number of its block.

In a row the blocks of the newest chunk ascend, behind all older ones. These ascend too, unless
blocks have moved there from other lanes: attention reads them whole, in whatever order. Rows of
sequences on one lane, and of models with sliding windows, always ascend.

Where layers have page tables of their own by group (`checkpoint.page_groups`), a block has a page
in each group, all on one lane and at one index of their rows; once a group's window has passed a
block, its page there goes back, and its entry is not read any more: any page of the lane will do.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jaxserve.lanes.groups import size_of

# columns of a page table entry: lane, slot, index in the row, page on the lane, block; from FURTHER
# on pages of further groups
LANE, SLOT, INDEX, PAGE, BLOCK, FURTHER = range(6)
KeyOf = Callable[[int], bytes]  # the key of a block by its number


class SequenceLayout:
    """The blocks of the sequence in a slot; without blocks, an empty slot.

    `pages`: the page of every block, in order, by its number among those of all lanes, of which
    each has `per_lane`. `by_lane`: blocks on each lane. `rows`: per lane, the blocks of its row in
    order; none for a lane alone, whose row has all blocks. `last_lane`: of the newest block, at
    first home. `group`: lanes over which the next blocks are dealt out; none where one lane may
    hold them. `target`: lanes over which the blocks so far are being dealt out evenly, empty once
    they are; `fixed`: of these blocks, those on each lane that stay where they are. `further`: by
    page group behind the first, the page of every block from its number in `first_seen` on, in the
    places of the blocks; `first_seen` may be behind the blocks that are there so far.
    """

    def __init__(
        self,
        slot: int,
        lanes: int,
        per_lane: int,
        home: int = 0,
        prompt_blocks: int = 0,
        key_of: KeyOf | None = None,
        ascending: bool = False,
        further: int = 0,
    ):
        """Makes a layout without blocks. prompt_blocks: of the whole prompt; 0: not known, no block
        counts as decoded. key_of: gives the keys of the prompt's blocks; None where none are used.
        ascending: the blocks of every row must ascend. further: page groups behind the first."""
        self.slot = slot
        self.per_lane = per_lane
        self.home = self.last_lane = home
        self.prompt_blocks = prompt_blocks
        self.pages: list[int] = []
        self.further: list[list[int]] = [[] for _ in range(further)]
        self.first_seen = [0] * further
        self.by_lane = [0] * lanes
        self.rows: list[list[int]] = []
        if lanes > 1:
            self.rows = [[] for _ in range(lanes)]
        self.group: tuple[int, ...] = ()
        self.target: tuple[int, ...] = ()
        self.fixed: list[int] = []
        self._key_of = key_of
        self._ascending = ascending

    @property
    def group_size(self) -> int:
        """Lanes of the smallest group that has home and all blocks."""
        return 1 if len(self.by_lane) == 1 else size_of(self.home, self.by_lane)

    @property
    def decoding(self) -> bool:
        """True where the next block comes after all blocks of the prompt."""
        return 0 < self.prompt_blocks <= len(self.pages)

    def held(self) -> list[int]:
        """Returns the pages of all groups, block by block."""
        if not self.further:
            return self.pages
        first = min(self.first_seen)
        seen = range(first, len(self.pages))
        return self.pages[:first] + [page for block in seen for page in self.of_block(block)]

    def groups_of(self, block: int) -> list[int]:
        """Returns the numbers of the further groups that see a block, from 1 on."""
        return [group for group, first in enumerate(self.first_seen, 1) if block >= first]

    def of_block(self, block: int) -> list[int]:
        """Returns the pages of a block in all groups that see it."""
        further = [self.further[group - 1][block] for group in self.groups_of(block)]
        return [self.pages[block], *further]

    @property
    def page_count(self) -> int:
        """Pages of all groups."""
        blocks = len(self.pages)
        return blocks + sum(max(0, blocks - first) for first in self.first_seen)

    def page(self, block: int, group: int) -> int:
        """Returns the page of a block in a page group, which sees it."""
        return self.further[group - 1][block] if group else self.pages[block]

    def key(self, block: int) -> bytes | None:
        """Returns the key of a block of the prompt, whether it has a page yet or not. None for the
        prompt's last block, which may not be full, for decoded blocks, whose tokens are not known
        when they get their pages, where the prompt's length is not known, and without prefix
        caching."""
        if self._key_of is None or block >= self.prompt_blocks - 1:
            return None
        return self._key_of(block)

    def lanes_of(self, first: int, last: int) -> np.ndarray:
        """Returns the lane of each block `first` to before `last`, int32."""
        return np.asarray(self.pages[first:last], np.int32) // self.per_lane

    def start(
        self,
        pages: np.ndarray,
        further: Sequence[Sequence[int]] = (),
        first_seen: Sequence[int] = (),
    ) -> np.ndarray:
        """Gives an empty layout the matched `pages` [m] of the first blocks, and of each further
        group those from the block on that it sees first; where that comes behind the m blocks, it
        gets no pages of others before it. Returns their page table entries, lane by lane."""
        lanes = pages // self.per_lane
        blocks = [np.flatnonzero(lanes == lane) for lane in range(len(self.by_lane))]
        self.pages = pages.tolist()
        for group, (seen, first) in enumerate(zip(further, first_seen)):
            self.first_seen[group] = first
            self.further[group] = [*self.pages[:first], *seen]
        self.by_lane = [len(row) for row in blocks]
        if self.rows:
            self.rows = [row.tolist() for row in blocks]
        return np.concatenate(
            [self._entries(lane, 0, row, pages[row]) for lane, row in enumerate(blocks)]
        )

    def append(self, page: int, lane: int, further: Sequence[int] = ()) -> int:
        """Puts the next block on a page of a lane, and on one of each of the `further` groups, any
        number in those that do not see it; returns its index in the lane's row."""
        index = self.by_lane[lane]
        if self.rows:
            self.rows[lane].append(len(self.pages))
        self.pages.append(page)
        for pages, other in zip(self.further, further):
            pages.append(other)
        self.by_lane[lane] = index + 1
        self.last_lane = lane
        return index

    def extend(self, pages: Sequence[int]) -> None:
        """Puts the next blocks on pages of the only lane, of the only page group."""
        self.pages += pages
        self.by_lane[0] += len(pages)

    def pass_before(self, group: int, block: int) -> list[int]:
        """Takes the pages of the blocks before number `block` from a further group, which sees them
        no more; returns them."""
        first = self.first_seen[group]
        if block <= first:
            return []
        self.first_seen[group] = block
        return self.further[group][first:block]

    def move(
        self, blocks: list[int], to_lane: int, targets: list[int], before: int
    ) -> dict[int, int]:
        """Moves blocks of one lane's row, in the order that they have there, to pages of another
        lane: in front of its blocks from number `before` on. targets: in place of those of
        `of_block`, block by block. Returns by lane the index from which its row differs."""
        lane = self.pages[blocks[0]] // self.per_lane
        row = self.rows[lane]
        # from the end, where the blocks that move are
        start = len(row) - 1 - row[::-1].index(blocks[0])
        leaving = set(blocks)
        row[start:] = [block for block in row[start:] if block not in leaving]
        left = iter(targets)
        for block in blocks:
            self._put(block, left)
        self.by_lane[lane] -= len(blocks)
        self.by_lane[to_lane] += len(blocks)
        return {lane: start, to_lane: self._insert(to_lane, blocks, before)}

    def _put(self, block: int, pages: Iterator[int]) -> None:
        """Puts a block on the next of these pages, one in each group that sees it."""
        page = self.pages[block] = next(pages)
        for others, first in zip(self.further, self.first_seen):
            others[block] = next(pages) if block >= first else page

    def repoint(self, block: int, pages: list[int], before: int) -> dict[int, int]:
        """Puts a block on other pages that have it, as `move` does; returns the same."""
        lane = self.pages[block] // self.per_lane
        to_lane = pages[0] // self.per_lane
        if lane == to_lane:
            self._put(block, iter(pages))
            return {lane: self.rows[lane].index(block)}
        return self.local_row(self.move([block], to_lane, pages, before))

    def local_row(self, starts: dict[int, int]) -> dict[int, int]:
        """Sorts the row of a sequence that blocks have come to, and that lies on its home lane
        alone now. starts: by lane the index from which a row differs. Returns the new ones."""
        if self.group_size > 1:
            return starts
        self.rows[self.home].sort()
        return dict.fromkeys((self.home, *starts), 0)

    def _insert(self, lane: int, blocks: list[int], before: int) -> int:
        """Puts blocks into a lane's row, in front of those from number `before` on; returns where
        the row begins to differ."""
        row = self.rows[lane]
        if self._ascending:
            start = bisect.bisect(row, min(blocks))
            row += blocks
            row.sort()
            return start
        start = len(row)
        while start and row[start - 1] >= before:
            start -= 1
        row[start:start] = blocks
        return start

    def entries(self, lane: int, start: int = 0) -> np.ndarray:
        """Returns page table entries int32 of the lane's row from index `start` on."""
        blocks = self.rows[lane][start:]
        pages = np.array([self.pages[block] for block in blocks], np.intp)
        return self._entries(lane, start, blocks, pages)

    def _entries(
        self, lane: int, start: int, blocks: list[int] | np.ndarray, pages: np.ndarray
    ) -> np.ndarray:
        entries = np.empty((len(blocks), FURTHER + len(self.further)), np.int32)
        entries[:, LANE] = lane
        entries[:, SLOT] = self.slot
        entries[:, INDEX] = np.arange(start, start + len(blocks))
        entries[:, PAGE] = pages - lane * self.per_lane
        entries[:, BLOCK] = blocks
        for group, others in enumerate(self.further):
            seen = np.array([others[block] for block in blocks], np.intp)
            entries[:, FURTHER + group] = seen - lane * self.per_lane
        return entries

    def check(self) -> None:
        """Compares lanes and rows with the pages. Errors: AssertionError with what differs."""
        lanes = self.lanes_of(0, len(self.pages))
        counted = np.bincount(lanes, minlength=len(self.by_lane)).tolist()
        assert self.by_lane == counted, (
            f"slot {self.slot}: lanes have {counted} blocks, not {self.by_lane}"
        )
        sorts = not self._ascending and self.group_size > 1
        for pages in self.further:
            assert len(pages) == len(self.pages), f"slot {self.slot}: a group lacks blocks"
            assert (np.array(pages, np.int32) // self.per_lane == lanes).all(), (
                f"slot {self.slot}: pages of one block are on several lanes"
            )
        for lane, row in enumerate(self.rows):
            blocks = np.flatnonzero(lanes == lane).tolist()
            in_order = sorted(row) if sorts else row
            assert in_order == blocks, (
                f"slot {self.slot}: a row of lane {lane} has {row}, not {blocks}"
            )
