"""Counts of what steps of a virtual replica did, by which a figure shows that what it is about
ran."""

from __future__ import annotations

from jaxserve.api.batch import Batch
from jaxserve.lab.simulate.replica import StagePassage


class StepCounts:
    """Listener to a replica's steps. steps: all of them; spread: with a sequence on several lanes;
    shared: with chunks of several prompts. grown: sequences whose group of lanes grew."""

    def __init__(self) -> None:
        self.steps = self.spread = self.shared = self.grown = 0
        self._groups: dict[int, int] = {}  # sizes, by the number of the sequence

    def step_issued(self, batch: Batch, passage: StagePassage) -> None:
        """Counts a step."""
        first = batch.first_chunk
        self.steps += 1
        self.spread += max(batch.group_size.tolist(), default=1) > 1
        self.shared += len(batch.slot) - first > 1
        for sequence, size in zip(batch.seq[first:].tolist(), batch.group_size[first:].tolist()):
            self.grown += size > self._groups.get(sequence, size)
            self._groups[sequence] = size

    def step_read(self, batch: Batch, now: float) -> None:
        """Nothing is to be noted."""
