"""Learns how many tokens completions put out."""

from __future__ import annotations

import math

from jaxserve.scheduling.events import EventBus, Tokens

TOKEN_DECAY = 0.999  # weight that a decoded token leaves to those before it


class CompletionLengths:
    """The mean length of completions, the latest of which count most."""

    def __init__(self) -> None:
        # decayed numbers of tokens decoded and of completions that ended by them
        self._tokens = 0.0
        self._ended = 0.0

    def listen(self, bus: EventBus) -> None:
        """Learns from what the scheduler publishes on this bus."""
        bus.subscribe(Tokens, lambda event: self.learn(event.sampled, event.ended))

    @property
    def remaining(self) -> float:
        """Tokens that a completion may still be expected to put out, whenever one looks; infinite
        until one has ended."""
        if not self._ended:
            return math.inf
        return self._tokens / self._ended

    def learn(self, count: int, ended: int) -> None:
        """Learns from a batch that gave `count` tokens and ended `ended` completions."""
        kept = TOKEN_DECAY**count
        self._tokens = kept * self._tokens + count
        self._ended = kept * self._ended + ended
