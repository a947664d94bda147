"""A request that a conductor has taken: which member has it, and what its caller has heard.

A request may be tried on one member after another. Each try has a number; what a member says of an
earlier try is dropped. Events reach the caller one call at a time and in their order, whichever
thread they come from.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Accepted, Event, Finished, Progress, Timing, Token, Usage
from jaxserve.api.request import Request
from jaxserve.cluster.member import Member
from jaxserve.cluster.prefill_job import PrefillJob
from jaxserve.replica.protocol import Sink


@dataclasses.dataclass(eq=False)
class RoutedRequest:
    """A request that has not ended. Its fields change under the dispatcher's lock only.

    member: that has it or is just being asked to take it; None while it has none. admitted: it is
    not refused any more for overload. placed: the member has taken it. attempt: number of the try.
    tried: members that have failed it or refused it; spared: those that have failed or refused its
    prefill job. job: by which another member computes its prompt. tokens: that the caller was sent,
    by completion. ending: with which all completions end, whatever the member says.
    """

    request: Request
    sink: Sink
    member: Member | None = None
    admitted: bool = False
    placed: bool = False
    attempt: int = 0
    tried: set[Member] = dataclasses.field(default_factory=set)
    spared: set[Member] = dataclasses.field(default_factory=set)
    job: PrefillJob | None = None
    tokens: dict[int, int] = dataclasses.field(default_factory=dict)
    unfinished: set[int] = dataclasses.field(default_factory=set)
    ending: tuple[str, RequestError | None] | None = None
    accepted: bool = False
    prefilled: dict[int, int] = dataclasses.field(default_factory=dict)
    first_token_at: float | None = None
    silent: bool = False  # its sink raised: it gets no more events
    outbox: deque[list[Event]] = dataclasses.field(default_factory=deque)
    delivering: bool = False

    def __post_init__(self) -> None:
        self.unfinished = set(self.request.completions)

    @property
    def sent_nothing(self) -> bool:
        """True if the caller has neither a token nor an end of any completion, so that another
        member can begin again."""
        return not self.tokens and len(self.unfinished) == len(self.request.completions)

    def take_back(self, member: Member) -> None:
        """Notes that its member did not take it, or has failed it."""
        self.tried.add(member)
        self.attempt += 1
        self.member = None
        self.placed = False

    def take(self, events: Sequence[Event], now: float) -> list[Event]:
        """Returns those of a member's events that the caller has not had from an earlier try: no
        second Accepted, and no progress that was reported before."""
        heard = []
        for event in events:
            if isinstance(event, Finished):
                if event.index not in self.unfinished:
                    continue
                self.unfinished.discard(event.index)
                event = self._ended(event)
            elif isinstance(event, Token):
                self.tokens[event.index] = self.tokens.get(event.index, 0) + 1
                if self.first_token_at is None:
                    self.first_token_at = now
            elif isinstance(event, Accepted):
                if self.accepted:
                    continue
                self.accepted = True
            elif isinstance(event, Progress):
                if event.prefilled < self.prefilled.get(event.index, 0):
                    continue
                self.prefilled[event.index] = event.prefilled
            heard.append(event)
        return heard

    def _ended(self, event: Finished) -> Finished:
        if self.ending is None:
            return event
        reason, error = self.ending
        return dataclasses.replace(event, reason=reason, error=error)

    def end(self, reason: str, error: RequestError | None, now: float) -> list[Event]:
        """Ends of all completions that have none, where no member tells of them."""
        total = max(now - self.request.arrival, 0.0)
        first = total if self.first_token_at is None else self.first_token_at - self.request.arrival
        first = min(max(first, 0.0), total)
        ends: list[Event] = [
            Finished(
                index,
                reason,
                Usage(len(self.request.prompt), 0, self.tokens.get(index, 0)),
                Timing(first, first, total),
                error=error,
            )
            for index in sorted(self.unfinished)
        ]
        self.unfinished.clear()
        return ends
