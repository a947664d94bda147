"""How events get from the engine's thread to a caller who may read slowly.

The engine's thread puts the events of a step into the `Mailbox`, which wakes the event loop at most
once for all that may wait. On the loop a `Stream` makes outputs of them, text included. What the
caller has not taken yet is merged, so that a slow reader, or a busy server, gets fewer and larger
ones, never a long queue of them.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from collections.abc import Callable, Sequence

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Accepted, Event, Finished, Progress, Token
from jaxserve.api.request import Request
from jaxserve.server.auth.access import Caller
from jaxserve.text.output import Delta, Output, OutputProcessor, merged

SHARE = 0.1  # of a core's time, what streams may take from the engine's thread
MOST_REST = 0.05  # seconds that events may wait for that
_ENDINGS = {
    "cancelled": ("CANCELLED", "the request was aborted"),
    "deadline": ("DEADLINE_EXCEEDED", "the deadline has passed"),
}


class Mailbox:
    """From the engine's thread to the event loop, in order.

    The two threads share one interpreter. Where the loop is busy it empties the mailbox less often,
    so that tokens go out in fewer messages and the engine's thread is not starved.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._streams: collections.deque[Stream] = collections.deque()  # those with news
        self._awake = False
        # when it was last, and the loop's CPU seconds then
        self._emptied = 0.0
        self._cpu = 0.0

    def put(self, stream: Stream, events: Sequence[Event]) -> None:
        """Called by the engine's thread; does not wait."""
        if stream.deliver(events):
            self._call(stream.wake)
            return
        if not stream.called:
            stream.called = True
            self._streams.append(stream)
        if not self._awake:
            self._awake = True
            self._call(self._wake)

    def _call(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody is left to tell
            self._loop.call_soon_threadsafe(callback)

    def _wake(self) -> None:
        now = self._loop.time()
        cpu = time.thread_time()
        rested = self._emptied + min((cpu - self._cpu) / SHARE, MOST_REST)
        if now < rested:
            self._loop.call_at(rested, self._wake)
            return
        self._emptied = now
        self._cpu = cpu
        self._awake = False  # first: what is put from now on wakes the loop again
        while self._streams:
            stream = self._streams.popleft()
            stream.called = False  # first, too
            stream.wake()


class Stream:
    """The answer to one request on its way out. All methods but `deliver` belong to the event loop.

    patience: seconds after which something is to be written, be there news or not. spoke: called
    with tokens, the first ones and others. ends: gets the ends of completions.
    """

    def __init__(
        self,
        request: Request,
        answer: OutputProcessor,
        caller: Caller,
        now: float,
        patience: float,
        spoke: Callable[[], None],
        ends: list[Finished],
    ):
        self.request = request
        self.caller = caller
        self.id = caller.own_id(request.id)
        self.called = False  # whether the mailbox is about to wake it
        self.failure: RequestError | None = None
        task = asyncio.current_task()
        # ends a write that waits for its reader
        self.cut: Callable[[], object] | None = None if task is None else task.cancel
        self.closed = self.refused = False
        self._answer = answer
        self._spoke = spoke
        self._ends = ends
        self._patience = patience
        self._inbox: collections.deque[Sequence[Event]] = collections.deque()
        self._silent = True  # whether the engine has given no token yet
        self._more = asyncio.Event()
        self._entered = False
        self._first: list[Output] = []
        self._progress: dict[int, Progress] = {}
        self._tokens: dict[int, list[Delta]] = {}
        self._last: list[Output] = []
        self._newest = Progress(0, 0, len(request.prompt))
        self._sent = now
        self._writing = False

    def deliver(self, events: Sequence[Event]) -> bool:
        """Takes the events of a step; returns whether they are not to wait for others: that the
        request was accepted, its first token, an end. Called by the engine's thread."""
        self._inbox.append(events)
        if self._silent and any(isinstance(event, Token) for event in events):
            self._silent = False
            return True
        return any(isinstance(event, (Accepted, Finished)) for event in events)

    @property
    def unfinished(self) -> bool:
        """Whether the engine still works for it."""
        return self._answer.unfinished > 0

    @property
    def ended(self) -> bool:
        return self.failure is not None or not self.unfinished

    def wake(self) -> None:
        """There is something in the inbox. It is read when somebody asks for it: many steps at
        once, where that takes a while."""
        self._entered = True  # the first that the engine says is that it has the request
        self._more.set()
        # the engine must hear of a stop string though the reader is slow
        if self._writing and self.request.sampling.stop:
            self._read()

    def _read(self) -> None:
        events: list[Event] = []
        while self._inbox:
            events += self._inbox.popleft()
        if not events or self.closed or self.ended:
            return
        outputs = self._answer.feed(events)
        for output in outputs:
            self._add(output)
        if any(isinstance(output, Delta) for output in outputs):
            self._spoke()

    async def entered(self) -> None:
        """Returns once the engine has the request. Errors: RequestError where it refuses it."""
        while not self._entered and self.failure is None:
            self._more.clear()
            await self._more.wait()
        if self.failure is not None:
            raise self.failure

    def refuse(self, error: RequestError) -> None:
        """The engine does not take the request."""
        self.refused = True
        self.fail(error)

    def fail(self, error: RequestError) -> None:
        """Ends the stream with an error after what is pending."""
        self.failure = self.failure or error
        self._more.set()

    async def take(self) -> list[Output]:
        """What came since the last call, merged; empty once all is said."""
        while not (outputs := self._pending()) and not self.ended:
            self._more.clear()
            await self._more.wait()
        return outputs

    def writing(self, now: float) -> None:
        self._writing = True
        self._sent = now

    def written(self, now: float) -> None:
        self._writing = False
        self._sent = now

    def abort_stalled(self, now: float, timeout: float) -> None:
        """Ends a stream whose caller has left a message unread for so long."""
        if self._writing and self.failure is None and now - self._sent > timeout:
            self.fail(RequestError("stream", f"left unread for {timeout} s", "RESOURCE_EXHAUSTED"))
            if self.cut is not None:
                self.cut()

    def overdue(self, now: float) -> bool:
        """Whether nothing was written for so long that something should be."""
        return not self._writing and now - self._sent > self._patience

    def heartbeat(self, now: float) -> None:
        """Repeats the newest progress where nothing was said for a while."""
        if self.overdue(now):
            self._add(self._newest)
            self._more.set()

    def _add(self, output: Output) -> None:
        match output:
            case Delta():
                self._tokens.setdefault(output.index, []).append(output)
            case Progress():
                self._progress[output.index] = self._newest = output
            case Accepted():
                self._first.append(output)
            case Finished():
                self._last.append(output)
                self._ends.append(output)
                if output.error is not None:
                    self.fail(output.error)
                elif output.reason in _ENDINGS:
                    status, text = _ENDINGS[output.reason]
                    self.fail(RequestError("", text, status))

    def _pending(self) -> list[Output]:
        self._read()
        progress = [p for p in self._progress.values() if p.index not in self._tokens]
        outputs: list[Output] = [
            *self._first,
            *progress,
            *map(merged, self._tokens.values()),
            *self._last,
        ]
        for kind in (self._first, self._progress, self._tokens, self._last):
            kind.clear()
        return outputs
