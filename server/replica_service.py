"""Offers a replica to conductors on other processes: border A over gRPC, see replica.proto.

Each conductor holds a session, a stream in both directions. What it says is done in its order on a
thread of the session; what the replica tells the sinks of its requests goes back in one message per
step. A session whose other side has said nothing for a while, or does not read, is ended, and its
requests with it.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import grpc
from prometheus_client import generate_latest

from jaxserve.api.errors import RequestError, internal_error
from jaxserve.api.events import Event, Finished
from jaxserve.replica.protocol import Replica
from jaxserve.server import replica_pb2 as pb
from jaxserve.server import replica_pb2_grpc as rpc
from jaxserve.server.grpc.proto import guided_of
from jaxserve.server.replica_auth import CALLER, REPLICA, new_nonce, proof, proves
from jaxserve.server.replica_messages import (
    error_message,
    events_message,
    info_text,
    load_message,
    request_of,
)
from jaxserve.settings.schema import ConfigError
from jaxserve.text.structured_output import Guides

log = logging.getLogger(__name__)
MAX_SESSIONS = 16  # each takes two threads
HANDSHAKE_SECONDS = 5.0
BEAT_SECONDS = 0.25  # between heartbeats, and between looks at who is silent
SILENT_SECONDS = 4.0  # that the other side of a session may say nothing
MAX_UNSENT = 1 << 19  # events that wait for a session's other side to read
GUIDE_SECONDS = 10.0  # for the guide of a request to be compiled
QUESTION_THREADS = 4  # questions may wait for a step
STOP_SECONDS = 1.0

Heard = tuple[int, Sequence[Event]]  # number of a request, and what its sink heard


class ReplicaService(rpc.ReplicaServicer):
    """Serves one replica, which runs already, until `stop`.

    secret: that callers have to know. guides: compiles what requests ask for; None where the model
    has no tokenizer. max_message_bytes: of a caller's message, prompts included.
    """

    def __init__(
        self,
        replica: Replica,
        secret: bytes,
        guides: Guides | None = None,
        *,
        max_message_bytes: int = 256 << 20,
        silent_seconds: float = SILENT_SECONDS,
    ):
        self.replica = replica
        self.guides = guides
        self.max_message_bytes = max_message_bytes
        self.draining = False
        self._secret = secret
        self._silent_seconds = silent_seconds
        self._sessions: dict[int, Session] = {}
        self._session_numbers = itertools.count()
        self._load = pb.Load()
        self._load_asked = False
        self._ended = threading.Event()
        self.question_threads = concurrent.futures.ThreadPoolExecutor(QUESTION_THREADS, "question")
        options = [
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),
        ]
        self._server = grpc.server(
            concurrent.futures.ThreadPoolExecutor(MAX_SESSIONS, "session"),
            options=options,
            maximum_concurrent_rpcs=MAX_SESSIONS,
        )
        rpc.add_ReplicaServicer_to_server(self, self._server)
        self._beating = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self, address: str, credentials: grpc.ServerCredentials | None = None) -> int:
        """Listens on HOST:PORT; returns the port's number. Errors: ConfigError."""
        try:
            if credentials is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, credentials)
        except RuntimeError:
            port = 0
        if not port:
            raise ConfigError("replica_port", f"cannot listen on {address}: is it taken?")
        self._server.start()
        self._beating.start()
        return port

    @property
    def requests(self) -> int:
        """Requests of all sessions that have not ended."""
        return sum(len(session) for session in list(self._sessions.values()))

    def drain(self) -> None:
        """Refuses requests from now on, and tells the sessions."""
        self.draining = True

    def stop(self) -> None:
        """Ends all sessions and closes the port."""
        self._ended.set()
        self._server.stop(STOP_SECONDS).wait()
        if self._beating.is_alive():
            self._beating.join()
        self.question_threads.shutdown(wait=False, cancel_futures=True)

    def Session(
        self, commands: Iterator[pb.Command], context: grpc.ServicerContext
    ) -> Iterator[pb.Report]:
        """The RPC; gRPC calls it on a thread of the session's own."""
        late = threading.Timer(HANDSHAKE_SECONDS, context.cancel)
        late.daemon = True
        late.start()
        try:
            yield from self._handshake(commands, context)
        finally:
            late.cancel()
        number = next(self._session_numbers)
        session = Session(self, commands, context)
        self._sessions[number] = session
        log.info("a conductor at %s has begun a session", context.peer())
        try:
            session.start()
            yield self.heartbeat()
            yield from session.reports()
        finally:
            del self._sessions[number]
            session.close()
            log.info("the session of the conductor at %s has ended", context.peer())

    def _handshake(
        self, commands: Iterator[pb.Command], context: grpc.ServicerContext
    ) -> Iterator[pb.Report]:
        hello = next(commands, pb.Command()).hello
        nonce = new_nonce()
        yield pb.Report(challenge=pb.Challenge(nonce=nonce))
        given = next(commands, pb.Command()).proof.proof
        if not proves(given, self._secret, CALLER, nonce, hello.nonce):
            log.warning("refused a session of %s, which does not know the secret", context.peer())
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the replica has another secret")
        yield pb.Report(
            welcome=pb.Welcome(
                proof=proof(self._secret, REPLICA, nonce, hello.nonce),
                info=info_text(self.replica.info),
                max_message_bytes=self.max_message_bytes,
            )
        )

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            self._ask_load()
            beat = self.heartbeat()
            for session in list(self._sessions.values()):
                session.say(beat)
                session.end_if_silent(self._silent_seconds)
        for session in list(self._sessions.values()):
            session.end()

    def heartbeat(self) -> pb.Report:
        """What is known without waiting for a step."""
        return pb.Report(
            heartbeat=pb.Heartbeat(
                alive=self.replica.alive,
                available=self.replica.available and not self.draining,
                overdue=self.replica.overdue(),
                load=self._load,
            )
        )

    def _ask_load(self) -> None:
        """Has the replica's thread tell its load; once, until it has."""
        if not self._load_asked:
            self._load_asked = True
            self.replica.post(self._read_load)

    def _read_load(self) -> None:
        try:
            self._load = load_message(self.replica.load())
        except RequestError:  # it may not be known just now
            pass
        finally:
            self._load_asked = False


