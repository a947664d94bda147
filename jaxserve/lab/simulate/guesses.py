"""Proposed tokens in a simulation: nothing is sampled there, so each is right with the same
probability."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxserve.api.batch import Batch
from jaxserve.drafts.acceptance import rising
from jaxserve.drafts.drafter import Drafted, Offer, Source, Wanted
from jaxserve.settings.schema import ConfigError

WRONG = 1  # sampled in place of a proposed token; all others are 0


@dataclass(frozen=True)
class Guesses:
    """Proposals that never run out. acceptance: the probability that a proposed token is right if
    those before it are. seed: of the draws. seconds: that a draft model takes for a token of each
    sequence; 0: proposals are there at once."""

    acceptance: float = 0.7
    seed: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        """Checks the numbers. Errors: ConfigError."""
        if not 0 <= self.acceptance <= 1:
            raise ConfigError("draft_acceptance", f"must be from 0 to 1, not {self.acceptance}")
        if self.seconds < 0:
            raise ConfigError("draft_seconds", f"must be at least 0, not {self.seconds}")

    def drafter(self) -> Guesser:
        """Returns the drafter of all sequences."""
        return Guesser(self.seconds)

    def sampler(self) -> Sampler:
        """Returns what samples for one batch after another."""
        return Sampler(self)


class Guesser:
    """Drafter whose tokens are all 0; seconds: as of `Guesses`."""

    first_rates = rising(1)

    def __init__(self, seconds: float):
        self._seconds = seconds
        self.waits = seconds > 0

    def begin(self, sequence: Drafted) -> Source:
        """See `Drafter.begin`."""
        return self

    def offer(self, count: int) -> Offer:
        """Offers as many as are asked for."""
        return Offer(count, 1, None if self.waits else np.zeros(count, np.int32))

    def seconds(self, sequences: int, tokens: int) -> float:
        """Predicts what making takes: the tokens of a sequence come one after the other."""
        return self._seconds * tokens

    def make(self, wanted: list[Wanted], seconds: float) -> list[np.ndarray]:
        """Makes what is wanted."""
        return [np.zeros(one.size, np.int32) for one in wanted]


class Sampler:
    """Samples for batches: 0 for all rows, but for those before a proposed token that is wrong."""

    def __init__(self, guesses: Guesses):
        self._acceptance = guesses.acceptance
        self._random = np.random.default_rng(guesses.seed)

    def tokens(self, batch: Batch) -> np.ndarray:
        """Draws the sampled token of each row [n]."""
        out = np.zeros(len(batch.slot), np.int32)
        if not batch.drafts:
            return out
        wrong = self._random.random(len(batch.drafts)) >= self._acceptance
        out[batch.before_drafts[wrong]] = WRONG
        return out
