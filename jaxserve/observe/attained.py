"""Counts how many requests and output tokens were in time, for one class or tenant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.api.attainment import all_in_time
from jaxserve.api.events import Finished


@dataclass(frozen=True, slots=True)
class Attained:
    """Requests that ended and the tokens that they had, and how many of both were in time. A
    request is in time where all its completions were; tokens are those of completions that
    were."""

    requests: int = 0
    requests_in_time: int = 0
    output_tokens: int = 0
    output_tokens_in_time: int = 0

    @classmethod
    def of(cls, ends: Sequence[Finished]) -> Attained:
        """Counts one request by the ends of all its completions. One that its caller gave up before
        anything was late counts as none."""
        verdict = all_in_time(end.in_time for end in ends)
        if verdict is None:
            return NOTHING
        return cls(
            1,
            int(verdict),
            sum(end.usage.completion for end in ends),
            sum(end.usage.completion for end in ends if end.in_time),
        )

    def __add__(self, other: Attained) -> Attained:
        return Attained(
            self.requests + other.requests,
            self.requests_in_time + other.requests_in_time,
            self.output_tokens + other.output_tokens,
            self.output_tokens_in_time + other.output_tokens_in_time,
        )


NOTHING = Attained()
# by the field: what the counters of a class and of a tenant count
ATTAINED = {
    "requests": "Requests that ended, but for those that were cancelled before anything was late",
    "requests_in_time": "Of these, those with TTFT and TPOT within their objectives",
    "output_tokens": "Tokens of these requests",
    "output_tokens_in_time": "Of these, those of completions within their objectives",
}
