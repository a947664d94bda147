"""Looks up which pages hold the blocks that a sequence begins with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from jaxserve.cache.hashes import STATE_PART, BlockHashes, group_key, state_keys
from jaxserve.cache.pages import PageAllocator


class PrefixMatch(NamedTuple):
    """Pages that hold the first blocks of a sequence.

    pages [n]: those that can be used. published [m]: these, and those that cannot, for what is seen
    behind them is not there. generation [m]: of the published ones when they were found: as long as
    a page's is the same, it still holds its block. lane: that has the checkpoint of the states
    after the n blocks, in models with states.
    """

    pages: np.ndarray
    published: np.ndarray
    generation: np.ndarray
    lane: int | None = None


class BlockPage(NamedTuple):
    """A page of a sequence: that of its `block` in a page group, by the numbers of both, or, from
    STATE_PART on, a part of the checkpoint of the states after the block."""

    block: int
    group: int = 0

    @property
    def of_states(self) -> bool:
        """Returns whether it is a part of a checkpoint."""
        return self.group >= STATE_PART

    def key(self, hashes: BlockHashes | Sequence[bytes]) -> bytes:
        """Returns the page's key. hashes: of the sequence."""
        return group_key(hashes[self.block], self.group)


class ReachablePrefix(NamedTuple):
    """First blocks of a sequence that need not be computed, for they are on pages, and can be
    fetched.

    pages: that hold the first of them. blocks: how many they are. further: for each page group
    behind the first, its pages of the blocks that it sees, as far as these have `pages`; None for
    one that is missing. missing: what is to be fetched, in the order in which it is to come.
    states: pages of the checkpoint behind it, in models with states; none where it is missing.
    """

    pages: np.ndarray
    blocks: int
    further: list[list[int | None]]
    missing: list[BlockPage]
    states: list[int]

    @property
    def on_pages(self) -> np.ndarray:
        """All pages of it that are there."""
        if not self.further and not self.states:
            return self.pages
        further = [page for pages in self.further for page in pages if page is not None]
        return np.concatenate([self.pages, np.array(further + self.states, np.intp)])

    @property
    def checkpoint_pages(self) -> int:
        """Pages of the checkpoint behind it, there or missing."""
        return len(self.states) + sum(part.of_states for part in self.missing)

    def keys(self, hashes: BlockHashes) -> list[bytes]:
        """Returns the keys of what is missing."""
        return [part.key(hashes) for part in self.missing]


NO_PAGES = np.empty(0, np.intp)
NO_MATCH = PrefixMatch(NO_PAGES, NO_PAGES, np.empty(0, np.int32))


# chooses one of the pages that hold a block
ChooseCopy = Callable[[Sequence[int]], int]
OLDEST: ChooseCopy = itemgetter(0)


def find_prefix(
    pages: PageAllocator,
    hashes: BlockHashes,
    blocks: int,
    last: PrefixMatch,
    choose: ChooseCopy = OLDEST,
) -> PrefixMatch:
    """Finds the pages of a sequence's first blocks, at most `blocks`. last: what was found before
    for the same sequence: only what changed since is looked up again. choose: which of several
    pages with a block is taken; one that was taken before stays as long as it has the block."""
    known = len(last.published)
    if known:
        unchanged = pages.generation[last.published] == last.generation
        if not unchanged.all():
            known = int(unchanged.argmin())
    new: list[int] = []
    for key in hashes.keys(known, blocks):
        copies = pages.with_key.get(key)
        if copies is None:
            break
        new.append(choose(copies))
    known = min(known, blocks)
    if not new and known == len(last.published):
        return last
    together = np.concatenate([last.published[:known], np.array(new, np.intp)])
    return PrefixMatch(together, together, pages.generation[together])


