"""State of writes under way: the slices of a ticket, and how it ends.

A write is over when all its slices were answered, or when it has failed and no connection has a
slice of it in hand: from then on its source is not read. The caller holds the sender's lock.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from jaxserve.transfer.frames import Request


@dataclass(eq=False)
class Write:
    """deadline: the moment at which it fails, `seconds` after it began. left: slices that were not
    answered. held: slices that connections have in hand. error: why it failed, '' so far."""

    deadline: float
    seconds: float
    left: int = 0
    held: int = 0
    error: str = ""
    over: threading.Event = field(default_factory=threading.Event)

    def take(self, now: float) -> bool:
        """A connection takes a slice in hand. False where the write has failed: it is dropped."""
        if now >= self.deadline:
            self.expire()
        if self.error:
            return False
        self.held += 1
        return True

    def answered(self, refusal: str) -> None:
        """The receiver has answered a slice. refusal: '' where its bytes were written."""
        self.held -= 1
        self.left -= 1
        self.error = self.error or refusal
        self._settle()

    def given_back(self, now: float, error: str) -> bool:
        """A connection has failed with a slice in hand. error: why it is not to be sent again.
        Returns whether it is."""
        self.held -= 1
        if now >= self.deadline:
            self.expire()
        self.error = self.error or error
        self._settle()
        return not self.error

    def expire(self) -> None:
        self.fail(f"seconds: it was not over after {self.seconds:g} s")

    def fail(self, error: str) -> None:
        self.error = self.error or error
        self._settle()

    def _settle(self) -> None:
        if not self.left or (self.error and not self.held):
            self.over.set()


@dataclass(eq=False)
class Slice:
    """Bytes that one request carries. tries: connections that have failed with it."""

    write: Write
    request: Request
    data: memoryview
    tries: int = 0
