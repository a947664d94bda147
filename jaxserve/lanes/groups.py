"""Aligned groups of lanes, in which the lanes of a spread sequence meet.

The lanes of a replica divide into groups of equal size, as buddies do: with size 2 these are lanes
0 and 1, 2 and 3, and so on. The groups of one size lie within those of every larger size. A step's
program has one size; all its groups run side by side.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


@functools.cache
def group_sizes(lanes: int) -> tuple[int, ...]:
    """The sizes that groups of `lanes` lanes may have, ascending: 1, 2, 4 and so on as far as they
    divide `lanes`, and `lanes`."""
    powers = (2**power for power in range(lanes.bit_length()))
    return tuple(dict.fromkeys([*(size for size in powers if lanes % size == 0), lanes]))


def group_around(lane: int, size: int) -> range:
    """The lanes of the group of this size that has `lane`."""
    first = lane - lane % size
    return range(first, first + size)


def size_around(some: Iterable[int], lanes: int) -> int:
    """The least size with which one group has all of `some` lanes, of which there is one at least.
    lanes: how many there are."""
    members = list(some)
    low = min(members)
    high = max(members)
    return next(size for size in group_sizes(lanes) if low // size == high // size)


def size_of(home: int, held: Sequence[int]) -> int:
    """The least size with which one group has a sequence's home lane and all lanes that hold some
    of its blocks. held: blocks on each lane."""
    return size_around((home, *(lane for lane, blocks in enumerate(held) if blocks)), len(held))


def size_of_step(group_size: np.ndarray, moves: np.ndarray, lanes: int) -> int:
    """Returns the least size with which groups have all lanes that meet in a step. group_size [n]:
    of its chunks; moves [m, 4]: pages that it moves (lane, page, to lane, page). lanes: how many
    there are."""
    least = int(group_size.max(initial=1))
    lane, to_lane = moves[:, 0], moves[:, 2]
    sizes = (size for size in group_sizes(lanes) if size >= least)
    return next(size for size in sizes if (lane // size == to_lane // size).all())


def lanes_of(home: int, held: Sequence[int] | None) -> range:
    """The lanes that compute a sequence: those of the group of `size_of`; home alone, where `held`
    is None."""
    return range(home, home + 1) if held is None else group_around(home, size_of(home, held))


class ChunkPlace(NamedTuple):
    """The lanes of a chunk of a prompt.

    blocks: of its sequence on each lane; None where all are at home. dealt: the lanes over which
    its tokens are dealt, its last ones aside, which are computed at home; None: all of `group`.
    """

    home: int
    blocks: Sequence[int] | None = None
    dealt: range | None = None

    @property
    def is_local(self) -> bool:
        """Returns whether the home lane alone has the blocks, and computes all tokens."""
        return self.blocks is None and self.dealt is None

    @property
    def group(self) -> range:
        """The lanes that meet: those of the smallest group that has home and all blocks."""
        return lanes_of(self.home, self.blocks)

    @property
    def lanes(self) -> range:
        """The lanes that compute tokens of the chunk."""
        return self.group if self.dealt is None else self.dealt
