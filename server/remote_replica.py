"""A replica on another process, reached over gRPC: implements border A, see `replica_service`.

The connection's thread calls the sinks. While there is no session, the replica is not alive:
requests are refused, and running ones have ended with UNAVAILABLE. A replica that restarts, or was
only stopped, comes back.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from jaxserve.api.errors import RequestError
from jaxserve.api.request import Request
from jaxserve.cluster.member import KvPeer
from jaxserve.replica.info import ReplicaInfo
from jaxserve.replica.kv_pool import KvPool
from jaxserve.replica.protocol import Sink
from jaxserve.scheduling import Load
from jaxserve.server import replica_pb2 as pb
from jaxserve.server.auth.tls import Authorities
from jaxserve.server.grpc.proto import value_in
from jaxserve.server.kv_questions import RemoteKvPool
from jaxserve.server.remote_adapters import LOAD_SECONDS, RemoteAdapters
from jaxserve.server.remote_blocks import RemoteBlocks
from jaxserve.server.remote_requests import (
    Pending,
    RemoteRequest,
    RemoteRequests,
    cancel_command,
    parts_of,
)
from jaxserve.server.remote_weights import CHANGE_SECONDS, RemoteWeights
from jaxserve.server.replica_connection import SILENT_SECONDS, ReplicaConnection
from jaxserve.server.replica_messages import error_of, info_of, load_of, submit_message
from jaxserve.server.replica_session import ReplicaSession

log = logging.getLogger(__name__)
ANSWER_SECONDS = 10.0  # for an answer, which may have to wait for a step
SAME_MODEL = ("model", "vocab", "eos_ids", "max_model_len", "dtype", "kv_dtype", "block_size")


class RemoteReplica:
    """A replica of another process. target: HOST:PORT of its `--replica_port`. authorities: of its
    certificate; None: no TLS. silent_seconds: after which a silent replica counts as not alive."""

    def __init__(
        self,
        target: str,
        secret: bytes,
        authorities: Authorities | None = None,
        silent_seconds: float = SILENT_SECONDS,
    ):
        self.target = target
        self.block_events = RemoteBlocks()
        self.facts = RemoteFacts()
        self.adapters = RemoteAdapters(
            lambda: self.facts.heartbeat,
            lambda question: self._question(LOAD_SECONDS, adapter=question).adapter,
        )
        self.weights = RemoteWeights(
            lambda: self.facts.heartbeat,
            lambda question: self._question(CHANGE_SECONDS, weights=question).weights,
        )
        self._draining = False
        self._lock = threading.RLock()  # never held while a sink is called
        self._requests = RemoteRequests(self._lock, self._say)
        self._posted = PostedCommands(target)
        self._metrics = CollectorRegistry(auto_describe=False)
        self._metrics.register(_RemoteMetrics(lambda: self._question(metrics=True)))
        self._connection = ReplicaConnection(
            target,
            functools.partial(ReplicaSession, target, secret, authorities),
            self,
            self._lock,
            silent_seconds,
        )
        self._connection.start()

    # --- facts

    def wait_connected(self, seconds: float) -> bool:
        """Waits until the replica answers; returns whether it does."""
        return self._connection.connected.wait(seconds)

    @property
    def fault(self) -> str:
        """The reason why it is not alive."""
        return self._connection.fault

    @property
    def info(self) -> ReplicaInfo:
        """Facts about the replica, from its newest session. Errors: RequestError before the
        first."""
        if self.facts.info is None:
            raise self._connection.lost_error()
        return self.facts.info

    @property
    def alive(self) -> bool:
        """True while it answers; may become True again."""
        return self._connection.connected.is_set() and self.facts.heartbeat.alive

    @property
    def available(self) -> bool:
        return self.alive and self.facts.heartbeat.available

    @property
    def recent_load(self) -> Load | None:
        """The load in its newest heartbeat, at most a second old while it is well; None before the
        first. Does not wait."""
        return self.facts.load

    @property
    def other_requests(self) -> int:
        """Number of requests of other sessions in its newest heartbeat. Does not wait."""
        return self.facts.heartbeat.other_requests

    def start(self) -> None:
        """Does nothing: its own process has started it."""

    def now(self) -> float:
        """Seconds on this process's clock."""
        return time.monotonic()

    def overdue(self) -> float | None:
        return value_in(self.facts.heartbeat, "overdue")

    # --- requests

    def submit(self, request: Request, sink: Sink) -> None:
        """Submits a request, and waits until the replica has accepted or refused it. Errors: as of
        `Replica.submit`, and RequestError, UNAVAILABLE, if it does not answer."""
        number = self._requests.next_number()
        message = submit_message(number, request, self.now())
        live = RemoteRequest.of(number, request, sink)
        with self._lock:
            session = self._connection.require_session()
            if self._draining:
                raise RequestError("", "the replica takes no more requests", "UNAVAILABLE")
            if message.ByteSize() >= self.facts.max_message_bytes:
                raise RequestError(
                    "prompt",
                    f"has {len(request.prompt)} tokens; the replica takes messages of at most "
                    f"{self.facts.max_message_bytes} bytes",
                )
            self._requests.add(live)
            session.say(pb.Command(submit=message))
        try:
            self._wait(live.accepted)
        except RequestError:
            self._requests.forget(live)
            session.say(cancel_command(0, number, "cancelled"))  # it may be accepted later
            raise

    def cancel(self, request_id: str, reason: str = "cancelled") -> bool:
        return self._end_request(
            request_id, lambda call, number: cancel_command(call, number, reason)
        )

    def stop(self, request_id: str, index: int) -> bool:
        return self._end_request(
            request_id,
            lambda call, number: pb.Command(stop=pb.Stop(call=call, number=number, index=index)),
        )

    def _end_request(self, request_id: str, command: Callable[[int, int], pb.Command]) -> bool:
        with self._lock:
            live = self._requests.with_id(request_id)
            session = self._connection.session
            if live is None or session is None:
                return False
            pending = self._requests.expect(live.number)
            session.say(command(pending.call, live.number))
        try:
            return self._wait(pending).done
        except RequestError:
            if self._requests.with_id(request_id) is None:  # it has ended, with the session
                return False
            raise

    def post(self, command: Callable[[], object]) -> None:
        """Runs a command on a thread of its own, after earlier ones; at once if the replica was
        closed."""
        self._posted.add(command)

    # --- questions

    def load(self) -> Load:
        """Returns the current load. Errors: RequestError if it does not answer."""
        return load_of(self._question(load=True).load)

    def view(self, since: int = 0) -> dict[str, Any]:
        """Returns the view of `Replica.view`. Errors: RequestError if it does not answer."""
        return json.loads(self._question(view_since=since).view)

    def flush_cache(self) -> int:
        """Frees pages as `Replica.flush_cache`. Errors: RequestError if it does not answer."""
        return self._question(flush_cache=True).flushed_pages

    @functools.cached_property
    def kv_pool(self) -> KvPool:
        """Its cached blocks. Errors of all methods: RequestError if it does not answer."""
        return RemoteKvPool(lambda question: self._question(kv=question).kv)

    @property
    def metrics_registry(self) -> CollectorRegistry:
        """Its metrics; none while it does not answer."""
        return self._metrics

    def count_rejected(self, reason: str) -> None:
        self._say(pb.Command(rejected=pb.Rejected(reason=reason)))

    def _say(self, command: pb.Command) -> None:
        """Sends a command if there is a session."""
        session = self._connection.session
        if session is not None:
            session.say(command)

    def _question(self, seconds: float = ANSWER_SECONDS, **question: Any) -> pb.Answer:
        with self._lock:
            session = self._connection.require_session()
            pending = self._requests.expect()
            session.say(pb.Command(question=pb.Question(call=pending.call, **question)))
        return self._wait(pending, seconds)

    def _wait(self, pending: Pending, seconds: float = ANSWER_SECONDS) -> pb.Answer:
        """Waits for an answer. Errors: RequestError, the replica's own, or UNAVAILABLE."""
        if self._connection.is_reader:
            split = functools.partial(parts_of, pending=pending)
            try:
                self._connection.read_until(pending.done, seconds, split)
            except RequestError as error:
                pending.set(error=RequestError("", str(error), "UNAVAILABLE"))
        answered = pending.done.wait(seconds)
        self._requests.take_pending(pending.call)
        if not answered:
            raise RequestError(
                "",
                f"the replica {self.target} did not answer for {seconds:g} s",
                "UNAVAILABLE",
            )
        if pending.error is not None:
            raise pending.error
        return pending.answer

    # --- the end

    def drain(self) -> None:
        """Takes no new requests from this caller; other callers may still submit to the replica."""
        self._draining = True

    def close(self) -> None:
        """Ends the session and the requests in it; the replica itself goes on."""
        if self._connection.close():
            self._posted.close()

    # --- calls of the connection, on its thread

    def began(self, welcome: pb.Welcome, heartbeat: pb.Heartbeat) -> None:
        self.facts.welcome(welcome)
        self.facts.beat(heartbeat)

    def received(self, report: pb.Report) -> None:
        match report.WhichOneof("kind"):
            case "heartbeat":
                self.facts.beat(report.heartbeat)
            case "step":
                self.facts.heartbeat.weight_version = report.step.weight_version
                for change in report.step.blocks:
                    self.block_events.take(change)
                for events in report.step.requests:
                    self._requests.take(events)
            case "answer":
                pending = self._requests.take_pending(report.answer.call)
                if pending is not None:
                    answer = report.answer
                    failed = answer.WhichOneof("kind") == "error"
                    pending.set(answer, error_of(answer.error) if failed else None)

    def lost(self, error: RequestError) -> None:
        self.block_events.forget()
        self._requests.end_all(error)


