"""A request that a conductor has taken: which member has it, and what its caller was sent.

A request may be tried on one member after another; the next one goes on with the tokens of those
before. Each try has a number; what a member says of an earlier try is dropped. Events reach the
caller one call at a time and in their order, whichever thread they come from.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

from jaxserve.api.attainment import in_time
from jaxserve.api.errors import RequestError
from jaxserve.api.events import Accepted, Event, Finished, Progress, Timing, Token, Usage
from jaxserve.api.request import Continuation, Request
from jaxserve.cluster.member import Member
from jaxserve.cluster.prefill_job import PrefillJob
from jaxserve.replica.protocol import Sink


@dataclasses.dataclass(eq=False)
class RoutedRequest:
    """A request that has not ended. Its fields change under the dispatcher's lock only.

    member: that has it or is just being asked to take it; None while it has none. admitted: it is
    not refused any more for overload. placed: the member has taken it. attempt: number of the try.
    tried: members that have failed it or refused it; spared: those that have failed or refused its
    prefill job. job: by which another member computes its prompt. waits_for: the same until the job
    has begun: the request is on no member that would keep a place for it. reviewed: it was decided
    again who computes its prompt. losses: members that took it and failed it. tokens: ids that the
    caller was sent, by completion. decoding: this try gave a token. stops: completions that are to
    end. ending: with which all completions end, whatever the member says.
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
    waits_for: PrefillJob | None = None
    reviewed: bool = False
    losses: int = 0
    tokens: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    decoding: bool = False
    stops: set[int] = dataclasses.field(default_factory=set)
    unfinished: set[int] = dataclasses.field(default_factory=set)
    ending: tuple[str, RequestError | None] | None = None
    accepted: bool = False
    prefilled: dict[int, int] = dataclasses.field(default_factory=dict)
    first_token_at: float | None = None
    last_token_at: float | None = None
    weight_version: str = ""  # of the weights that computed its tokens, as its member said last
    silent: bool = False  # its sink raised: it gets no more events
    outbox: deque[list[Event]] = dataclasses.field(default_factory=deque)
    delivering: bool = False

    def __post_init__(self) -> None:
        request = self.request
        self.unfinished = set(request.completions)
        self.tokens = {index: list(request.output(index)) for index in request.completions}
        if request.continuation is not None:
            self.first_token_at = request.continuation.first_token
            self.last_token_at = request.continuation.last_token
            self.weight_version = request.continuation.weight_version

    @property
    def begun(self) -> bool:
        """True if there is a token or an end of any completion, so that another member cannot begin
        again."""
        ended = len(self.unfinished) < len(self.request.completions)
        return ended or any(self.tokens.values())

    def next_request(self) -> Request:
        """Returns the request as the next member gets it: one that has begun goes on. So does one
        that a member had taken, perhaps from its first token on: no full queue may refuse it."""
        if not self.begun and not self.losses:
            return self.request
        outputs = {index: tuple(self.tokens[index]) for index in sorted(self.unfinished)}
        going_on = Continuation(
            outputs, self.first_token_at, self.weight_version, self.last_token_at
        )
        return dataclasses.replace(self.request, continuation=going_on)

    def take_back(self, member: Member) -> None:
        """Notes that its member did not take it, or has failed it."""
        self.tried.add(member)
        self.attempt += 1
        self.member = None
        self.placed = self.decoding = False

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
                self.tokens[event.index].append(event.id)
                self.last_token_at = now
                if self.first_token_at is None:
                    self.first_token_at = now
                if not self.weight_version and self.member is not None:
                    self.weight_version = self.member.replica.weights.version
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
        kept = event.in_time is not False
        return dataclasses.replace(event, reason=reason, error=error, in_time=in_time(reason, kept))

    def end(self, reason: str, error: RequestError | None, now: float) -> list[Event]:
        """Ends of all completions that have none, where no member tells of them."""
        total = max(now - self.request.arrival, 0.0)
        first = total if self.first_token_at is None else self.first_token_at - self.request.arrival
        first = min(max(first, 0.0), total)
        ends: list[Event] = [
            Finished(
                index,
                reason,
                Usage(len(self.request.prompt), 0, len(self.tokens[index])),
                Timing(first, first, total),
                error=error,
                in_time=in_time(reason, True),
            )
            for index in sorted(self.unfinished)
        ]
        self.unfinished.clear()
        return ends
