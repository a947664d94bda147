"""Looks up which pages hold the blocks that a sequence begins with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from jaxserve.cache.hashes import BlockHashes, group_key
from jaxserve.cache.pages import PageAllocator


class PrefixMatch(NamedTuple):
    """Pages [n] that hold the first n blocks of a sequence, and their `generation` [n] when they
    were found: as long as a page's is the same, it still holds its block. published: blocks of the
    sequence that are on pages, where these are more than can be used: without a checkpoint of the
    states after them. lane: that has the checkpoint after the n blocks, in models with states."""

    pages: np.ndarray
    generation: np.ndarray
    published: int = 0
    lane: int | None = None


NO_MATCH = PrefixMatch(np.empty(0, np.intp), np.empty(0, np.int32))


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
    unchanged = pages.generation[last.pages] == last.generation
    known = len(last.pages) if unchanged.all() else int(unchanged.argmin())
    new: list[int] = []
    for key in hashes.keys(known, blocks):
        copies = pages.with_key.get(key)
        if copies is None:
            break
        new.append(choose(copies))
    known = min(known, blocks)
    if not new and known == len(last.pages):
        return last
    together = np.concatenate([last.pages[:known], np.array(new, np.intp)])
    return PrefixMatch(together, pages.generation[together])


class SeenPages:
    """Pages through which the groups behind the first see the blocks before a place in a prompt.
    reach: how many of them each group sees."""

    def __init__(self, pages: PageAllocator, reach: Sequence[int]):
        self._pages = pages
        self._reach = reach

    def shortened(self, match: PrefixMatch, hashes: BlockHashes) -> PrefixMatch:
        """Returns as much of a match as ends where each group sees published blocks alone."""
        blocks = len(match.pages)
        pages = match.pages.tolist()
        # by group: the blocks from here on are published, of those before number `blocks`
        since = [blocks] * len(self._reach)
        while True:
            before = blocks
            for place, reach in enumerate(self._reach):
                block = min(since[place], blocks)
                while block > max(0, blocks - reach):
                    block -= 1
                    if self._page(hashes[block], place + 1, pages[block]) is None:
                        blocks = block
                since[place] = block
            if blocks == before:
                break
        if blocks == len(pages):
            return match
        return match._replace(pages=match.pages[:blocks], generation=match.generation[:blocks])

    def of(self, pages: np.ndarray, hashes: BlockHashes | None) -> list[np.ndarray]:
        """Returns for each group the pages of the blocks that it sees behind these matched `pages`
        of a sequence, which are a match that was shortened."""
        if hashes is None:
            return []
        return [
            np.array(
                [self._page(hashes[b], group, pages[b]) for b in range(first, len(pages))], np.intp
            )
            for group, first in enumerate(self._firsts(len(pages)), 1)
        ]

    def complete(self, pages: Sequence[int], before_end: int) -> list[int]:
        """Returns those of the `pages` of one published block that are next to a page of every
        group that sees the block from the end of a match, `before_end` blocks behind its begin."""
        groups = [group for group, reach in enumerate(self._reach, 1) if before_end <= reach]
        return [page for page in pages if None not in self.of_block(page, groups)]

    def of_block(self, page: int, groups: Iterable[int]) -> list[int | None]:
        """Returns the pages of these groups beside the published `page` of a block."""
        key = self._pages.key_of[page]
        return [self._page(key, group, page) for group in groups]

    def fullest(self, pages: Sequence[int]) -> int:
        """Chooses of the pages of a block the one that is next to those of most groups, the oldest
        of these."""
        groups = range(1, len(self._reach) + 1)
        lacking = lambda page: self.of_block(page, groups).count(None)
        return pages[0] if len(pages) == 1 else min(pages, key=lacking)

    def beside(self, pages: Sequence[int]) -> list[int]:
        """Returns the pages that the groups have of the blocks published on these pages."""
        keys = [key for key in map(self._pages.key_of.get, pages) if key is not None]
        return [
            page
            for group in range(1, len(self._reach) + 1)
            for key in keys
            for page in self._pages.with_key.get(group_key(key, group), ())
        ]

    def keys(self, blocks: int, hashes: BlockHashes | Sequence[bytes]) -> list[bytes]:
        """Returns the keys of the pages through which groups see behind the first `blocks`."""
        return [
            group_key(hashes[block], group)
            for group, first in enumerate(self._firsts(blocks), 1)
            for block in range(first, blocks)
        ]

    def _firsts(self, blocks: int) -> list[int]:
        """Returns for each group the first block that it sees of those before number `blocks`."""
        return [max(0, blocks - reach) for reach in self._reach]

    def _page(self, key: bytes, group: int, beside: int) -> int | None:
        """Returns the group's page of a block, on the lane of the page `beside`."""
        return self._pages.on_lane(group_key(key, group), beside // self._pages.per_lane)
