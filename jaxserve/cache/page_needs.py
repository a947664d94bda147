"""Counts the pages that sequences take, in all page groups."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxserve.checkpoint.page_groups import window_blocks
from jaxserve.lanes.layout import SequenceLayout


class PageNeeds:
    """Pages of blocks of `block_size` tokens, each with `per_block` pages: one in each page group.
    windows: of the groups behind the first, whose layers see all tokens (see
    `checkpoint.page_groups`)."""

    def __init__(self, block_size: int, windows: Sequence[int]):
        self.block_size = block_size
        self.windows = windows
        self.per_block = 1 + len(windows)
        # blocks that a token sees in each further group
        self.seen = [window_blocks(window, block_size) for window in windows]

    def of(self, tokens: Any) -> Any:
        """Returns the pages that a sequence of this many tokens, an int or an array, takes at least
        while it runs: those of all blocks, and in further groups those of as many as a token
        sees."""
        blocks = -(-tokens // self.block_size)
        if not self.seen:
            return blocks
        return blocks + sum(np.minimum(blocks, seen) for seen in self.seen)

    def left(self, layout: SequenceLayout, tokens: int) -> int:
        """Returns how many more pages a sequence takes for its first `tokens` tokens."""
        blocks = -(-tokens // self.block_size)
        held = len(layout.pages)
        left = blocks - held
        for seen, first in zip(self.seen, layout.first_seen):
            left += max(0, min(blocks, seen) - max(0, held - first))
        return left

    def passed(self, layout: SequenceLayout, start: int) -> list[int]:
        """Takes from a sequence the pages that none of its tokens from position `start` on sees;
        returns them."""
        passed: list[int] = []
        for group, window in enumerate(self.windows):
            first = max(0, start - window + 1) // self.block_size
            passed += layout.pass_before(group, min(first, len(layout.pages)))
        return passed

    def usable(self, pages: int, lanes: int) -> int:
        """Returns the pages that one sequence can have of `lanes` lanes with `pages` each: those of
        a block, in all page groups, are on one lane."""
        return lanes * (pages - len(self.windows))

    def longest(self, pages: int) -> int:
        """Returns the tokens of the longest sequence that takes no more than these pages."""
        taken = lambda blocks: self.of(blocks * self.block_size)
        return (bisect.bisect(range(pages + 1), pages, key=taken) - 1) * self.block_size
