"""Carries events from the replica's thread to callers that may read slowly.

The replica's thread puts each step's events into the `Mailbox`, which wakes the event loop at most
once for everything that is pending. On the loop a `Stream` turns events into outputs, text
included. Outputs that the caller has not taken yet are merged: a slow reader, or a busy server,
gets fewer and larger ones, never a long queue.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Accepted, Event, Finished, Progress, Token
from jaxserve.api.request import Request
from jaxserve.server.auth.access import Caller
from jaxserve.server.request_log import Outcome
from jaxserve.text.output import Delta, Output, OutputProcessor, merged

CPU_SHARE = 0.1  # of a core that streams may take from the replica's thread; see `Mailbox`
MAX_REST_SECONDS = 0.05  # that events may wait for that
_FAILURES = {  # by the reason of a completion's end: status and text
    "cancelled": ("CANCELLED", "the request was aborted"),
    "deadline": ("DEADLINE_EXCEEDED", "the deadline has passed"),
}


class Mailbox:
    """Streams with new events, on their way from the replica's thread to the event loop, in order.

    Both threads share one interpreter. The busier the loop is, the less often it is woken, so that
    tokens go out in fewer messages and the replica's thread is not starved.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._streams: collections.deque[Stream] = collections.deque()
        self._wake_scheduled = False
        self._last_wake = 0.0  # loop time
        self._last_cpu = 0.0  # CPU seconds of the loop's thread at `_last_wake`

    def put(self, stream: Stream, events: Sequence[Event]) -> None:
        """Delivers a step's events to a stream. Called by the replica's thread; does not block."""
        if stream.deliver(events):
            self._call_on_loop(stream.wake)
            return
        if not stream.in_mailbox:
            stream.in_mailbox = True
            self._streams.append(stream)
        if not self._wake_scheduled:
            self._wake_scheduled = True
            self._call_on_loop(self._wake)

    def _call_on_loop(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed, and its callers are gone
            self._loop.call_soon_threadsafe(callback)

    def _wake(self) -> None:
        """Wakes all streams in the mailbox, or rests before it does."""
        now = self._loop.time()
        cpu = time.thread_time()
        pause = min((cpu - self._last_cpu) / CPU_SHARE, MAX_REST_SECONDS)
        if now < self._last_wake + pause:
            self._loop.call_at(self._last_wake + pause, self._wake)
            return
        self._last_wake = now
        self._last_cpu = cpu
        # flags are cleared first: events that are put from here on schedule another wake
        self._wake_scheduled = False
        while self._streams:
            stream = self._streams.popleft()
            stream.in_mailbox = False
            stream.wake()


class Stream:
    """The outputs of one request. All methods but `deliver` belong to the event loop.

    processor: makes outputs of events. given_id: the request's, as its caller gave it, or ''. now:
    loop time. heartbeat_seconds: after which a silent stream repeats its progress. on_tokens:
    called whenever tokens came. outcome: records what comes. Made in the task that writes the
    outputs.

    Attributes: id, by which answers call the request. names: by which its caller may. failure: the
    error that ended the stream, if one did. refused: whether the replica did not accept the
    request. closed: set by the owner; later events are dropped. abort_write: cuts off a write that
    waits for its reader. kv_ticket: tells a router where the prompt's KV is, if it asked; set by
    the owner.
    """

    def __init__(
        self,
        request: Request,
        processor: OutputProcessor,
        caller: Caller,
        *,
        given_id: str,
        now: float,
        heartbeat_seconds: float,
        on_tokens: Callable[[], None],
        outcome: Outcome,
    ):
        self.request = request
        self.caller = caller
        self.id = caller.own_id(request.id)
        self.names = {self.id, given_id}
        self.in_mailbox = False  # written by the mailbox
        self.failure: RequestError | None = None
        self.refused = False
        self.closed = False
        self.kv_ticket: Mapping[str, object] | None = None
        task = asyncio.current_task()
        self.abort_write: Callable[[], object] | None = None if task is None else task.cancel
        self._processor = processor
        self._on_tokens = on_tokens
        self._outcome = outcome
        self._heartbeat_seconds = heartbeat_seconds
        self._inbox: collections.deque[Sequence[Event]] = collections.deque()
        self._before_first_token = True
        self._news = asyncio.Event()
        self._is_accepted = False
        # pending outputs, in the order in which they are taken; by index of the completion
        self._pending_accepted: list[Output] = []
        self._pending_progress: dict[int, Progress] = {}
        self._pending_tokens: dict[int, list[Delta]] = {}
        self._pending_finished: dict[int, Finished] = {}
        self._newest_progress = Progress(0, 0, len(request.prompt))
        self._last_write = now
        self._writing = False

    def deliver(self, events: Sequence[Event]) -> bool:
        """Takes a step's events. Called by the replica's thread.

        Returns whether the stream is to be woken at once: for acceptance, the first token, an end.
        """
        self._inbox.append(events)
        if self._before_first_token and any(isinstance(event, Token) for event in events):
            self._before_first_token = False
            return True
        return any(isinstance(event, (Accepted, Finished)) for event in events)

    @property
    def unfinished(self) -> bool:
        """True while the replica still works for it."""
        return self._processor.unfinished > 0

    @property
    def ended(self) -> bool:
        """True once no more outputs will come."""
        return self.failure is not None or not self.unfinished

    def wake(self) -> None:
        """Tells the reader that events came. They are processed when it takes them: many steps at
        once, if it is slow."""
        self._is_accepted = True  # by the first event of all
        self._news.set()
        # stop strings must end the request's work although its reader is slow
        if self._writing and self.request.sampling.stop:
            self._process_inbox()

    def _process_inbox(self) -> None:
        events: list[Event] = []
        while self._inbox:
            events += self._inbox.popleft()
        if not events or self.closed or self.ended:
            return
        outputs = self._processor.feed(events)
        for output in outputs:
            self._add(output)
        if tokens := sum(len(output.ids) for output in outputs if isinstance(output, Delta)):
            self._outcome.output_tokens += tokens
            self._on_tokens()

    async def accepted(self) -> None:
        """Returns once the replica has accepted the request. Errors: RequestError if it is
        refused."""
        while not self._is_accepted and self.failure is None:
            self._news.clear()
            await self._news.wait()
        if self.failure is not None:
            raise self.failure

    def refuse(self, error: RequestError) -> None:
        """Ends the stream because the replica did not accept the request."""
        self.refused = True
        self.fail(error)

    def fail(self, error: RequestError) -> None:
        """Ends the stream with an error, after the outputs that are pending."""
        self.failure = self.failure or error
        self._news.set()

    async def take(self) -> list[Output]:
        """Waits for outputs; returns all that came since the last call, merged. Empty at the
        end."""
        while not (outputs := self._take_pending()) and not self.ended:
            self._news.clear()
            await self._news.wait()
        return outputs

    def write_began(self, now: float) -> None:
        """Notes the start of a write to the caller."""
        self._writing = True
        self._last_write = now

    def write_ended(self, now: float) -> None:
        """Notes the end of a write to the caller."""
        self._writing = False
        self._last_write = now

    def abort_stalled(self, now: float, timeout: float) -> None:
        """Ends the stream if its caller has left a message unread for `timeout` seconds."""
        if self._writing and self.failure is None and now - self._last_write > timeout:
            self.fail(RequestError("stream", f"left unread for {timeout} s", "RESOURCE_EXHAUSTED"))
            if self.abort_write is not None:
                self.abort_write()

    def heartbeat_due(self, now: float) -> bool:
        """Returns whether it is time to write something to keep the connection alive."""
        return not self._writing and now - self._last_write > self._heartbeat_seconds

    def send_heartbeat(self, now: float) -> None:
        """Repeats the newest progress if a heartbeat is due."""
        if self.heartbeat_due(now):
            self._add(self._newest_progress)
            self._news.set()

    def _add(self, output: Output) -> None:
        match output:
            case Delta():
                self._pending_tokens.setdefault(output.index, []).append(output)
            case Progress():
                self._pending_progress[output.index] = output
                self._newest_progress = output
            case Accepted():
                self._pending_accepted.append(output)
            case Finished():
                self._pending_finished[output.index] = output
                self._outcome.finished.append(output)
                if output.error is not None:
                    self.fail(output.error)
                elif output.reason in _FAILURES:
                    status, text = _FAILURES[output.reason]
                    self.fail(RequestError("", text, status))

    def _take_pending(self) -> list[Output]:
        self._process_inbox()
        progress = [
            one for one in self._pending_progress.values() if one.index not in self._pending_tokens
        ]
        outputs: list[Output] = [*self._pending_accepted, *progress]
        for index, deltas in self._pending_tokens.items():
            outputs.append(merged(deltas))
            if index in self._pending_finished:  # an end follows the last tokens immediately
                outputs.append(self._pending_finished.pop(index))
        outputs += self._pending_finished.values()
        self._pending_accepted.clear()
        self._pending_progress.clear()
        self._pending_tokens.clear()
        self._pending_finished.clear()
        return outputs


def abortable_ids(
    caller: Caller, streams: Mapping[str, Stream], request_id: str | None
) -> list[str]:
    """Ids of the streams that a caller may abort: those that it names, or all of its own.

    Errors: RequestError, NOT_FOUND, the same for another's request and for one that does not exist.
    """
    own = {id: stream for id, stream in streams.items() if caller.is_same(stream.caller)}
    if request_id is None:
        return list(own)
    ids = [id for id, stream in own.items() if request_id in stream.names]
    if not ids:
        raise RequestError("request_id", f"{request_id[:100]!r} is not running", "NOT_FOUND")
    return ids
