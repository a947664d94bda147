"""Looks up which pages hold the blocks that a sequence begins with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from jaxserve.cache.hashes import BlockHashes
from jaxserve.cache.pages import PageAllocator


class PrefixMatch(NamedTuple):
    """Pages [n] that hold the first n blocks of a sequence, and their `generation` [n] when they
    were found: as long as a page's is the same, it still holds its block."""

    pages: np.ndarray
    generation: np.ndarray


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
