"""Attainment: whether completions keep the latencies that they are promised."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

SLOW_GAPS = 0.01  # share of a completion's gaps that may be longer than its objective on gaps
ROUNDING = 1e-9  # seconds by which differences of clock seconds may be off
ENDS_BY_ITSELF = ("stop", "length")  # reasons of a completion that is whole


class Promise(NamedTuple):
    """Latencies that a completion is promised, in seconds.

    ttft: from its arrival to its first token. tpot: per output token after the first, on the mean.
    tbt: between two reads, one after the other, that gave it tokens, in all but SLOW_GAPS of these
    gaps; None: no such objective.
    """

    ttft: float
    tpot: float
    tbt: float | None = None

    def kept(self, ttft: float, tpot: float, slow_gaps: float = 0.0) -> bool:
        """Returns whether these latencies are within the promise. slow_gaps: share of the gaps that
        were longer than `tbt`."""
        if ttft > self.ttft + ROUNDING or tpot > self.tpot + ROUNDING:
            return False
        return self.tbt is None or slow_gaps <= SLOW_GAPS


def in_time(reason: str, kept: bool) -> bool | None:
    """Returns whether a completion that ended by `reason` was in time.

    One that did not come to its end of itself was not. None: its caller gave it up before anything
    was late, so that there is nothing to say. kept: the promise, as far as it came.
    """
    if reason == "cancelled" and kept:
        return None
    return kept and reason in ENDS_BY_ITSELF


def all_in_time(verdicts: Iterable[bool | None]) -> bool | None:
    """Returns whether all of these were in time; None where nothing is to be said of some, and none
    was late."""
    said = set(verdicts)
    if False in said:
        return False
    return None if None in said else True
