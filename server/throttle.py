"""Refuses calls before they are read while the replica refuses most of what is read.

Parsing a call, tokenizing its prompt and having the replica decide cost far more than a refusal. At
ten times the load that can be served they are what runs out first: calls then wait unread, where no
prediction sees them. So a part of the calls is refused unread, and only about `PER_ACCEPTED` times
as many as are accepted get to the replica, which chooses among them. This is the adaptive
throttling of "Handling Overload" (Site Reliability Engineering, O'Reilly 2016, chapter 21), on the
side of the server.
"""

from __future__ import annotations

import math

from jaxserve.api.errors import RequestError

PER_ACCEPTED = 2.0  # calls that are let through for each that the replica accepts
SPARE = 16.0  # further calls that are let through: a few refusals are no overload
MEMORY_SECONDS = 2.0  # in which what was counted falls to 1/e
OVERLOADED = "overloaded"  # the reason of refusals


class Throttle:
    """Counts what became of the calls of one key, and refuses a part of the next ones. Counts decay
    over MEMORY_SECONDS. Times are seconds of a steady clock; belongs to the event loop."""

    def __init__(self) -> None:
        self._accepted = 0.0
        self._refused = 0.0  # by the replica, and unread
        self._owed = 0.0  # refusals that the share asked for and that were not made yet
        self._retry_after = 1.0  # seconds, as the replica said last
        self._counted_at = -math.inf

    def check(self, now: float) -> None:
        """Checks a call that has come and is not read yet. Errors: RequestError,
        RESOURCE_EXHAUSTED with `retry_after`, if it is refused."""
        self._decay(now)
        share = self._share
        if not share:
            self._owed = 0.0
            return
        self._owed += share
        if self._owed < 1:
            return
        self._owed -= 1
        self._refused += 1
        raise RequestError(
            "",
            "more requests come than can be served in time; try again in "
            f"{self._retry_after:.3g} s",
            "RESOURCE_EXHAUSTED",
            self._retry_after,
            OVERLOADED,
        )

    @property
    def _share(self) -> float:
        """The share of calls to refuse unread, 0 to 1."""
        total = self._accepted + self._refused
        return max(0.0, (total - PER_ACCEPTED * self._accepted - SPARE) / (total + 1))

    def accepted(self, now: float) -> None:
        """Counts a request that the replica accepted."""
        self._decay(now)
        self._accepted += 1

    def refused(self, error: RequestError, now: float) -> None:
        """Counts a request that the replica refused, if it was for want of room or time."""
        if error.status != "RESOURCE_EXHAUSTED":
            return
        self._decay(now)
        self._refused += 1
        self._retry_after = error.retry_seconds

    def _decay(self, now: float) -> None:
        factor = math.exp(min(0.0, self._counted_at - now) / MEMORY_SECONDS)
        self._accepted *= factor
        self._refused *= factor
        self._counted_at = now
