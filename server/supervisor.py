"""The life of a server: it listens at once, serves when its replica is built and warm, and drains
before it stops.

Health (grpc.health.v1) is NOT_SERVING while the replica is built, while the server drains, and when
the replica is stuck or has failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2
from starlette.types import ASGIApp

from jaxserve.api.errors import RequestError
from jaxserve.replica.protocol import Replica
from jaxserve.server import event_loop
from jaxserve.server import jaxserve_pb2 as pb
from jaxserve.server.admin import operators_app
from jaxserve.server.auth.access import Authenticator
from jaxserve.server.auth.tls import Tls
from jaxserve.server.block_service import BlockService
from jaxserve.server.cluster_port import check_replica_port
from jaxserve.server.cors import with_cors
from jaxserve.server.frontend import SERVING, STOPPING, Frontend
from jaxserve.server.grpc.auth import THROTTLED_METHODS, GrpcGuard
from jaxserve.server.grpc.control import Control
from jaxserve.server.grpc.handlers import MAX_CONTROL_BYTES, method_handlers
from jaxserve.server.grpc.health import Health
from jaxserve.server.grpc.inference import Inference
from jaxserve.server.http_guard import HttpGuard
from jaxserve.server.http_server import Listener
from jaxserve.server.kv_events import KvEvents, check_kv_events
from jaxserve.server.kv_handoff import KvHandoff
from jaxserve.server.models import Models
from jaxserve.server.own_address import is_loopback
from jaxserve.server.peer_blocks import LeaderSide, PeerReplicas
from jaxserve.server.readiness import Readiness
from jaxserve.server.replica_auth import cluster_secret
from jaxserve.server.replica_service import ReplicaService
from jaxserve.server.users_app import OPEN_PATHS, THROTTLED_PATHS, users_app
from jaxserve.settings.schema import ConfigError, ServerConfig
from jaxserve.store.peers import OffersBlocks
from jaxserve.text import Tokenizer
from jaxserve.text.structured_output import Guides

log = logging.getLogger(__name__)
T = TypeVar("T")
HEALTH_SERVICE = "grpc.health.v1.Health"
SERVICES = {name: pb.DESCRIPTOR.services_by_name[name] for name in ("Inference", "Control")}
# at most, that the replica's thread waits for the interpreter while streams are written
SWITCH_SECONDS = 0.0001
POLL_SECONDS = 0.25  # at most, between polls of streams and replica
HEARTBEAT_POLLS = 4  # at least, within `progress_interval`
FILES_SECONDS = 0.25  # between checks of the key file and the certificate
DRAIN_POLL_SECONDS = 0.02
STOP_SECONDS = 2.0  # for the statuses of aborted requests to get out
MIN_PING_MS = 10_000  # between a client's pings: callers wait minutes for a prefill

Build = Callable[[], tuple[Replica, Tokenizer | None]]
Builds = Mapping[str, Build]  # by the model's name


def check_host(config: ServerConfig) -> None:
    """Refuses a host where strangers could connect although neither keys nor certificates are
    required, and --insecure is not set. Errors: ConfigError."""
    if not (is_loopback(config.host) or _authenticated(config) or config.insecure):
        raise ConfigError(
            "host",
            f"{config.host!r} is not a loopback address, and neither --api_key, --api_keys nor "
            "--tls_client_ca says who may connect; add --insecure to serve everybody who can",
        )
    if config.admin_port is not None and not config.asks_for_keys and not is_loopback(config.host):
        raise ConfigError(
            "admin_port",
            f"on {config.host!r} it needs --api_keys: operators have keys of their own",
        )
    check_kv_events(config)


def warn_of_host(config: ServerConfig) -> None:
    """Warns of what others on the network can do or read."""
    if is_loopback(config.host):
        return
    if not _authenticated(config):
        log.warning(
            "INSECURE: anyone who can reach %s may use this server and stop what others run on it",
            config.host,
        )
    if config.tls_cert is None:
        log.warning(
            "no TLS: prompts, answers and API keys travel from and to %s in plain text", config.host
        )


def _authenticated(config: ServerConfig) -> bool:
    return config.asks_for_keys or config.tls_client_ca is not None


def channel_options(config: ServerConfig) -> list[tuple[str, int]]:
    """Options of the gRPC server: message sizes, and keepalive that permits clients' pings and
    notices callers that vanished."""
    return [
        ("grpc.max_receive_message_length", config.max_message_mib << 20),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_MS),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
    ]


class Server:
    """A server on the running event loop.

    `ports`: those it listens on, by name: grpc, and, if they are configured, http and admin.
    peers: see `run`. names: of its models, see `Models`. Errors: ConfigError.
    """

    def __init__(
        self,
        config: ServerConfig,
        peers: PeerReplicas | LeaderSide | None = None,
        names: Sequence[str] = ("",),
    ):
        check_host(config)
        check_replica_port(config)
        warn_of_host(config)
        self.authenticator = Authenticator(config)
        self.tls = Tls.from_config(config)
        self.config = config
        self.models = Models(config, names)
        self.ports: dict[str, int] = {}
        self._host = f"[{config.host.strip('[]')}]" if ":" in config.host else config.host
        self._listeners: list[Listener] = []
        self._kv_events: KvEvents | None = None
        self._health = Health([service.full_name for service in SERVICES.values()])
        throttled = frozenset() if self.models.several else THROTTLED_METHODS
        self._grpc_server = grpc.aio.server(
            interceptors=(GrpcGuard(self.authenticator, self.models.metrics, throttled),),
            options=channel_options(config),
        )
        self._peers = peers
        self._replica_service: ReplicaService | None = None
        if config.replica_port is not None:
            self._replica_service = ReplicaService(
                cluster_secret(),
                max_message_bytes=config.max_message_mib << 20,
                blocks=None if peers is None else BlockService(peers.planes),
                own_address=None if peers is None else peers.own_address,
            )
        inference = Inference(self.models)
        control = Control(self.models)
        metrics = self.models.metrics
        max_bytes = config.max_message_mib << 20
        self._grpc_server.add_generic_rpc_handlers(
            (
                method_handlers(inference, SERVICES["Inference"], max_bytes, metrics),
                method_handlers(control, SERVICES["Control"], MAX_CONTROL_BYTES, metrics),
            )
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc_server)
        if config.reflection:
            _add_reflection(
                (*self._health.names, HEALTH_SERVICE, reflection.SERVICE_NAME), self._grpc_server
            )

    async def start(self) -> None:
        """Listens on all ports. Errors: ConfigError if an address cannot be had."""
        try:
            self.ports["grpc"] = self._add_grpc_port(f"{self._host}:{self.config.grpc_port}")
        except RuntimeError:
            raise ConfigError(
                "grpc_port", f"cannot listen on {self._host}:{self.config.grpc_port}: is it taken?"
            ) from None
        if self.config.port is not None:
            self._add_http_port("http", self.config.port, self._users_guard())
        if self.config.admin_port is not None:
            self._add_http_port("admin", self.config.admin_port, self._operators_guard())
        if self._replica_service is not None:
            self.ports["replica"] = self._replica_service.start(
                f"{self._host}:{self.config.replica_port}",
                None if self.tls is None else self.tls.credentials(clients=False),
            )
        for listener in self._listeners:
            await listener.start()
        if self.config.kv_events is not None:
            self._kv_events = KvEvents(self.config)
        await self._grpc_server.start()
        self._watchers = [
            asyncio.create_task(self._poll()),
            asyncio.create_task(self._watch_files()),
        ]

    @property
    def frontend(self) -> Frontend:
        """The frontend of the model; of several that of the first."""
        return self.models.all[0]

    @property
    def kv_events(self) -> KvEvents | None:
        """The publisher of KV events, where they are configured."""
        return self._kv_events

    def _users_guard(self) -> ASGIApp:
        readiness = Readiness(self.models, self.authenticator.anonymous)
        guard = HttpGuard(
            users_app(self.models, readiness),
            self.config,
            self.authenticator.authenticate,
            OPEN_PATHS,
            self.models.metrics,
            # unread, a call does not say whether its model is the one with too many
            frozenset() if self.models.several else THROTTLED_PATHS,
        )
        return with_cors(guard, self.config)

    def _operators_guard(self) -> HttpGuard:
        return HttpGuard(
            operators_app(self.models),
            self.config,
            functools.partial(self.authenticator.authenticate, admin=True),
            frozenset(),
            self.models.metrics,
        )

    def _add_http_port(self, name: str, port: int, app: ASGIApp) -> None:
        context = None if self.tls is None else self.tls.context()
        field = "port" if name == "http" else f"{name}_port"
        listener = Listener(app, self.config, field, port, context)
        self._listeners.append(listener)
        self.ports[name] = listener.port

    def address(self, name: str) -> str:
        """The address of one of `ports`: HOST:PORT for grpc and replica, a URL for the others."""
        address = f"{self._host}:{self.ports[name]}"
        if name in ("grpc", "replica"):
            return address
        return f"http://{address}" if self.tls is None else f"https://{address}"

    def _add_grpc_port(self, address: str) -> int:
        """Returns the port's number. Errors: RuntimeError if the address cannot be had."""
        if self.tls is None:
            return self._grpc_server.add_insecure_port(address)
        return self._grpc_server.add_secure_port(address, self.tls.credentials())

    def open(
        self, name: str, replica: Replica, tokenizer: Tokenizer | None, guides: Guides
    ) -> None:
        """Begins to serve the model of this name. Arguments and errors as of `Models.serve`."""
        first = all(other.replica is None for other in self.models.all)
        frontend = self.models.serve(name, replica, tokenizer, guides)
        if self._replica_service is not None:
            self._replica_service.open(replica, guides)
            frontend.handoff = self._handoff(replica)
        if self._kv_events is not None:
            self._kv_events.open(replica, f"{self._host}:{self.ports.get('http', 0)}")
        if first:
            self._watchers.append(asyncio.create_task(self.models.metrics.watch_loop()))
        self._health.set_serving(self.models.state == SERVING)
        log.info(
            "%s %s: %s",
            f"serving {name} on" if name else "serving on",
            self.config.host,
            ", ".join(f"{name} {port}" for name, port in self.ports.items()),
        )

    def _handoff(self, replica: Replica) -> KvHandoff | None:
        """Returns that by which routers pass KV on; None where others can fetch none here."""
        exporter = replica.block_exporter if isinstance(replica, OffersBlocks) else None
        if self._peers is None or exporter is None:
            return None
        return KvHandoff(
            self._peers.secret,
            self._peers.own_address.at(self.ports["replica"]),
            self.config.kv_lease,
            replica.info,
            exporter,
            self.frontend.ask_replica,
            self.models.metrics,
        )

    async def drain(self) -> None:
        """Refuses new requests, gives running ones `drain_timeout` seconds, ends the rest with
        UNAVAILABLE."""
        for frontend in self.models.all:
            frontend.state = STOPPING
        self._health.set_serving(False)
        if self._replica_service is not None:
            self._replica_service.drain()
        if self._requests:
            log.info(
                "draining: %d requests have %g s to finish",
                self._requests,
                self.config.drain_timeout,
            )
        deadline = asyncio.get_running_loop().time() + self.config.drain_timeout
        while self._requests and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        error = RequestError("", "the server is shutting down", "UNAVAILABLE")
        aborted = sum(frontend.abort_all(error) for frontend in self.models.all)
        if aborted:
            log.warning("%d requests were aborted", aborted)

    @property
    def _requests(self) -> int:
        """Requests that have not ended, of users and of conductors."""
        conductors = self._replica_service
        return self.models.requests + (0 if conductors is None else conductors.requests)

    @property
    def http_connections(self) -> int:
        """Number of open connections to the HTTP ports."""
        return sum(listener.connections for listener in self._listeners)

    async def stop(self) -> None:
        """Closes all ports and connections."""
        for watcher in self._watchers:
            watcher.cancel()
        if self._replica_service is not None:
            await asyncio.to_thread(self._replica_service.stop)
        await self._grpc_server.stop(STOP_SECONDS)
        for listener in self._listeners:
            await listener.stop()
        if self._kv_events is not None:
            await asyncio.to_thread(self._kv_events.close)
        await asyncio.to_thread(self.models.close)

    async def _poll(self) -> None:
        period = min(POLL_SECONDS, self.config.progress_interval / HEARTBEAT_POLLS)
        while True:
            await asyncio.sleep(period)
            self.models.poll()
            # states change with replicas, or as an operator asks
            self._health.set_serving(self.models.state == SERVING)

    async def _watch_files(self) -> None:
        while True:
            await asyncio.sleep(FILES_SECONDS)
            try:
                await self.authenticator.refresh()
                if self.tls is not None:
                    self.tls.refresh()
            except Exception:  # go on: else a key that is revoked would work for ever
                log.exception("key file and certificate could not be read again")


