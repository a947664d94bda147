"""The distance of served steps from what their profile says, over a long time."""

from __future__ import annotations

import math

OFF = 1.5  # factor: steps that are as far off on average are not as predicted
MEMORY = 200  # steps that the average covers
PATIENCE = 60.0  # seconds for which they must be off


class StepErrors:
    """Averages the distance of steps from their predictions, as a factor."""

    def __init__(self) -> None:
        self._count = 0
        self._mean = 0.0
        self._off_since: float | None = None  # clock second
        self._now = 0.0

    @property
    def factor(self) -> float:
        """The factor between steps and their predictions, on average: 1 where they agree."""
        return math.exp(self._mean)

    @property
    def off(self) -> bool:
        """Returns whether steps have been off for long."""
        return self._off_since is not None and self._now - self._off_since >= PATIENCE

    def seen(self, predicted: float, seconds: float, now: float) -> None:
        """Takes in a step that took `seconds`, where its profile says `predicted`."""
        if predicted <= 0 or seconds <= 0:
            return
        self._now = now
        self._count += 1
        distance = abs(math.log(seconds / predicted))
        self._mean += (distance - self._mean) / min(self._count, MEMORY)
        if self._count < MEMORY or self.factor < OFF:
            self._off_since = None
        elif self._off_since is None:
            self._off_since = now
