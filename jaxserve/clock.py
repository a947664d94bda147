"""Clocks, the source of time. Only the two loops, live and simulated, hold a clock; everything else
gets `now` as an argument, in seconds."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since an arbitrary moment; never goes back."""


class WallClock:
    """Monotonic time: a step of the system's date changes nothing."""

    def now(self) -> float:
        return time.monotonic()


class VirtualClock:
    """A clock that stands still until `advance` moves it."""

    def __init__(self, start: float = 0.0):
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, to: float) -> None:
        """Moves to the moment `to`. Errors: ValueError where that is in the past."""
        if to < self._now:
            raise ValueError(f"time goes forward: now is {self._now}, asked for {to}")
        self._now = to
