"""Looks up which pages hold the blocks that a sequence begins with."""

from __future__ import annotations

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


def find_prefix(
    pages: PageAllocator, hashes: BlockHashes, blocks: int, last: PrefixMatch
) -> PrefixMatch:
    """Finds the pages of a sequence's first blocks, at most `blocks`. `last` is what was found
    before for the same sequence: only what changed since is looked up again."""
    unchanged = pages.generation[last.pages] == last.generation
    known = len(last.pages) if unchanged.all() else int(unchanged.argmin())
    found: list[int] = []
    while known + len(found) < blocks:
        page = pages.page_of.get(hashes[known + len(found)])
        if page is None:
            break
        found.append(page)
    known = min(known, blocks)
    if not found and known == len(last.pages):
        return last
    together = np.concatenate([last.pages[:known], np.array(found, np.intp)])
    return PrefixMatch(together, pages.generation[together])
