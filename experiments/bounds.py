"""Numbers that a sweep only bounds: where a limit is not reached, the load at which it would be is
above the last one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

OPPOSITE = {">": "<", "<": ">"}


class Bound(float):
    """A number below ('>') or above ('<') the true one, which is not known. A quotient with one is
    a bound too, or NaN where two bounds leave it open."""

    sign: str

    def __new__(cls, value: float, sign: str) -> Bound:
        made = super().__new__(cls, value)
        made.sign = sign
        return made

    def __truediv__(self, other: float) -> float:
        if isinstance(other, Bound) and other.sign == self.sign:
            return math.nan
        return Bound(float(self) / float(other), self.sign) if other else math.nan

    def __rtruediv__(self, other: float) -> float:
        return Bound(float(other) / float(self), OPPOSITE[self.sign]) if self else math.nan


def sign_of(value: float) -> str:
    """Returns '>' or '<' for a bound, '' for a number that is known."""
    return value.sign if isinstance(value, Bound) else ""


def greatest(values: Iterable[float]) -> float:
    """Returns the greatest of numbers of which some may be bounds."""
    return _outermost(values, max, ">")


def least(values: Iterable[float]) -> float:
    """Returns the least of numbers of which some may be bounds."""
    return _outermost(values, min, "<")


def _outermost(
    values: Iterable[float], pick: Callable[[Iterable[float]], float], sign: str
) -> float:
    """Returns the picked number, a bound of this sign where one of them is."""
    found = list(values)
    if any(map(math.isnan, found)):
        return math.nan
    outermost = pick(found)
    open_ended = any(sign_of(value) == sign for value in found)
    return Bound(outermost, sign) if open_ended else outermost


def load_of_time(points: Sequence[tuple[float, float]], limit: float) -> float:
    """Returns the load at which a time, known in seconds at some loads, reaches the limit: between
    loads its logarithm is a straight line. A bound where the limit is not reached, or at the first
    load already."""
    before = None
    for load, seconds in points:
        if seconds > limit:
            if before is None:
                return Bound(load, "<")
            share = math.log(limit / before[1]) / math.log(seconds / before[1])
            return before[0] + share * (load - before[0])
        before = load, seconds
    return Bound(points[-1][0], ">")


def load_within(points: Sequence[tuple[float, float]], limit: float) -> float:
    """Returns the greatest of the loads up to which a time is at most `limit`: one that was tried.
    A bound where that is the last one, or where there is none; NaN where a time is not known."""
    if any(math.isnan(seconds) for _, seconds in points):
        return math.nan
    within = None
    for load, seconds in points:
        if seconds > limit:
            return Bound(load, "<") if within is None else within
        within = load
    return Bound(points[-1][0], ">")


def load_of_share(points: Sequence[tuple[float, float]], least_share: float) -> float:
    """Returns the load up to which a share, known at some loads, is at least `least_share`: a
    straight line between loads. A bound where it never falls below, or is below at the first; NaN
    where a share is not known."""
    if any(math.isnan(share) for _, share in points):
        return math.nan
    before = None
    for load, share in points:
        if share < least_share:
            if before is None:
                return Bound(load, "<")
            part = (before[1] - least_share) / (before[1] - share)
            return before[0] + part * (load - before[0])
        before = load, share
    return Bound(points[-1][0], ">")
