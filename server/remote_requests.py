"""Requests that a replica on another process has, and answers of it that threads wait for."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Event, Finished, Timing, Token, Usage
from jaxserve.api.request import Request
from jaxserve.replica.protocol import Sink
from jaxserve.server import replica_pb2 as pb
from jaxserve.server.replica_messages import error_of, event_of

log = logging.getLogger(__name__)


class Pending:
    """An answer that a thread waits for. call: its number; 0 for the acceptance of a request, whose
    number is `request`."""

    def __init__(self, call: int, request: int | None = None):
        self.call = call
        self.request = request
        self.answer = pb.Answer()
        self.error: RequestError | None = None
        self.done = threading.Event()

    def set(self, answer: pb.Answer | None = None, error: RequestError | None = None) -> None:
        self.answer = answer or self.answer
        self.error = error
        self.done.set()


class Parts(NamedTuple):
    """A report in two: the part that a thread waits for, and the remainder."""

    awaited: pb.Report | None
    remainder: pb.Report | None


def parts_of(report: pb.Report, pending: Pending) -> Parts:
    """Splits off the part of a report that is about an answer or the request that it is about."""
    kind = report.WhichOneof("kind")
    if kind == "heartbeat" or (kind == "answer" and report.answer.call == pending.call):
        return Parts(report, None)
    if kind != "step":
        return Parts(None, report)
    awaited = [one for one in report.step.requests if one.number == pending.request]
    if not awaited:
        return Parts(None, report)
    others = [one for one in report.step.requests if one.number != pending.request]
    return Parts(
        pb.Report(step=pb.Step(requests=awaited)),
        pb.Report(step=pb.Step(requests=others, blocks=report.step.blocks)),
    )


@dataclasses.dataclass
class RemoteRequest:
    """A request that the replica has. tokens: received so far, by completion that has not ended.
    first_token: seconds since its arrival."""

    number: int
    request: Request
    sink: Sink
    accepted: Pending
    tokens: dict[int, int]
    first_token: float | None = None

    @classmethod
    def of(cls, number: int, request: Request, sink: Sink) -> RemoteRequest:
        tokens = {index: len(request.output(index)) for index in request.completions}
        return cls(number, request, sink, Pending(0, number), tokens)

    def count(self, events: Sequence[Event], now: float) -> None:
        """Counts the tokens and ends among events."""
        for event in events:
            if isinstance(event, Token) and event.index in self.tokens:
                self.tokens[event.index] += 1
                if self.first_token is None:
                    self.first_token = now - self.request.arrival
            elif isinstance(event, Finished):
                self.tokens.pop(event.index, None)

    def ends(self, error: RequestError, now: float) -> list[Event]:
        """Returns ends with an error for the completions that have not ended."""
        total = now - self.request.arrival
        first = total if self.first_token is None else self.first_token
        timing = Timing(queued=min(first, total), first_token=first, total=total)
        prompt = len(self.request.prompt)
        return [
            Finished(index, "error", Usage(prompt, 0, count), timing, error=error, in_time=False)
            for index, count in self.tokens.items()
        ]


class RemoteRequests:
    """Tables of live requests and of pending answers. lock: that of the session, under which
    callers add entries, so that none is added to a session that was lost. say: sends a command."""

    def __init__(self, lock: threading.RLock, say: Callable[[pb.Command], None]):
        self._lock = lock
        self._say = say
        self._by_id: dict[str, RemoteRequest] = {}
        self._by_number: dict[int, RemoteRequest] = {}
        self._pending: dict[int, Pending] = {}
        self._numbers = itertools.count(1)  # of requests and calls

    def next_number(self) -> int:
        return next(self._numbers)

    def with_id(self, request_id: str) -> RemoteRequest | None:
        return self._by_id.get(request_id)

    def add(self, live: RemoteRequest) -> None:
        """Adds a request. Errors: RequestError if its id is in use."""
        if live.request.id in self._by_id:
            raise RequestError("request_id", f"{live.request.id!r} is in use", "ALREADY_EXISTS")
        self._by_id[live.request.id] = live
        self._by_number[live.number] = live

    def forget(self, live: RemoteRequest) -> None:
        with self._lock:
            self._by_number.pop(live.number, None)
            if self._by_id.get(live.request.id) is live:
                del self._by_id[live.request.id]

    def expect(self, request: int | None = None) -> Pending:
        """Returns a new answer to wait for. request: the number of the request that it is about."""
        pending = Pending(self.next_number(), request)
        self._pending[pending.call] = pending
        return pending

    def take_pending(self, call: int) -> Pending | None:
        """Removes the answer of a call and returns it."""
        return self._pending.pop(call, None)

    def take(self, message: pb.RequestEvents) -> None:
        """Passes a request's events to its sink."""
        live = self._by_number.get(message.number)
        if live is None:  # it was given up
            return
        if message.HasField("refused"):
            self.forget(live)
            live.accepted.set(error=error_of(message.refused))
            return
        self._deliver(live, [event_of(event) for event in message.events])
        live.accepted.set()

    def end_all(self, error: RequestError) -> None:
        """Ends all requests and answers with an error."""
        with self._lock:
            requests = list(self._by_number.values())
            answers = list(self._pending.values())
            self._pending.clear()
        for pending in answers:
            pending.set(error=error)
        for live in requests:
            if live.accepted.done.is_set():
                self._deliver(live, live.ends(error, time.monotonic()))
            else:
                self.forget(live)
                live.accepted.set(error=error)

    def _deliver(self, live: RemoteRequest, events: list[Event]) -> None:
        """Calls a sink. One that raises is not called again, and its request is cancelled."""
        live.count(events, time.monotonic())
        if not live.tokens:
            self.forget(live)
        try:
            live.sink(events)
        except Exception:
            log.exception("the sink of request %r failed", live.request.id)
            live.sink = lambda events: None
            if live.tokens:
                self._say(cancel_command(0, live.number, "cancelled"))


def cancel_command(call: int, number: int, reason: str) -> pb.Command:
    return pb.Command(cancel=pb.Cancel(call=call, number=number, reason=reason))
