"""Offers a replica to conductors on other processes: border A over gRPC, see replica.proto.

Each conductor holds a session, a stream in both directions. What it says is done in its order on a
thread of the session; what the replica tells the sinks of its requests goes back in one message per
step. A session whose other side has said nothing for a while, or does not read, is ended, and its
requests with it.
"""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import logging
import threading
from collections.abc import Iterator

import grpc

from jaxserve.api.errors import RequestError
from jaxserve.replica.protocol import Replica
from jaxserve.server import replica_pb2 as pb
from jaxserve.server import replica_pb2_grpc as rpc
from jaxserve.server.block_service import MAX_STREAMS, BlockService
from jaxserve.server.caller_session import CallerSession, Served
from jaxserve.server.cluster_port import ClusterPort
from jaxserve.server.own_address import OwnAddress
from jaxserve.server.remote_adapters import adapter_messages
from jaxserve.server.replica_messages import info_text, load_message
from jaxserve.store.peers import FetchesBlocks, OffersBlocks
from jaxserve.text.structured_output import Guides

log = logging.getLogger(__name__)
MAX_SESSIONS = 16  # each takes two threads
BEAT_SECONDS = 0.25  # between heartbeats, and between looks at who is silent
SILENT_SECONDS = 4.0  # that the other side of a session may say nothing
WAITING_THREADS = 4  # for questions and requests with guides, which may wait for a step


class ReplicaService(rpc.ReplicaServicer):
    """Serves one replica from `open` until `stop`; before, sessions are refused.

    secret: that callers have to know. max_message_bytes: of a caller's message, prompts included.
    blocks: what other replicas may ask for by the same port. own_address: how they reach it, if
    conductors are to say another one than their own.
    """

    def __init__(
        self,
        secret: bytes,
        *,
        max_message_bytes: int = 256 << 20,
        silent_seconds: float = SILENT_SECONDS,
        blocks: BlockService | None = None,
        own_address: OwnAddress | None = None,
    ):
        self.max_message_bytes = max_message_bytes
        self._silent_seconds = silent_seconds
        self._own_address = own_address
        self._kv_addresses: list[str] = []
        self._sessions: dict[int, CallerSession] = {}
        self._places = threading.Semaphore(MAX_SESSIONS)
        self._session_numbers = itertools.count()
        self._served: Served | None = None
        self._load = pb.Load()
        self._load_asked = False
        self._ended = threading.Event()
        self._threads = concurrent.futures.ThreadPoolExecutor(WAITING_THREADS, "question")
        calls = MAX_SESSIONS + (MAX_STREAMS if blocks is not None else 0)
        self._port = ClusterPort(secret, calls, max_message_bytes)
        rpc.add_ReplicaServicer_to_server(self, self._port.server)
        self._blocks = blocks
        if blocks is not None:
            rpc.add_BlocksServicer_to_server(blocks, self._port.server)
        self._beating = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self, address: str, credentials: grpc.ServerCredentials | None = None) -> int:
        """Listens on HOST:PORT; returns the port's number. Errors: ConfigError."""
        port = self._port.start(address, credentials)
        if self._own_address is not None:
            self._kv_addresses = self._own_address.all_at(port)
        return port

    def open(self, replica: Replica, guides: Guides | None = None) -> None:
        """Begins to serve a replica that runs. guides: compiles what requests ask for; None where
        the model has no tokenizer."""
        self._served = Served(replica, guides, self._threads)
        if self._blocks is not None and isinstance(replica, OffersBlocks):
            self._blocks.open(replica.block_exporter)
        self._beating.start()

    @property
    def requests(self) -> int:
        """Requests of all sessions that have not ended."""
        return sum(len(session) for session in list(self._sessions.values()))

    def drain(self) -> None:
        """Refuses requests from now on, and tells the sessions."""
        if self._served is not None:
            self._served.draining = True

    def stop(self) -> None:
        """Ends all sessions and closes the port."""
        self._ended.set()
        self._port.stop()
        if self._beating.is_alive():
            self._beating.join()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def Session(
        self, commands: Iterator[pb.Command], context: grpc.ServicerContext
    ) -> Iterator[pb.Report]:
        """The RPC; gRPC calls it on a thread of the session's own."""
        served = self._served
        if served is None or self._ended.is_set():
            context.abort(grpc.StatusCode.UNAVAILABLE, "the replica starts or stops just now")
            return
        if not self._places.acquire(blocking=False):
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_SESSIONS} conductors have sessions"
            )
            return
        number = next(self._session_numbers)
        session = CallerSession(served, commands, context)
        self._sessions[number] = session
        log.info("a conductor at %s has begun a session", context.peer())
        try:
            yield pb.Report(welcome=self._welcome(served.replica))
            beat = self._heartbeat(served)
            beat.other_requests = self.requests
            yield pb.Report(heartbeat=beat)
            session.start()
            yield from session.reports()
            context.abort(grpc.StatusCode.UNAVAILABLE, session.cause)
        finally:
            del self._sessions[number]
            self._places.release()
            session.close()
            log.info("the session of the conductor at %s has ended", context.peer())

    def _welcome(self, replica: Replica) -> pb.Welcome:
        return pb.Welcome(
            info=info_text(replica.info),
            max_message_bytes=self.max_message_bytes,
            kv_addresses=self._kv_addresses,
        )

    def _beat(self) -> None:
        served = self._served
        assert served is not None
        while not self._ended.wait(BEAT_SECONDS):
            self._ask_load(served.replica)
            beat = self._heartbeat(served)
            requests = self.requests
            for session in list(self._sessions.values()):
                beat.other_requests = max(requests - len(session), 0)
                session.say(pb.Report(heartbeat=beat))
                session.end_if_silent(self._silent_seconds)
        for session in list(self._sessions.values()):
            session.end("the replica stops")

    def _heartbeat(self, served: Served) -> pb.Heartbeat:
        """Returns the state that is known without waiting for a step."""
        replica = served.replica
        return pb.Heartbeat(
            alive=replica.alive,
            available=replica.available and not served.draining,
            overdue=replica.overdue(),
            load=self._load,
            kv_rates=_kv_rates(replica),
            adapters=adapter_messages(replica),
            weight_version=replica.weights.version,
            weight_state=replica.weights.state,
            cache_fingerprint=replica.info.cache_fingerprint,
        )

    def _ask_load(self, replica: Replica) -> None:
        """Has the replica's thread tell its load; once, until it has."""
        if not self._load_asked:
            self._load_asked = True
            replica.post(functools.partial(self._read_load, replica))

    def _read_load(self, replica: Replica) -> None:
        try:
            self._load = load_message(replica.load())
        except RequestError:  # it may not be known just now
            pass
        finally:
            self._load_asked = False


def _kv_rates(replica: Replica) -> list[pb.KvRate]:
    """Returns how quickly KV came from other replicas, what was used last at the end."""
    fetched = replica.kv_fetched() if isinstance(replica, FetchesBlocks) else []
    return [
        pb.KvRate(source=one.source, plane=one.plane, bytes_per_s=one.bytes_per_s)
        for one in fetched
        if one.bytes_per_s
    ]