async def run(
    config: ServerConfig,
    build: Build | Builds,
    listening: Callable[[Server], None],
    stop: asyncio.Event,
    peers: PeerReplicas | LeaderSide | None = None,
) -> bool:
    """Serves until `stop` is set.

    build: makes the replica and its tokenizer, on a thread of its own; what it raises ends the
    server. Of several models each has one, and is served as soon as it is built. listening: called
    with the server once its ports are open. peers: by which the replica asks others for blocks;
    they may ask for its own then.

    Returns whether all replicas were built and have closed; if not, a thread that builds one, or
    that waits for a step, may still be busy.
    """
    builds = build if isinstance(build, Mapping) else {"": build}
    server = Server(config, peers, tuple(builds))
    replicas: list[Replica] = []
    unbuilt = set(builds)

    async def open_built(name: str, build: Build) -> None:
        work = functools.partial(_build_and_freeze, name, build, unbuilt)
        replica, tokenizer, guides = await _run_in_daemon_thread(work)
        replica.start()
        replicas.append(replica)
        server.open(name, replica, tokenizer, guides)

    await server.start()
    listening(server)
    stopping = asyncio.create_task(stop.wait())
    with shared_interpreter():
        parts = [asyncio.create_task(open_built(name, one)) for name, one in builds.items()]
        opening = asyncio.gather(*parts)
        try:
            await asyncio.wait((opening, stopping), return_when=asyncio.FIRST_COMPLETED)
            if opening.done():
                opening.result()
                await stopping
        finally:
            for task in (*parts, stopping):  # one that has failed has not ended the others
                task.cancel()
            await server.drain()
            await server.stop()
            for replica in replicas:
                replica.close()
    return len(replicas) == len(builds) and all(one.overdue() is None for one in replicas)


