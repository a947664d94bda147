"""Predicts how long launches of an EAGLE-3 draft head take."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np

from jaxserve.engine.eagle_device import EagleDevice
from jaxserve.engine.eagle_programs import COLUMNS

MEMORY = 0.05  # weight of a launch's time among those before it
TIMED = 3  # launches of which the fastest counts


class EagleTimes:
    """Seconds of launches, as measured, and corrected while serving. first, each: by number of
    sequences, of the first token and of each further one; chunk: of rows that extend a place."""

    def __init__(self, first: Mapping[int, float], each: Mapping[int, float], chunk: float):
        self._first = first
        self._each = each
        self._chunk = chunk
        self._scale = 1.0

    @classmethod
    def measured(cls, device: EagleDevice) -> EagleTimes:
        """Measures the programs with the smallest reach; places are not changed."""
        programs = device.programs
        sizes = programs.sizes
        reach = programs.reaches[0]
        padding = lambda batch, width: np.zeros((batch, COLUMNS + width), np.int32)

        def proposed(batch: int, steps: int) -> float:
            ints = padding(batch, sizes.few)
            return _fastest(lambda: np.asarray(device.propose(ints, reach, steps, False)))

        def extended() -> None:
            device.extend(padding(1, sizes.chunk), reach)
            device.wait()

        first = {batch: proposed(batch, 1) for batch in programs.batches}
        last = {batch: proposed(batch, sizes.most) for batch in programs.batches}
        each = {
            batch: max(last[batch] - first[batch], 0.0) / max(sizes.most - 1, 1) for batch in last
        }
        return cls(first, each, _fastest(extended))

    def propose(self, sequences: int, tokens: int) -> float:
        """Predicts the seconds of a launch that proposes."""
        batch = next((size for size in self._first if size >= sequences), max(self._first))
        return self._scale * (self._first[batch] + (tokens - 1) * self._each[batch])

    @property
    def chunk(self) -> float:
        """Predicted seconds of a launch that extends a place."""
        return self._scale * self._chunk

    def seen(self, predicted: float, seconds: float) -> None:
        """Learns that a launch took `seconds`."""
        self._scale *= (seconds / predicted) ** MEMORY

    def fade(self) -> None:
        """Forgets a part of what was learnt: where launches are thought too long there are none, by
        which it could learn better."""
        self._scale **= 1 - MEMORY


def _fastest(launch: Callable[[], object]) -> float:
    """Times a launch, after one that does not count."""
    launch()
    seconds = []
    for _ in range(TIMED):
        began = time.perf_counter()
        launch()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
