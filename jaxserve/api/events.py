"""Events with which the engine answers a request.

In this order: one `Accepted`, any number of `Progress`, one or more `Token` per completion, one
`Finished` per completion. Where the prompt is embedded there are no tokens, and `Finished` has the
embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxserve.api.attainment import all_in_time
from jaxserve.api.errors import RequestError


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural-log probabilities of one token and of the likeliest ones, likeliest first."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    prompt: int
    cached: int  # prompt tokens whose KV was reused
    completion: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds from a completion's arrival to its first chunk, first token and end; the end stands
    for what did not happen. longest_gap: most seconds between two reads, one after the other, that
    gave it tokens. slow_gaps: share of these gaps that were longer than its objective on them; 0
    without one."""

    queued: float
    first_token: float
    total: float
    longest_gap: float = 0.0
    slow_gaps: float = 0.0

    def tpot(self, completion: int) -> float:
        """Returns mean seconds per token after the first of `completion` tokens; 0 for one
        token."""
        if completion < 2:
            return 0.0
        return (self.total - self.first_token) / (completion - 1)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request waits or runs.

    queue_position: requests before it. predicted_ttft: seconds from arrival to the first token as
    the queue stands, or 0 where nothing was measured; later requests may be served before it.
    """

    queue_position: int
    predicted_ttft: float = 0.0


@dataclass(frozen=True, slots=True)
class Progress:
    index: int  # which of the n completions
    prefilled: int
    total: int
    ttft: float = 0.0  # predicted seconds from arrival to the first token, at the pace so far


@dataclass(slots=True)
class Token:  # not frozen: a step may make hundreds, each in a quarter of the time
    index: int
    id: int
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of one completion. reason: stop (end token, stop id or string, end of the guide),
    length, cancelled, deadline, or error (then `error` says which). stop: the stop string or id
    that ended it, once its text is known. embedding [D] f32: the hidden state of the prompt's last
    token after the model's final norm, where the request wants it; its reason is stop.
    weight_version: of the weights that it was computed with; "" where that is not known. in_time:
    whether it kept its objectives (`attainment.in_time`); None where that is not known, and of a
    prompt that was computed for another replica."""

    index: int
    reason: str
    usage: Usage
    timing: Timing
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
    error: RequestError | None = None
    stop: str | int | None = None
    embedding: np.ndarray | None = field(default=None, compare=False)
    weight_version: str = ""
    in_time: bool | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token, or to the embedding; None where none came."""
        if not self.usage.completion and self.embedding is None:
            return None
        return self.timing.first_token

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None for fewer than two tokens."""
        if self.usage.completion < 2:
            return None
        return self.timing.tpot(self.usage.completion)


Event = Accepted | Progress | Token | Finished


@dataclass(frozen=True, slots=True)
class Summary:
    """A whole request, all its completions together.

    queued, ttft, total: seconds from arrival to its first chunk, to its first token (None where
    none came), and to the end of its last completion. tpot: of its slowest completion; None where
    none has two tokens. cached: tokens of its prompt whose KV was reused. output: tokens of all
    completions. in_time: whether all were; None where nothing is to be said of some and none was
    late. longest_gap: of all of them.
    """

    queued: float
    ttft: float | None
    total: float
    tpot: float | None
    cached: int
    output: int
    in_time: bool | None
    longest_gap: float

    @classmethod
    def of(cls, ends: Sequence[Finished]) -> Summary:
        """Sums up the ends of its completions, at least one."""
        ttfts, tpots = [
            [value for value in values if value is not None]
            for values in zip(*((end.ttft, end.tpot) for end in ends))
        ]
        return cls(
            min(end.timing.queued for end in ends),
            min(ttfts, default=None),
            max(end.timing.total for end in ends),
            max(tpots, default=None),
            max(end.usage.cached for end in ends),
            sum(end.usage.completion for end in ends),
            all_in_time(end.in_time for end in ends),
            max(end.timing.longest_gap for end in ends),
        )

    @property
    def prefill(self) -> float:
        """Seconds from the first chunk to the first token, or to the end where none came."""
        if self.ttft is None:
            return self.total - self.queued
        return self.ttft - self.queued

    @property
    def decode(self) -> float:
        """Seconds from the first token to the end."""
        return self.total - self.queued - self.prefill