@contextlib.contextmanager
def shared_interpreter() -> Iterator[None]:
    """Makes threads switch often, for the replica's thread and the event loop share the
    interpreter. At the exit this, and the garbage collector, are as before; see
    `_build_and_freeze`."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        gc.unfreeze()


def _build_and_freeze(
    name: str, build: Build, unbuilt: set[str]
) -> tuple[Replica, Tokenizer | None, Guides]:
    """Builds the replica, and once it is the last one hides all that now exists from the garbage
    collector: it lives as long as the server. Each collection of these 400,000 objects would stall
    the replica and all streams for a quarter of a second."""
    replica, tokenizer = build()
    guides = Guides(tokenizer, replica.info.vocab, replica.info.eos_ids)
    guides.prepare()
    if tokenizer is not None:
        tokenizer.encode("", special=False)  # copies its vocabulary at the first use
    unbuilt.remove(name)
    if not unbuilt:
        gc.collect()
        gc.freeze()
    return replica, tokenizer, guides


def serve(
    config: ServerConfig,
    build: Build | Builds,
    listening: Callable[[Server], None],
    peers: PeerReplicas | LeaderSide | None = None,
) -> bool:
    """Runs a server until SIGTERM or SIGINT; a second signal ends the process at once. Arguments
    and result as for `run`."""

    async def main() -> bool:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def signalled(number: int) -> None:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)  # ends the process, without a traceback
            stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, signalled, number)
        return await run(config, build, listening, stop, peers)

    return event_loop.run(main())


class Background:
    """A server on a thread of its own, for notebooks, the demo and tests. It listens inside of
    `with Background(config, build) as server`. peers: see `run`."""

    def __init__(
        self,
        config: ServerConfig,
        build: Build | Builds,
        peers: PeerReplicas | LeaderSide | None = None,
    ):
        self._config = config
        self._build = build
        self._peers = peers
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="jaxserve-server", daemon=True)

    def __enter__(self) -> Background:
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop()
        self._thread.join()
        if self._error is not None and kind is None:
            raise self._error

    def call_soon(self, work: Callable[[], object]) -> None:
        """Runs work on the server's thread; does nothing if it has ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(work)

    def stop(self) -> None:
        """Begins to stop, as SIGTERM does, without waiting."""
        self.call_soon(lambda: self._stop.set())

    def wait_ready(self) -> None:
        """Returns once requests are accepted. Errors: what building the replica raised."""
        models = self.server.models.all
        while self._thread.is_alive() and any(model.replica is None for model in models):
            self._thread.join(0.02)
        if self._error is not None:
            raise self._error

    @property
    def target(self) -> str:
        """The gRPC address."""
        return self.server.address("grpc")

    @property
    def url(self) -> str:
        """The URL of the HTTP port."""
        return self.server.address("http")

    def _listening(self, server: Server) -> None:
        self.server = server
        self._started.set()

    def _main(self) -> None:
        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            self._stop = asyncio.Event()
            await run(self._config, self._build, self._listening, self._stop, self._peers)

        try:
            event_loop.run(main())
        except Exception as error:
            self._error = error
        finally:
            self._started.set()


def _add_reflection(names: Sequence[str], server: grpc.aio.Server) -> None:
    """Adds the reflection service under both of its names: the library has only v1alpha, and the
    messages of v1 are the same."""
    reflection.enable_server_reflection(names, server)
    describe = grpc.stream_stream_rpc_method_handler(
        reflection.aio.ReflectionServicer(names).ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(
                "grpc.reflection.v1.ServerReflection", {"ServerReflectionInfo": describe}
            ),
        )
    )


def _run_in_daemon_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Runs work in a thread that, unlike an executor's, does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(setter: Callable[[Any], None], value: Any) -> None:
        if not done.done():
            setter(value)

    def main() -> None:
        try:
            result = work()
        except BaseException as error:
            outcome: tuple[Callable[[Any], None], Any] = (done.set_exception, error)
        else:
            outcome = (done.set_result, result)
        with contextlib.suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(finish, *outcome)

    threading.Thread(target=main, name="jaxserve-build", daemon=True).start()
    return done