class Session:
    """What one conductor has asked of the replica, and what it has not been told yet.

    `_numbers`: ids of its live requests, by number.
    """

    def __init__(
        self,
        service: ReplicaService,
        commands: Iterator[pb.Command],
        context: grpc.ServicerContext,
    ):
        self._service = service
        self._replica = service.replica
        self._commands = commands
        self._context = context
        self._numbers: dict[int, str] = {}
        self._heard_at = time.monotonic()
        self._news = threading.Condition()
        self._heard: list[Heard] = []  # what sinks heard in this step
        self._unsent: list[pb.Report | list[Heard]] = []
        self._unsent_events = 0
        self._flushing = False
        self._ended = False

    def __len__(self) -> int:
        return len(self._numbers)

    def start(self) -> None:
        """Begins to do what the other side says."""
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
                self._unsent_events = 0
            for one in unsent:
                yield _step_report(one) if isinstance(one, list) else one

    def say(self, report: pb.Report) -> None:
        """Sends a report after all that was said before."""
        with self._news:
            self._unsent.append(report)
            self._news.notify()

    def _sink(self, number: int, events: Sequence[Event]) -> None:
        """Hears a request's events, on the replica's thread or on that of a call."""
        with self._news:
            self._heard.append((number, events))
            first = not self._flushing
            self._flushing = True
        if first:  # once all sinks have heard of the step
            self._replica.post(self._flush)

    def _flush(self) -> None:
        """Sends what the sinks have heard."""
        with self._news:
            self._flushing = False
            if not self._heard:
                return
            self._unsent.append(self._heard)
            self._unsent_events += sum(len(events) for _, events in self._heard)
            self._heard = []
            too_many = self._unsent_events > MAX_UNSENT
            self._news.notify()
        if too_many:
            log.error("a conductor does not read what it asked for: its session ends")
            self.end()

    # --- what comes in

    def end_if_silent(self, seconds: float) -> None:
        if time.monotonic() - self._heard_at > seconds:
            log.warning("a conductor has said nothing for %g s: its session ends", seconds)
            self.end()

    def end(self) -> None:
        """Has `reports` return, and the other side hear that the session has ended."""
        with self._news:
            self._ended = True
            self._news.notify()
        self._context.cancel()

    def close(self) -> None:
        """Cancels the requests that are left."""
        with self._news:
            self._ended = True
        for request_id in list(self._numbers.values()):
            self._replica.post(functools.partial(self._replica.cancel, request_id))

    def _obey(self) -> None:
        try:
            for command in self._commands:
                self._heard_at = time.monotonic()
                self._do(command)
        except grpc.RpcError:  # the other side is gone
            pass
        except Exception:
            log.exception("a conductor's command failed")
        self.end()

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
                self._service.question_threads.submit(answer)
            case "rejected":
                self._replica.count_rejected(command.rejected.reason)

    def _submit(self, message: pb.Submit) -> None:
        number = message.number
        try:
            if self._service.draining:
                raise RequestError("", "the replica is draining", "UNAVAILABLE")
            request = request_of(message, self._replica.info, self._replica.now())
            guided = guided_of(message.guided)
            if guided is not None:
                if self._service.guides is None:
                    raise RequestError("guided", "this model has no tokenizer")
                compiling = self._service.guides.submit(guided)
                request = dataclasses.replace(request, guide=compiling.result(GUIDE_SECONDS))
            self._numbers[number] = request.id
            left = [request.sampling.n]
            self._replica.submit(request, functools.partial(self._hear, number, left))
        except RequestError as error:
            self._refuse(number, error)
        except Exception:
            log.exception("a request could not be submitted")
            self._refuse(number, internal_error())
        self._flush()

    def _hear(self, number: int, left: list[int], events: Sequence[Event]) -> None:
        """The sink of a request with so many completions left."""
        left[0] -= sum(isinstance(event, Finished) for event in events)
        if not left[0]:
            self._numbers.pop(number, None)
        self._sink(number, events)

    def _refuse(self, number: int, error: RequestError) -> None:
        self._numbers.pop(number, None)
        refusal = pb.RequestEvents(number=number, refused=error_message(error))
        self._flush()
        self.say(pb.Report(step=pb.Step(requests=[refusal])))

    def _end_request(self, call: int, number: int, end: Callable[[str], bool]) -> None:
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
                case "metrics":
                    answer.metrics = generate_latest(replica.metrics_registry)
                case _:
                    raise RequestError("question", "is of another version", "UNIMPLEMENTED")
        except RequestError as error:
            answer.error.CopyFrom(error_message(error))
        except Exception:
            log.exception("a conductor's question was not answered")
            answer.error.CopyFrom(error_message(internal_error()))
        self.say(pb.Report(answer=answer))


def _step_report(heard: Sequence[Heard]) -> pb.Report:
    requests = [events_message(number, events) for number, events in heard]
    return pb.Report(step=pb.Step(requests=requests))
