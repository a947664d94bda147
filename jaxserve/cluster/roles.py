"""Roles of replicas, and how many of them should prefill and how many decode (Mooncake, 5.1)."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

TRIMMED_SHARE = 0.1  # of the loads, left out at either end (Mooncake, 5.1)


class Role(enum.Enum):
    """The work of a replica. MIXED replicas prefill a request and decode it themselves."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"

    @property
    def prefills(self) -> bool:
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        return self is not Role.PREFILL


def trimmed_mean(values: Sequence[float]) -> float:
    """The mean without the top and bottom 10 %; 0 of no values."""
    cut = int(TRIMMED_SHARE * len(values))
    kept = sorted(values)[cut : len(values) - cut]
    return sum(kept) / max(len(kept), 1)


def imbalance(prefill: Sequence[float], decode: Sequence[float]) -> float:
    """(mean decode load + 1) / (mean prefill load + 1), with trimmed means: above 1 decoding is
    the busier side. Loads are 1 where an objective is just met."""
    return (trimmed_mean(decode) + 1) / (trimmed_mean(prefill) + 1)


@dataclass(frozen=True, slots=True)
class RatioLimits:
    """Bounds of a controller of roles.

    band: imbalances from 1 / band to band change nothing; above 1. margin: by how much of the
    imbalance a step is to fall short of turning it round, 0 to 1. step: most replicas that change
    at once. cooldown: seconds after a change in which nothing changes. least: replicas that each
    side keeps.
    """

    band: float = 1.25
    margin: float = 0.5
    step: int = 1
    cooldown: float = 30.0
    least: int = 1

    def __post_init__(self) -> None:
        if not self.band > 1:
            raise ValueError(f"band must be above 1, not {self.band}")
        if not 0 <= self.margin < 1:
            raise ValueError(f"margin must be at least 0 and below 1, not {self.margin}")
        if self.step < 1 or self.least < 1:
            raise ValueError("step and least must be at least 1")


class RatioController:
    """Says when replicas should change sides: few at a time, and only where the side that gives
    them up stays the less loaded one, so that a steady load is left alone after a few changes."""

    def __init__(self, limits: RatioLimits = RatioLimits()):
        self.limits = limits
        self._changed_at = -math.inf

    def change(self, prefill: Sequence[float], decode: Sequence[float], now: float) -> int:
        """Replicas that should go from prefilling to decoding at clock second `now`; below 0: the
        other way. prefill, decode: the load of each replica of that side."""
        if now - self._changed_at < self.limits.cooldown:
            return 0
        factor = imbalance(prefill, decode)
        if 1 / self.limits.band <= factor <= self.limits.band:
            return 0
        if factor > 1:
            change = self._movable(prefill, decode)
        else:
            change = -self._movable(decode, prefill)
        if change:
            self.changed(now)
        return change

    def changed(self, now: float) -> None:
        """Notes that replicas have changed sides at clock second `now`."""
        self._changed_at = now

    def _movable(self, givers: Sequence[float], takers: Sequence[float]) -> int:
        """The most givers that may change sides, with the work of each side spread over those that
        are left there."""
        giver_load = trimmed_mean(givers)
        taker_load = trimmed_mean(takers)
        limit = min(self.limits.step, len(givers) - self.limits.least)
        for count in range(limit, 0, -1):
            after_given = giver_load * len(givers) / (len(givers) - count)
            after_taken = taker_load * len(takers) / (len(takers) + count)
            # the sides must not change places, or the next change would undo this one
            if after_given + self.limits.margin * (taker_load - giver_load) <= after_taken:
                return count
            if after_given <= after_taken:
                return count
        return 0
