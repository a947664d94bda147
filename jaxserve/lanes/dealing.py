"""The lanes on which prompts of some length lie, for predictions before their blocks have pages."""

from __future__ import annotations

import bisect
import functools
import math

import numpy as np

from jaxserve.lanes.groups import group_sizes
from jaxserve.lanes.placement import UNLIMITED, Placement

DRAWS = 500  # of segments on lanes, for the share of the fullest one: to 1 %
STEPS = 8  # numbers of segments that are kept apart, from one power of two to the next


class PromptLanes:
    """Lanes of prompts by their tokens, as a placement has them.

    block: tokens of a page. pages: of a lane. reach: tokens of a sequence that a lane holds before
    the next one joins. deals: True if lanes share long prompts from their first tokens on.
    ends_at_home: True if a prompt's last block is on the lane that samples the token after it.
    """

    def __init__(self, placement: Placement, block: int, pages: int = UNLIMITED):
        self.deals = placement.deals
        self.ends_at_home = not placement.scatters
        self.reach = min(placement.limit, pages) * block
        self._placement = placement
        self._block = block
        self._sizes = np.array(group_sizes(placement.lanes))
        # least blocks of a sequence for which groups of each size but the first meet
        blocks = range(UNLIMITED)
        self._least = [
            bisect.bisect_left(blocks, size, key=self._meeting) for size in self._sizes[1:].tolist()
        ]

    def dealt_over(self, tokens: float) -> int:
        """Returns the number of lanes that share a prompt from its first token on; 1 where one
        holds it, or lanes join one by one."""
        return len(self._placement.dealt_over(0, math.ceil(tokens / self._block))) or 1

    def meeting(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the number of lanes that meet for each of some sequences of `tokens` [n]
        tokens."""
        blocks = np.ceil(tokens / self._block)
        return self._sizes[np.searchsorted(self._least, blocks, side="right")]

    def _meeting(self, blocks: int) -> int:
        tokens = blocks * self._block
        dealt = self.dealt_over(tokens)
        if dealt > 1 or tokens <= self.reach:
            return dealt
        sizes = self._sizes.tolist()
        return next((size for size in sizes if size * self.reach >= tokens), sizes[-1])

    def shares(self, tokens: float, lanes: int) -> list[float]:
        """Returns the share of a sequence's tokens that each lane is expected to have, that of the
        fullest first, where it lies on up to `lanes` lanes."""
        if not self.deals:
            lanes = min(lanes, max(1, math.ceil(tokens / self.reach)))
        segments = self._placement.drawn(math.ceil(tokens / self._block))
        if not segments:
            return [1 / lanes] * lanes
        step = 2.0 ** max(0, math.floor(math.log2(segments / STEPS)))
        return [*drawn_shares(int(round(segments / step) * step), lanes)]


@functools.lru_cache(maxsize=4096)
def drawn_shares(segments: int, lanes: int) -> tuple[float, ...]:
    """Returns the share of `segments` segments that each lane is expected to have where each
    segment's lane is drawn, that of the fullest first."""
    draws = np.random.default_rng(0).multinomial(segments, [1 / lanes] * lanes, DRAWS)
    return tuple((np.sort(draws)[:, ::-1].mean(0) / segments).tolist())
