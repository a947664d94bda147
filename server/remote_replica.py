"""A replica on another process, reached over gRPC: implements border A, see `replica_service`.

One thread, that of the replica, keeps a session and calls the sinks. While there is no session, the
replica is not alive: requests are refused, and those that ran have ended with UNAVAILABLE. It is
tried again until it answers, so a replica that starts anew, or was only stopped, comes back.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grpc
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Event, Finished, Timing, Token, Usage
from jaxserve.api.request import Request
from jaxserve.replica.info import ReplicaInfo
from jaxserve.replica.protocol import Sink
from jaxserve.scheduling import Load
from jaxserve.server import replica_pb2 as pb
from jaxserve.server.remote_blocks import RemoteBlocks
from jaxserve.server.replica_messages import error_of, event_of, info_of, load_of, submit_message
from jaxserve.server.replica_session import ReplicaSession

log = logging.getLogger(__name__)
SILENT_SECONDS = (
    4.0  # that a replica may say nothing; it says each quarter of a second that it lives
)
ALIVE_SECONDS = 0.5  # between words of ours that we live
ANSWER_SECONDS = 10.0  # for an answer, which may have to wait for a step
RETRY_SECONDS = (0.1, 2.0)  # between attempts to begin a session, at first and at most
SAME_MODEL = ("model", "vocab", "eos_ids", "max_model_len", "dtype", "kv_dtype", "block_size")


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


@dataclasses.dataclass
class RemoteRequest:
    """A request that the replica has. tokens: that came, by completion that has not ended.
    first_token: seconds since its arrival."""

    number: int
    request: Request
    sink: Sink
    accepted: Pending
    tokens: dict[int, int]
    first_token: float | None = None

    def hear(self, events: Sequence[Event], now: float) -> None:
        """Counts what comes."""
        for event in events:
            if isinstance(event, Token) and event.index in self.tokens:
                self.tokens[event.index] += 1
                if self.first_token is None:
                    self.first_token = now - self.request.arrival
            elif isinstance(event, Finished):
                self.tokens.pop(event.index, None)

    def ends(self, error: RequestError, now: float) -> list[Event]:
        """The ends of what has not ended, with an error."""
        total = now - self.request.arrival
        first = total if self.first_token is None else self.first_token
        timing = Timing(queued=min(first, total), first_token=first, total=total)
        prompt = len(self.request.prompt)
        return [
            Finished(index, "error", Usage(prompt, 0, count), timing, error=error)
            for index, count in self.tokens.items()
        ]


class RemoteReplica:
    """See the module. target: HOST:PORT of its `--replica_port`. credentials: of TLS; None: none.
    silent_seconds: after which a replica that says nothing is not alive."""

    def __init__(
        self,
        target: str,
        secret: bytes,
        credentials: grpc.ChannelCredentials | None = None,
        silent_seconds: float = SILENT_SECONDS,
    ):
        self.target = target
        self.fault = "it has not answered yet"  # why it is not alive
        self._secret = secret
        self._credentials = credentials
        self._silent_seconds = silent_seconds
        self._info: ReplicaInfo | None = None
        self._max_message_bytes = 0
        self._heartbeat = pb.Heartbeat()
        self._load: Load | None = None  # of the heartbeat; routers read it many times
        self._opening: ReplicaSession | None = None  # the newest
        self._session: ReplicaSession | None = None  # that has begun
        self._connected = threading.Event()
        self._lock = threading.RLock()  # of the tables below; never held while a sink is called
        self._live: dict[str, RemoteRequest] = {}
        self._by_number: dict[int, RemoteRequest] = {}
        self._pending: dict[int, Pending] = {}
        self._numbers = itertools.count(1)  # of requests and calls
        self._deferred: deque[pb.Report] = deque()  # came while a sink waited for an answer
        self._draining = False
        self._closing = threading.Event()
        self._ended = False
        self._posted: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.block_events = RemoteBlocks()
        self._metrics = CollectorRegistry(auto_describe=False)
        self._metrics.register(_RemoteMetrics(self))
        self._thread = threading.Thread(target=self._run, name=f"replica {target}", daemon=True)
        self._threads = [
            self._thread,
            threading.Thread(target=self._watch, name=f"watch {target}", daemon=True),
            threading.Thread(target=self._run_posted, name=f"posted {target}", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # --- what it is

    def wait_connected(self, seconds: float) -> bool:
        """Waits until the replica answers; whether it does."""
        return self._connected.wait(seconds)

    @property
    def info(self) -> ReplicaInfo:
        """What it is, as it said when it answered last. Errors: RequestError before."""
        if self._info is None:
            raise self._lost()
        return self._info

    @property
    def alive(self) -> bool:
        """Whether it answers; may become True again."""
        return self._connected.is_set() and self._heartbeat.alive

    @property
    def available(self) -> bool:
        return self.alive and self._heartbeat.available

    @property
    def recent_load(self) -> Load | None:
        """Its load as it told last, a second ago at most while it is well; None before. Does not
        wait."""
        return self._load

    @property
    def other_requests(self) -> int:
        """Requests that others than this session have there, as it told last. Does not wait."""
        return self._heartbeat.other_requests

    def start(self) -> None:
        """Does nothing: its own process has started it."""

    def now(self) -> float:
        """Seconds on this process's clock."""
        return time.monotonic()

    def overdue(self) -> float | None:
        return self._heartbeat.overdue if self._heartbeat.HasField("overdue") else None

    # --- requests

    def submit(self, request: Request, sink: Sink) -> None:
        """As of `Replica`; waits until the replica has taken the request or refused it. Errors: as
        there, and RequestError, UNAVAILABLE, where it does not answer."""
        number = next(self._numbers)
        message = submit_message(number, request, self.now())
        accepted = Pending(0, number)
        live = RemoteRequest(
            number, request, sink, accepted, dict.fromkeys(range(request.sampling.n), 0)
        )
        with self._lock:
            session = self._open_session()
            if self._draining:
                raise RequestError("", "the replica takes no more requests", "UNAVAILABLE")
            if request.id in self._live:
                raise RequestError("request_id", f"{request.id!r} is in use", "ALREADY_EXISTS")
            if message.ByteSize() >= self._max_message_bytes:
                raise RequestError(
                    "prompt",
                    f"has {len(request.prompt)} tokens; the replica takes messages of at most "
                    f"{self._max_message_bytes} bytes",
                )
            self._live[request.id] = live
            self._by_number[number] = live
            session.say(pb.Command(submit=message))
        try:
            self._wait(accepted)
        except RequestError:
            self._forget(live)
            session.say(_cancel(0, number, "cancelled"))  # it may be taken yet
            raise

    def cancel(self, request_id: str, reason: str = "cancelled") -> bool:
        return self._end_request(request_id, lambda call, number: _cancel(call, number, reason))

    def stop(self, request_id: str, index: int) -> bool:
        return self._end_request(
            request_id,
            lambda call, number: pb.Command(stop=pb.Stop(call=call, number=number, index=index)),
        )

    def _end_request(self, request_id: str, command: Callable[[int, int], pb.Command]) -> bool:
        with self._lock:
            live = self._live.get(request_id)
            if live is None or self._session is None:
                return False
            pending = self._ask(lambda call: command(call, live.number), live.number)
        try:
            return self._wait(pending).done
        except RequestError:
            if request_id not in self._live:  # it has ended, with the session
                return False
            raise

    def post(self, command: Callable[[], object]) -> None:
        """Runs a command on a thread of its own, after those that were posted before; at once where
        the replica was closed."""
        if self._ended:
            command()
            return
        self._posted.put(command)

    def _run_posted(self) -> None:
        for command in iter(self._posted.get, None):
            try:
                command()
            except Exception:
                log.exception("a posted command failed")

    # --- questions

    def load(self) -> Load:
        """How busy it is just now. Errors: RequestError where it does not answer."""
        return load_of(self._question(load=True).load)

    def view(self, since: int = 0) -> dict[str, Any]:
        """As of `Replica`. Errors: RequestError where it does not answer."""
        return json.loads(self._question(view_since=since).view)

    def flush_cache(self) -> int:
        """As of `Replica`. Errors: RequestError where it does not answer."""
        return self._question(flush_cache=True).flushed_pages

    def metrics_text(self) -> str:
        """Its metrics as Prometheus reads them. Errors: RequestError where it does not answer."""
        return self._question(metrics=True).metrics.decode()

    @property
    def metrics_registry(self) -> CollectorRegistry:
        """Its metrics; none while it does not answer."""
        return self._metrics

    def count_rejected(self, reason: str) -> None:
        session = self._session
        if session is not None:
            session.say(pb.Command(rejected=pb.Rejected(reason=reason)))

    def _question(self, **question: Any) -> pb.Answer:
        with self._lock:
            self._open_session()
            pending = self._ask(
                lambda call: pb.Command(question=pb.Question(call=call, **question))
            )
        return self._wait(pending)

    # --- the end

    def drain(self) -> None:
        """Takes no new requests from this caller; other callers of the same replica may have it
        go on."""
        self._draining = True

    def close(self) -> None:
        """Ends the session and the requests in it; the replica itself goes on."""
        if self._closing.is_set():
            return
        self._closing.set()
        session = self._session
        if session is not None:
            session.end()
        for thread in self._threads[:2]:
            if thread is not threading.current_thread():
                thread.join()
        self._ended = True
        self._posted.put(None)

    # --- answers

    def _lost(self) -> RequestError:
        return RequestError("", f"the replica {self.target} is lost: {self.fault}", "UNAVAILABLE")

    def _open_session(self) -> ReplicaSession:
        if self._session is None:
            raise self._lost()
        return self._session

    def _ask(self, command: Callable[[int], pb.Command], request: int | None = None) -> Pending:
        """Sends a command that is answered. The caller holds the lock and has a session."""
        pending = Pending(next(self._numbers), request)
        self._pending[pending.call] = pending
        self._open_session().say(command(pending.call))
        return pending

    def _wait(self, pending: Pending) -> pb.Answer:
        """Errors: RequestError, what the replica answered, or UNAVAILABLE."""
        if threading.current_thread() is self._thread:
            self._read_until(pending)
        answered = pending.done.wait(ANSWER_SECONDS)
        self._pending.pop(pending.call, None)
        if not answered:
            raise RequestError(
                "",
                f"the replica {self.target} did not answer for {ANSWER_SECONDS:g} s",
                "UNAVAILABLE",
            )
        if pending.error is not None:
            raise pending.error
        return pending.answer

    def _read_until(self, pending: Pending) -> None:
        """Reads for a sink that waits for an answer. What came for others waits until the sink is
        through: their sinks may not be called within this one."""
        backlog = self._deferred
        self._deferred = deque()
        deadline = time.monotonic() + ANSWER_SECONDS
        try:
            while not pending.done.is_set() and time.monotonic() < deadline:
                report = backlog.popleft() if backlog else self._open_session().next()
                self._take_part(report, pending)
        except RequestError as error:
            pending.set(error=RequestError("", str(error), "UNAVAILABLE"))
        self._deferred.extend(backlog)

    def _take_part(self, report: pb.Report, pending: Pending) -> None:
        """Takes what is about one answer and its request, and defers the rest."""
        kind = report.WhichOneof("kind")
        if kind == "heartbeat" or (kind == "answer" and report.answer.call == pending.call):
            self._take(report)
            return
        if kind == "step":
            own = [one for one in report.step.requests if one.number == pending.request]
            others = [one for one in report.step.requests if one.number != pending.request]
            if own:
                self._take(pb.Report(step=pb.Step(requests=own)))
                report = pb.Report(step=pb.Step(requests=others, blocks=report.step.blocks))
        self._deferred.append(report)

    # --- the thread

    def _run(self) -> None:
        pause, longest = RETRY_SECONDS
        while not self._closing.is_set():
            try:
                self._hold_session()
            except RequestError as error:
                self.fault = str(error)
            except Exception:
                log.exception("the session with the replica %s failed", self.target)
                self.fault = "its session failed; the log tells more"
            if self._lose_session():
                pause = RETRY_SECONDS[0]
            self._closing.wait(pause)
            pause = min(2 * pause, longest)
        self._lose_session()

    def _hold_session(self) -> None:
        """Begins a session and takes what comes until it ends. Errors: RequestError, why it
        ended."""
        session = ReplicaSession(self.target, self._secret, self._credentials)
        self._opening = session
        welcome = session.open()
        info = info_of(welcome.info)
        self._check_same(info)
        heartbeat = session.next().heartbeat
        with self._lock:
            if self._closing.is_set():
                return
            self._info = info
            self._max_message_bytes = welcome.max_message_bytes
            self._beat(heartbeat)
            self._session = session
            self._connected.set()
        log.info("the replica %s answers", self.target)
        while True:
            self._take(self._deferred.popleft() if self._deferred else session.next())

    def _check_same(self, info: ReplicaInfo) -> None:
        """Errors: RequestError where the replica that came back is another one."""
        if self._info is None:
            return
        for name in SAME_MODEL:
            before, now = getattr(self._info, name), getattr(info, name)
            if before != now:
                raise RequestError(
                    name, f"the replica came back with {now}, not {before}", "FAILED_PRECONDITION"
                )

    def _lose_session(self) -> bool:
        """Ends what there is of a session, its requests included; whether there was one."""
        with self._lock:
            held = self._session is not None
            self._connected.clear()
            self._session = None
            self._deferred.clear()
            live = list(self._by_number.values())
            pending = list(self._pending.values())
            self._pending.clear()
        if self._opening is not None:
            self._opening.end()
        if held and not self._closing.is_set():
            log.error("the replica %s is lost: %s", self.target, self.fault)
        error = (
            RequestError("", "closed", "UNAVAILABLE") if self._closing.is_set() else self._lost()
        )
        self.block_events.forget()
        for one in pending:
            one.set(error=error)
        for request in live:
            if request.accepted.done.is_set():
                self._deliver(request, request.ends(error, self.now()))
            else:
                self._forget(request)
                request.accepted.set(error=error)
        return held

    def _watch(self) -> None:
        """Tells the replica that this side lives, and ends a session in which it is silent."""
        while not self._closing.wait(ALIVE_SECONDS):
            session = self._opening
            if session is None:
                continue
            if time.monotonic() - session.heard_at > self._silent_seconds:
                self.fault = f"it has said nothing for {self._silent_seconds:g} s"
                session.end()
            elif session is self._session:
                session.say(pb.Command(alive=pb.Alive()))
        if self._opening is not None:
            self._opening.end()

    def _beat(self, heartbeat: pb.Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._load = load_of(heartbeat.load) if heartbeat.HasField("load") else None

    def _take(self, report: pb.Report) -> None:
        match report.WhichOneof("kind"):
            case "heartbeat":
                self._beat(report.heartbeat)
            case "step":
                for change in report.step.blocks:
                    self.block_events.take(change)
                for one in report.step.requests:
                    self._hear(one)
            case "answer":
                pending = self._pending.pop(report.answer.call, None)
                if pending is not None:
                    answer = report.answer
                    failed = answer.WhichOneof("kind") == "error"
                    pending.set(answer, error_of(answer.error) if failed else None)

    def _hear(self, message: pb.RequestEvents) -> None:
        live = self._by_number.get(message.number)
        if live is None:  # it was given up
            return
        if message.HasField("refused"):
            self._forget(live)
            live.accepted.set(error=error_of(message.refused))
            return
        self._deliver(live, [event_of(event) for event in message.events])
        live.accepted.set()

    def _deliver(self, live: RemoteRequest, events: list[Event]) -> None:
        """Calls a sink. One that raises hears no more, and its request is cancelled."""
        live.hear(events, self.now())
        if not live.tokens:
            self._forget(live)
        try:
            live.sink(events)
        except Exception:
            log.exception("the sink of request %r failed", live.request.id)
            live.sink = _nobody
            session = self._session
            if session is not None and live.tokens:
                session.say(_cancel(0, live.number, "cancelled"))

    def _forget(self, live: RemoteRequest) -> None:
        with self._lock:
            self._by_number.pop(live.number, None)
            if self._live.get(live.request.id) is live:
                del self._live[live.request.id]


class _RemoteMetrics(Collector):
    """The metrics of a remote replica, asked of it at each scrape."""

    def __init__(self, replica: RemoteReplica):
        self._replica = replica

    def collect(self) -> Iterable[Metric]:
        try:
            text = self._replica.metrics_text()
        except RequestError:
            return []
        return text_string_to_metric_families(text)


def _cancel(call: int, number: int, reason: str) -> pb.Command:
    return pb.Command(cancel=pb.Cancel(call=call, number=number, reason=reason))


def _nobody(events: object) -> None:
    """Hears the events of a request whose sink raised."""
