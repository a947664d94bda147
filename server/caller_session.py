"""A conductor's session with a replica, as the replica's side keeps it: calls, and reports that
the conductor has not received yet.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import grpc
from prometheus_client import generate_latest

from jaxserve.api.errors import RequestError, internal_error
from jaxserve.api.events import Event, Finished
from jaxserve.api.request import Request, another_id
from jaxserve.cache.block_events import Medium, StoredBlocks
from jaxserve.replica.protocol import Replica
from jaxserve.server import replica_pb2 as pb
from jaxserve.server.grpc.proto import guided_of
from jaxserve.server.kv_questions import kv_answer
from jaxserve.server.remote_adapters import adapter_answer
from jaxserve.server.remote_weights import weights_answer
from jaxserve.server.replica_messages import (
    error_message,
    events_message,
    load_message,
    request_of,
    stored_message,
)
from jaxserve.text.structured_output import Guide, Guides

log = logging.getLogger(__name__)
MAX_UNSENT = 1 << 20  # events and changed blocks that wait for the conductor to read

# number of a request, and what its sink heard; or what has changed in the cache
Heard = tuple[int, Sequence[Event]] | pb.BlockChange


@dataclasses.dataclass
class Served:
    """State that the sessions of a service share. threads: for what may wait for a step. draining:
    requests are refused."""

    replica: Replica
    guides: Guides | None
    threads: concurrent.futures.Executor
    draining: bool = False


class HeardStep(NamedTuple):
    """Events of a step, as its sinks heard them. version: of the weights that computed it."""

    version: str
    heard: Sequence[Heard]

    def report(self) -> pb.Report:
        """Returns it as a report."""
        step = pb.Step(weight_version=self.version)
        for one in self.heard:
            if isinstance(one, pb.BlockChange):
                step.blocks.append(one)
            else:
                step.requests.append(events_message(*one))
        return pb.Report(step=step)


class CallerSession:
    """One session; see the module.

    `_numbers`: ids of its live requests, by number. `_compiling`: those whose guides are compiled,
    with the commands about each that came meanwhile; they wait, and other commands do not. It
    listens to the cache as well.
    """

    def __init__(
        self, served: Served, commands: Iterator[pb.Command], context: grpc.ServicerContext
    ):
        self._served = served
        self._replica = served.replica
        self._commands = commands
        self._context = context
        self._numbers: dict[int, str] = {}
        self._compiling: dict[int, list[Callable[[], None]]] = {}
        self._compiling_lock = threading.Lock()
        self._heard_at = time.monotonic()
        self._news = threading.Condition()
        self._heard: list[Heard] = []  # what sinks heard in this step
        self._version = ""  # of the weights that computed it
        self._unsent: list[pb.Report | HeardStep] = []
        self._unsent_count = 0
        self._flushing = False
        self._ended = False
        self.cause = ""  # why it has ended

    def __len__(self) -> int:
        return len(self._numbers) + len(self._compiling)

    def start(self) -> None:
        """Begins to do what the conductor says, and to tell what is cached."""
        self._replica.post(functools.partial(self._replica.block_events.subscribe, self))
        threading.Thread(target=self._obey, name="session-commands", daemon=True).start()

    # --- what goes out

    def reports(self) -> Iterator[pb.Report]:
        """Everything that there is to say, in its order, until the session ends."""
        while True:
            with self._news:
                self._news.wait_for(lambda: self._unsent or self._ended)
                if self._ended:
                    return
                unsent = self._unsent
                self._unsent = []
                self._unsent_count = 0
            for one in unsent:
                yield one.report() if isinstance(one, HeardStep) else one

    def say(self, report: pb.Report) -> None:
        """Sends a report after all that was said before."""
        with self._news:
            self._unsent.append(report)
            self._news.notify()

    def _hear(self, heard: Heard) -> None:
        """Keeps reports made on the replica's thread, or on that of a call, until the step ends."""
        with self._news:
            self._heard.append(heard)
            first = not self._flushing
            self._flushing = True
            if first:
                self._version = self._replica.weights.version
        if first:  # once all sinks have heard of the step
            self._replica.post(self._flush)

    def _flush(self) -> None:
        """Sends what the sinks have heard."""
        with self._news:
            self._flushing = False
            if not self._heard:
                return
            self._unsent.append(HeardStep(self._version, self._heard))
            self._unsent_count += len(self._heard)
            self._heard = []
            too_many = self._unsent_count > MAX_UNSENT
            self._news.notify()
        if too_many:
            log.error("a conductor does not read what it asked for: its session ends")
            self.end("the conductor does not read what it asked for")

    def stored(self, blocks: StoredBlocks) -> None:
        change = pb.BlockChange(medium=blocks.medium.value, stored=stored_message(blocks))
        self._hear(change)

    def removed(self, keys: Sequence[bytes], medium: Medium) -> None:
        self._hear(pb.BlockChange(medium=medium.value, removed=pb.BlockKeys(keys=keys)))

    def cleared(self, medium: Medium) -> None:
        self._hear(pb.BlockChange(medium=medium.value, cleared=True))

    # --- what comes in

    def end_if_silent(self, seconds: float) -> None:
        """Ends a session whose other side is silent. To be called periodically: a session that has
        ended before, and still waits for its other side to read, is cut off."""
        if self._ended:
            self._context.cancel()
        elif time.monotonic() - self._heard_at > seconds:
            log.warning("a conductor has said nothing for %g s: its session ends", seconds)
            self.end(f"the conductor has said nothing for {seconds:g} s")

    def end(self, cause: str) -> None:
        """Has `reports` return. The first cause is what the other side receives."""
        with self._news:
            self._ended = True
            self.cause = self.cause or cause
            self._news.notify()

    def close(self) -> None:
        """Cancels the requests that are left, and listens no more."""
        with self._news:
            self._ended = True
        self._replica.post(self._unsubscribe)
        for request_id in list(self._numbers.values()):
            self._replica.post(functools.partial(self._replica.cancel, request_id))

    def _unsubscribe(self) -> None:
        with contextlib.suppress(ValueError):
            self._replica.block_events.unsubscribe(self)

    def _obey(self) -> None:
        try:
            for command in self._commands:
                self._heard_at = time.monotonic()
                self._do(command)
        except grpc.RpcError:  # the other side is gone
            pass
        except Exception:
            log.exception("a conductor's command failed")
        self.end("the conductor's commands have ended")

    def _do(self, command: pb.Command) -> None:
        match command.WhichOneof("kind"):
            case "submit":
                self._submit(command.submit)
            case "cancel":
                cancel = command.cancel
                end = functools.partial(self._replica.cancel, reason=cancel.reason)
                self._end_request(cancel.call, cancel.number, end)
            case "stop":
                stop = command.stop
                end = functools.partial(self._replica.stop, index=stop.index)
                self._end_request(stop.call, stop.number, end)
            case "question":
                answer = functools.partial(self._answer, command.question)
                self._served.threads.submit(answer)
            case "rejected":
                self._replica.count_rejected(command.rejected.reason)

    def _submit(self, message: pb.Submit) -> None:
        self._attempt(message.number, functools.partial(self._begin, message))

    def _attempt(self, number: int, begin: Callable[[], None]) -> None:
        """Does the next part of a submission, and refuses the request if that fails."""
        try:
            begin()
        except RequestError as error:
            self._refuse(number, error)
        except Exception:
            log.exception("a request could not be submitted")
            self._refuse(number, internal_error())
        self._flush()

    def _begin(self, message: pb.Submit) -> None:
        """Submits a request, or has its guide compiled first. Errors: RequestError."""
        if self._served.draining:
            raise RequestError("", "the replica is draining", "UNAVAILABLE")
        number = message.number
        request = request_of(message, self._replica.info, self._replica.now())
        guided = guided_of(message.guided)
        if guided is None:
            self._submit_request(number, request)
            return
        if self._served.guides is None:
            raise RequestError("guided", "this model has no tokenizer")
        compiling = self._served.guides.submit(guided)
        with self._compiling_lock:
            self._compiling[number] = []
        compiling.add_done_callback(functools.partial(self._compiled, number, request))

    def _compiled(
        self, number: int, request: Request, compiling: concurrent.futures.Future[Guide]
    ) -> None:
        """Has a request go on whose guide is compiled; called on the thread that did it."""
        submit = functools.partial(self._submit_guided, number, request, compiling)
        with contextlib.suppress(RuntimeError):  # the service has stopped, with its sessions
            self._served.threads.submit(self._go_on, number, submit)

    def _go_on(self, number: int, submit: Callable[[], None]) -> None:
        self._attempt(number, submit)
        with self._compiling_lock:
            waiting = self._compiling.pop(number)
        for command in waiting:
            command()

    def _submit_guided(
        self, number: int, request: Request, compiled: concurrent.futures.Future[Guide]
    ) -> None:
        self._submit_request(number, dataclasses.replace(request, guide=compiled.result()))

    def _submit_request(self, number: int, request: Request) -> None:
        """Submits a request, by another id if another conductor's has that one. Errors:
        RequestError."""
        sink = functools.partial(self._sink, number, [len(request.completions)])
        try:
            self._numbers[number] = request.id
            self._replica.submit(request, sink)
        except RequestError as error:
            if error.status != "ALREADY_EXISTS":
                raise
            request = dataclasses.replace(request, id=another_id(request.id))
            self._numbers[number] = request.id
            self._replica.submit(request, sink)
        if self._ended:  # `close` may have come before it
            self._replica.post(functools.partial(self._replica.cancel, request.id))

    def _sink(self, number: int, remaining: list[int], events: Sequence[Event]) -> None:
        """Returns the sink of a request with that many completions left."""
        remaining[0] -= sum(isinstance(event, Finished) for event in events)
        if not remaining[0]:
            self._numbers.pop(number, None)
        self._hear((number, events))

    def _refuse(self, number: int, error: RequestError) -> None:
        self._numbers.pop(number, None)
        refusal = pb.RequestEvents(number=number, refused=error_message(error))
        self._flush()
        self.say(pb.Report(step=pb.Step(requests=[refusal])))

    def _end_request(self, call: int, number: int, end: Callable[[str], bool]) -> None:
        """Ends a request, once it was submitted."""
        command = functools.partial(self._end_submitted, call, number, end)
        with self._compiling_lock:
            waiting = self._compiling.get(number)
            if waiting is not None:
                waiting.append(command)
                return
        command()

    def _end_submitted(self, call: int, number: int, end: Callable[[str], bool]) -> None:
        answer = pb.Answer(call=call)
        try:
            request_id = self._numbers.get(number)
            answer.done = request_id is not None and end(request_id)
        except RequestError as error:
            answer.error.CopyFrom(error_message(error))
        self._flush()
        self.say(pb.Report(answer=answer))

    def _answer(self, question: pb.Question) -> None:
        answer = pb.Answer(call=question.call)
        replica = self._replica
        try:
            match question.WhichOneof("kind"):
                case "load":
                    answer.load.CopyFrom(load_message(replica.load()))
                case "view_since":
                    answer.view = json.dumps(replica.view(question.view_since))
                case "flush_cache":
                    answer.flushed_pages = replica.flush_cache()
                case "kv":
                    answer.kv = kv_answer(question.kv, replica)
                case "adapter":
                    answer.adapter = adapter_answer(question.adapter, replica)
                case "weights":
                    answer.weights = weights_answer(question.weights, replica)
                case "metrics":
                    answer.metrics = generate_latest(replica.metrics_registry)
                case _:
                    raise RequestError("question", "is of another version", "UNIMPLEMENTED")
        except RequestError as error:
            answer.error.CopyFrom(error_message(error))
        except Exception:
            log.exception("a conductor's question was not answered")
            answer.error.CopyFrom(error_message(internal_error()))
        self._flush()  # what the answer rests on comes before it
        self.say(pb.Report(answer=answer))
