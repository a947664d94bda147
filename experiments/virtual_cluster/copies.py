"""Counts how many caches hold each block, at equal intervals of a run (Mooncake, 7.3.3)."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Iterable


@dataclasses.dataclass(eq=False)
class Copies:
    """Copies of blocks over the caches of a cluster.

    total: the sum of a block's copies over all samples, by which blocks are ranked. settled: the
    same over the samples from clock second `settles` on, of which there were `samples`.
    """

    settles: float
    samples: int = 0
    total: Counter[Hashable] = dataclasses.field(default_factory=Counter)
    settled: Counter[Hashable] = dataclasses.field(default_factory=Counter)

    def add(self, now: float, caches: Iterable[Iterable[Hashable]]) -> None:
        """Takes a sample: the keys of the blocks in each cache."""
        keys = [key for cache in caches for key in cache]
        self.total.update(keys)
        if now >= self.settles:
            self.settled.update(keys)
            self.samples += 1

    def at_rank(self, rank: int) -> float:
        """Mean copies, once settled, of the block that is the `rank`-th by its total, counted from
        1; 0 where there are fewer blocks or no such sample."""
        ranked = self.total.most_common(rank)
        if len(ranked) < rank or not self.samples:
            return 0.0
        return self.settled[ranked[-1][0]] / self.samples