class SeenPages:
    """The pages that a prefix needs beside those of its blocks: those through which the page groups
    behind the first see its last blocks, and the checkpoint of the states after it. False where it
    needs none. reach: how many blocks before a place in a prompt each of these groups sees. states:
    pages of a checkpoint; 0 where layers have none."""

    def __init__(self, pages: PageAllocator, reach: Sequence[int], states: int = 0):
        self._pages = pages
        self._reach = reach
        self.states = states

    def __bool__(self) -> bool:
        return bool(self._reach) or self.states > 0

    def shortened(self, match: PrefixMatch, hashes: BlockHashes) -> PrefixMatch:
        """Returns as much of a match as ends where each group sees published blocks alone, and
        states have a checkpoint: with its lane."""
        if not self:
            return match
        pages = match.published.tolist()
        keys = list(hashes.keys(0, len(pages)))
        with_key = self._pages.with_key

        def there(block: int, group: int) -> bool:
            key = group_key(keys[block], group)
            if key not in with_key:  # most that is not there
                return False
            if group == STATE_PART:
                return bool(self.checkpoint(keys[block]))
            return self.page(key, pages[block]) is not None

        blocks = self.depth(len(pages), there)
        lane = None
        states = self.checkpoint_after(blocks, hashes)
        if states:
            lane = states[0] // self._pages.per_lane
        return match._replace(pages=match.published[:blocks], lane=lane)

    def checkpoint(self, key: bytes, lane: int | None = None) -> list[int]:
        """Returns the pages of the checkpoint behind a block, all of one lane, of this one where
        it is given; none where there are not all."""
        pages = self._pages
        for first in pages.with_key.get(group_key(key, STATE_PART), ()):
            home = first // pages.per_lane
            if lane not in (None, home):
                continue
            parts = [pages.on_lane(part, home) for part in state_keys(key, self.states)]
            found = [page for page in parts if page is not None]
            if len(found) == self.states:
                return found
        return []

    def checkpoint_after(
        self, blocks: int, hashes: BlockHashes, lane: int | None = None
    ) -> list[int]:
        """Returns the pages of the checkpoint behind the first `blocks` blocks, as `checkpoint`
        does."""
        return self.checkpoint(hashes[blocks - 1], lane) if blocks and self.states else []

    def depth(self, blocks: int, there: Callable[[int, int], bool]) -> int:
        """Returns the blocks of the longest prefix, of at most this many, behind which no group
        lacks a page, nor the states their checkpoint. there: returns whether a group has its page
        of a block, by the numbers of both; for STATE_PART, whether the checkpoint behind the block
        is there."""
        # by group: the blocks from here on are there, of those before number `blocks`
        since = [blocks] * len(self._reach)
        while True:
            before = blocks
            for place, reach in enumerate(self._reach):
                block = min(since[place], blocks)
                while block > max(0, blocks - reach):
                    block -= 1
                    if not there(block, place + 1):
                        blocks = block
                since[place] = block
            while self.states and blocks and not there(blocks - 1, STATE_PART):
                blocks -= 1
            if blocks == before:
                return blocks

    def behind(self, blocks: int, pages: np.ndarray, hashes: BlockHashes) -> list[list[int | None]]:
        """Returns for each group its pages of the blocks that it sees behind the first `blocks` of
        a sequence, as far as these have `pages`; None for one that is not on the lane of its
        block's."""
        on_pages = pages.tolist()
        return [
            [
                self.page(group_key(hashes[block], group), on_pages[block])
                for block in range(first, len(on_pages))
            ]
            for group, first in enumerate(self.firsts(blocks), 1)
        ]

    def complete(self, pages: Sequence[int], before_end: int) -> list[int]:
        """Returns those of the `pages` of one published block that are next to a page of every
        group that sees the block from the end of a match, `before_end` blocks behind its begin."""
        groups = [group for group, reach in enumerate(self._reach, 1) if before_end <= reach]
        return [page for page in pages if None not in self.of_block(page, groups)]

    def of_block(self, page: int, groups: Iterable[int]) -> list[int | None]:
        """Returns the pages of these groups beside the published `page` of a block."""
        key = self._pages.key_of[page]
        return [self.page(group_key(key, group), page) for group in groups]

    def fullest(self, pages: Sequence[int]) -> int:
        """Chooses of the pages of a block the one that is next to those of most groups, the oldest
        of these."""
        groups = range(1, len(self._reach) + 1)
        lacking = lambda page: self.of_block(page, groups).count(None)
        return pages[0] if len(pages) == 1 else min(pages, key=lacking)

    def beside(self, pages: Sequence[int]) -> list[int]:
        """Returns the pages that the groups, and checkpoints, have of the blocks published on these
        pages."""
        keys = [key for key in map(self._pages.key_of.get, pages) if key is not None]
        groups = [*range(1, len(self._reach) + 1), *self._parts]
        return [
            page
            for group in groups
            for key in keys
            for page in self._pages.with_key.get(group_key(key, group), ())
        ]

    @property
    def _parts(self) -> range:
        return range(STATE_PART, STATE_PART + self.states)

    def parts(self, blocks: int) -> list[BlockPage]:
        """Returns which pages the groups see behind the first `blocks`, block by block, and those
        of the checkpoint there."""
        firsts = self.firsts(blocks)
        seen = [
            BlockPage(block, group)
            for block in range(min(firsts, default=blocks), blocks)
            for group, first in enumerate(firsts, 1)
            if block >= first
        ]
        return seen + [BlockPage(blocks - 1, part) for part in self._parts if blocks]

    def keys(self, blocks: int, hashes: BlockHashes | Sequence[bytes]) -> list[bytes]:
        """Returns the keys of `parts`."""
        return [part.key(hashes) for part in self.parts(blocks)]

    def firsts(self, blocks: int) -> list[int]:
        """Returns for each group the first block that it sees of those before number `blocks`."""
        return [max(0, blocks - reach) for reach in self._reach]

    def page(self, key: bytes, beside: int) -> int | None:
        """Returns the page with a key of `group_key`, on the lane of its block's page `beside`."""
        return self._pages.on_lane(key, beside // self._pages.per_lane)
