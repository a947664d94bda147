"""The last refusal of a replica stands for other requests for a moment, of which a conductor need
not ask it."""

from __future__ import annotations

import dataclasses

from jaxserve.api.errors import RequestError
from jaxserve.api.request import Request

MOST_SECONDS = 0.5  # that a refusal may stand for others: work may end earlier than predicted
HELD_REASONS = ("ttft", "tpot")  # of refusals that say by when to come again


@dataclasses.dataclass(frozen=True, slots=True)
class RecentRefusal:
    """A refusal of a request whose prompt takes `prefill` seconds, as predicted. until: clock
    second from which the replica is asked again."""

    request: Request
    prefill: float
    error: RequestError
    until: float

    @classmethod
    def of(
        cls, request: Request, prefill: float, error: RequestError, now: float
    ) -> RecentRefusal | None:
        """Returns what is to be remembered of a refusal; None where it says nothing of others."""
        if error.reason not in HELD_REASONS or error.retry_after is None:
            return None
        return cls(request, prefill, error, now + min(error.retry_after, MOST_SECONDS))

    def covers(self, request: Request, prefill: float, now: float) -> bool:
        """Returns whether a request would be refused too: it has the same objectives, and no less
        to compute."""
        return (
            now < self.until
            and prefill >= self.prefill
            and request.slo == self.request.slo
            and request.priority == self.request.priority
            and request.continuation is None
        )

    def or_newer(self, newer: RecentRefusal, now: float) -> RecentRefusal:
        """Returns which of both to keep: this one while it stands for all that the newer does."""
        covered = self.covers(newer.request, newer.prefill, now)
        return self if covered else newer
