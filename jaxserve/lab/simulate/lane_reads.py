"""Counts the KV that each lane of a virtual replica reads."""

from __future__ import annotations

import numpy as np

from jaxserve.api.batch import Batch
from jaxserve.lab.simulate.replica import StagePassage


class LaneReads:
    """Listener to a replica's steps that counts the tokens of KV which each lane reads, in windows
    of `window` seconds: once in a step for each sequence in it.

    windows: by number, [lanes]. steps, spread: all steps, and those with a sequence on several
    lanes. moves: pages that steps moved or copied to another lane.
    """

    def __init__(self, lanes: int, block_size: int, window: float):
        self.lanes = lanes
        self.block_size = block_size
        self.window = window
        self.windows: dict[int, np.ndarray] = {}
        self.steps = self.spread = self.moves = 0

    def step_issued(self, batch: Batch, passage: StagePassage) -> None:
        reads = self.windows.setdefault(int(passage.start // self.window), np.zeros(self.lanes))
        reads += batch.blocks_per_lane.sum(0) * self.block_size
        self.steps += 1
        self.spread += bool((batch.group_size > 1).any())
        self.moves += len(batch.moves)

    def step_read(self, batch: Batch, now: float) -> None:
        """Nothing is to be noted."""

    def between(self, first: float, last: float) -> np.ndarray:
        """Returns the reads [n, lanes] of the windows from that of clock second `first` to that of
        `last`."""
        numbers = range(int(first // self.window), int(last // self.window) + 1)
        none = np.zeros(self.lanes)
        return np.array([self.windows.get(number, none) for number in numbers])


def variation(reads: np.ndarray) -> np.ndarray:
    """Returns the coefficient of variation over the lanes of each window [n, lanes] in which
    anything was read."""
    means = reads.mean(axis=1)
    return reads.std(axis=1)[means > 0] / means[means > 0]