class RemoteFacts:
    """Facts about a remote replica: from its welcome, and from its newest heartbeat. kv_peer: what
    it said there of KV."""

    def __init__(self) -> None:
        self.info: ReplicaInfo | None = None
        self.max_message_bytes = 0
        self.heartbeat = pb.Heartbeat()
        self.load: Load | None = None  # of the heartbeat; routers read it many times
        self.kv_peer = KvPeer()

    def welcome(self, welcome: pb.Welcome) -> None:
        """Takes the facts of a session. Errors: RequestError if a replica came back with another
        model."""
        info = info_of(welcome.info)
        for name in () if self.info is None else SAME_MODEL:
            old, new = getattr(self.info, name), getattr(info, name)
            if old != new:
                raise RequestError(
                    name, f"the replica came back with {new}, not {old}", "FAILED_PRECONDITION"
                )
        self.info = info
        self.max_message_bytes = welcome.max_message_bytes
        self.kv_peer = KvPeer(tuple(welcome.kv_addresses))

    def beat(self, heartbeat: pb.Heartbeat) -> None:
        self.heartbeat = heartbeat
        fingerprint = heartbeat.cache_fingerprint
        if fingerprint and self.info is not None and fingerprint != self.info.cache_fingerprint:
            self.info = dataclasses.replace(self.info, cache_fingerprint=fingerprint)
        self.load = load_of(heartbeat.load) if heartbeat.HasField("load") else None
        rates = {one.source: one.bytes_per_s for one in heartbeat.kv_rates}
        self.kv_peer = self.kv_peer._replace(rates=rates)


class PostedCommands:
    """Commands that run one after the other on a thread of their own."""

    def __init__(self, target: str):
        self._closed = False
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"posted {target}", daemon=True).start()

    def add(self, command: Callable[[], object]) -> None:
        """Adds a command; runs it at once after `close`."""
        if self._closed:
            command()
            return
        self._queue.put(command)

    def close(self) -> None:
        self._closed = True
        self._queue.put(None)

    def _run(self) -> None:
        for command in iter(self._queue.get, None):
            try:
                command()
            except Exception:
                log.exception("a posted command failed")


class _RemoteMetrics(Collector):
    """The metrics of a remote replica, fetched at each scrape. ask: Errors: RequestError."""

    def __init__(self, ask: Callable[[], pb.Answer]):
        self._ask = ask

    def collect(self) -> Iterable[Metric]:
        try:
            text = self._ask().metrics.decode()
        except RequestError:
            return []
        return text_string_to_metric_families(text)
