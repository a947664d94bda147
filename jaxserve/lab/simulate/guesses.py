"""Proposed tokens in a simulation: nothing is sampled there, so each is right with the same
probability."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxserve.api.batch import Batch
from jaxserve.drafts.drafter import DrafterKind
from jaxserve.drafts.lookup import Proposal
from jaxserve.settings.schema import ConfigError

WRONG = 1  # sampled in place of a proposed token; all others are 0


@dataclass(frozen=True)
class Guesses:
    """Proposals that never run out. acceptance: the probability that a proposed token is right if
    those before it are. seed: of the draws."""

    acceptance: float = 0.7
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks the probability. Errors: ConfigError."""
        if not 0 <= self.acceptance <= 1:
            raise ConfigError("draft_acceptance", f"must be from 0 to 1, not {self.acceptance}")

    @property
    def kind(self) -> DrafterKind:
        """The drafter of all sequences."""
        return DrafterKind("tokens of a simulation", 1, lambda prompt, output: _Zeros())

    def sampler(self) -> Sampler:
        """Returns what samples for one batch after another."""
        return Sampler(self)


class _Zeros:
    def propose(self, count: int) -> Proposal:
        return Proposal(np.zeros(count, np.int32), 1)


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
