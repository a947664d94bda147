"""Finds the most read pages of a cache, or segments of a prefix tree (TokenLake, 4.3).

The O(N log N) most read of N lanes' segments are enough to level what lanes read by copies: what
is left over is spread by its hash as evenly as any draw.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable

import numpy as np

FEW_READERS = 2  # that a heavy hitter has at least


def enough_for(lanes: int) -> int:
    """Returns how many segments are to be looked at, so that copies level what lanes read."""
    return max(1, math.ceil(lanes * math.log2(lanes))) if lanes > 1 else 0


def most_read(readers: np.ndarray, most: int, least: int = FEW_READERS) -> np.ndarray:
    """Returns the indices of the `most` largest of `readers` [n], those of `least` and more, in
    descending order; of equal ones the first."""
    hot = np.flatnonzero(readers >= least)
    counts = readers[hot]
    if len(hot) > most:
        lowest = np.partition(counts, len(hot) - most)[len(hot) - most]
        above = np.flatnonzero(counts > lowest)
        equal = np.flatnonzero(counts == lowest)[: most - len(above)]
        hot = hot[np.sort(np.concatenate([above, equal]))]
        counts = readers[hot]
    return hot[np.argsort(-counts, kind="stable")]


def most_read_of_tree(
    roots: Iterable[int],
    children: Callable[[int], Iterable[int]],
    readers: Callable[[int], int],
    most: int,
    least: int = FEW_READERS,
) -> list[int]:
    """Returns the `most` most read nodes of a prefix tree, those with `least` readers and more,
    best first from its roots: exact, for no node has more readers than its parent. It visits these
    nodes and their children alone. Of equally read nodes on their way it takes the lowest number
    first."""
    heap = [(-readers(node), node) for node in roots]
    heapq.heapify(heap)
    best: list[int] = []
    while heap and len(best) < most:
        negative, node = heapq.heappop(heap)
        if -negative < least:
            break
        best.append(node)
        for child in children(node):
            heapq.heappush(heap, (-readers(child), child))
    return best
