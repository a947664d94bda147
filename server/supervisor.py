"""The life of a server: it listens at once but serves only when its engine is warm; when told to
stop it drains, then goes.

Health (grpc.health.v1) is NOT_SERVING while the engine is built, while it drains, and when its
engine has stopped.
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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from jaxserve.api.errors import RequestError
from jaxserve.server import event_loop
from jaxserve.server import jaxserve_pb2 as pb
from jaxserve.server.admin import application as operators
from jaxserve.server.auth.access import Authenticator
from jaxserve.server.auth.tls import Tls
from jaxserve.server.frontend import SERVING, STOPPING, Frontend
from jaxserve.server.grpc.auth import Guard
from jaxserve.server.grpc.control import Control
from jaxserve.server.grpc.handlers import CONTROL_LIMIT, handlers
from jaxserve.server.grpc.health import Health
from jaxserve.server.grpc.inference import Inference
from jaxserve.server.http_server import HttpGuard, Listener, is_loopback
from jaxserve.server.openai.app import OPEN_PATHS
from jaxserve.server.openai.app import application as users
from jaxserve.server.readiness import Readiness
from jaxserve.settings.schema import ConfigError, ServerConfig
from jaxserve.text.structured_output import Guides

log = logging.getLogger(__name__)
HEALTH = "grpc.health.v1.Health"
SERVICES = {name: pb.DESCRIPTOR.services_by_name[name] for name in ("Inference", "Control")}
# how long the engine's thread waits for the interpreter while streams are written
SWITCH_SECONDS = 0.0001
FILES_SECONDS = 0.25  # between looks at the files of keys and certificates
STOP_SECONDS = 2.0  # for the statuses of aborted requests to get out
MIN_PING_MS = 10_000  # between pings of a client: callers wait minutes for a prefill

Build = Callable[[], tuple[Any, Any]]


def check_host(config: ServerConfig) -> None:
    """Errors: ConfigError where strangers could connect and nobody said that they may."""
    if not (is_loopback(config.host) or _authenticated(config) or config.insecure):
        raise ConfigError(
            "host",
            f"{config.host!r} is not a loopback address, and neither --api_keys nor --tls_client_ca says who may "
            "connect; add --insecure to serve everybody who can",
        )
    if config.admin_port is not None and config.api_keys is None and not is_loopback(config.host):
        raise ConfigError(
            "admin_port",
            f"on {config.host!r} it needs --api_keys: operators have keys of their own",
        )


def warn_of_host(config: ServerConfig) -> None:
    """Says what a network that others are in can do here."""
    if is_loopback(config.host):
        return
    if not _authenticated(config):
        log.warning(
            "INSECURE: whoever can reach %s may use this server and stop what others run on it",
            config.host,
        )
    if config.tls_cert is None:
        log.warning(
            "no TLS: prompts, answers and API keys travel from and to %s in plain text", config.host
        )


def _authenticated(config: ServerConfig) -> bool:
    return config.api_keys is not None or config.tls_client_ca is not None


def channel_options(config: ServerConfig) -> list[tuple[str, int]]:
    """Keepalive that lets clients ping, and notices callers that vanished."""
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
    """A server on the running event loop. `ports` are those it listens on: grpc, http, admin, those
    it has."""

    def __init__(self, config: ServerConfig):
        check_host(config)
        warn_of_host(config)
        self.access = Authenticator(config)
        self.tls = Tls.of(config)
        self.config = config
        self.front = Frontend(config)
        self.ports: dict[str, int] = {}
        self._host = f"[{config.host.strip('[]')}]" if ":" in config.host else config.host
        self._listeners: list[Listener] = []
        self._health = Health([service.full_name for service in SERVICES.values()])
        self._server = grpc.aio.server(
            interceptors=(Guard(self.access, self.front.metrics),), options=channel_options(config)
        )
        self._server.add_generic_rpc_handlers(
            (
                handlers(
                    Inference(self.front),
                    SERVICES["Inference"],
                    config.max_message_mib << 20,
                    self.front.metrics,
                ),
                handlers(
                    Control(self.front), SERVICES["Control"], CONTROL_LIMIT, self.front.metrics
                ),
            )
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if config.reflection:
            _reflect((*self._health.names, HEALTH, reflection.SERVICE_NAME), self._server)

    async def start(self) -> None:
        """Listens. Errors: ConfigError where the address cannot be had."""
        try:
            self.ports["grpc"] = self._listen(f"{self._host}:{self.config.port}")
        except RuntimeError:
            raise ConfigError(
                "port", f"cannot listen on {self._host}:{self.config.port}: is it taken?"
            ) from None
        config = self.config
        access = self.access
        metrics = self.front.metrics
        http = HttpGuard(
            users(self.front, Readiness(self.front, access.anonymous)),
            config,
            access.authenticate,
            OPEN_PATHS,
            metrics,
        )
        admin = HttpGuard(
            operators(self.front),
            config,
            functools.partial(access.authenticate, admin=True),
            frozenset(),
            metrics,
        )
        for name, app, port in (
            ("http", http, config.http_port),
            ("admin", admin, config.admin_port),
        ):
            if port is not None:
                listener = Listener(
                    app,
                    config,
                    f"{name}_port",
                    port,
                    None if self.tls is None else self.tls.context(),
                )
                self._listeners.append(listener)
                self.ports[name] = listener.port
        for listener in self._listeners:
            await listener.start()
        await self._server.start()
        self._watchers = [
            asyncio.create_task(self._watch()),
            asyncio.create_task(self._watch_files()),
        ]

    def address(self, name: str) -> str:
        """Of one of `ports`: HOST:PORT of grpc, a URL of the others."""
        scheme = "" if name == "grpc" else "http://" if self.tls is None else "https://"
        return f"{scheme}{self._host}:{self.ports[name]}"

    def _listen(self, address: str) -> int:
        if self.tls is None:
            return self._server.add_insecure_port(address)
        return self._server.add_secure_port(address, self.tls.credentials())

    def open(self, engine: Any, tokenizer: Any, guides: Guides) -> None:
        self.front.open(engine, tokenizer, guides)
        self._watchers.append(asyncio.create_task(self.front.metrics.watch_loop()))
        self._health.tell(True)
        log.info(
            "serving on %s: %s",
            self.config.host,
            ", ".join(f"{name} {port}" for name, port in self.ports.items()),
        )

    async def drain(self) -> None:
        """Takes no new requests, gives the running ones `drain_timeout`, ends the rest with
        UNAVAILABLE."""
        self.front.state = STOPPING
        self._health.tell(False)
        if self.front.streams:
            log.info(
                "draining: %d requests have %g s to finish",
                len(self.front.streams),
                self.config.drain_timeout,
            )
        deadline = asyncio.get_running_loop().time() + self.config.drain_timeout
        while self.front.streams and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        left = self.front.abort_all(RequestError("", "the server is shutting down", "UNAVAILABLE"))
        if left:
            log.warning("%d requests were aborted", left)

    async def stop(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await self._server.stop(STOP_SECONDS)
        for listener in self._listeners:
            await listener.stop()
        await asyncio.to_thread(self.front.close)

    async def _watch(self) -> None:
        period = min(0.25, self.config.progress_interval / 4)
        while True:
            await asyncio.sleep(period)
            self.front.watch()
            # which changes by itself, or as an operator asks
            self._health.tell(self.front.state == SERVING)

    async def _watch_files(self) -> None:
        while True:
            await asyncio.sleep(FILES_SECONDS)
            try:
                await self.access.refresh()
                if self.tls is not None:
                    self.tls.refresh()
            except Exception:  # a key that was taken back would work for ever
                log.exception("the files of keys and certificates were not read again")


async def run(
    config: ServerConfig, build: Build, listening: Callable[[Server], None], stop: asyncio.Event
) -> bool:
    """Serves until `stop` is set. `build` makes the engine and its tokenizer, on a thread of its
    own; what it raises ends the server.

    Returns whether the engine was ever built and has closed; if not, a thread that builds it, or
    waits for a step, may still be busy.
    """
    server = Server(config)
    engine = None
    await server.start()
    listening(server)
    stopping = asyncio.create_task(stop.wait())
    with _shared_interpreter():
        try:
            built = _in_thread(functools.partial(_settled, build))
            await asyncio.wait((built, stopping), return_when=asyncio.FIRST_COMPLETED)
            if built.done():
                engine, tokenizer, guides = built.result()
                engine.start()
                server.open(engine, tokenizer, guides)
                await stopping
        finally:
            stopping.cancel()
            await server.drain()
            await server.stop()
            if engine is not None:
                engine.close()
    return engine is not None and engine.stuck() is None


@contextlib.contextmanager
def _shared_interpreter() -> Iterator[None]:
    """The engine's thread and the event loop take turns often. At the end the garbage collector is
    as before, see `_settled`."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
        gc.unfreeze()


def _settled(build: Build) -> tuple[Any, Any, Guides]:
    """What was built, and what compiles guides for it, live as long as the server. Each look of the
    garbage collector at it, some 400,000 objects, would hold up the engine and all streams for a
    quarter of a second."""
    engine, tokenizer = build()
    guides = Guides(tokenizer, engine.model.vocab, engine.model.eos_ids)
    guides.prepare()
    if tokenizer is not None:
        # which makes a copy of its vocabulary at the first time
        tokenizer.encode("", special=False)
    gc.collect()
    gc.freeze()
    return engine, tokenizer, guides


def serve(config: ServerConfig, build: Build, listening: Callable[[Server], None]) -> bool:
    """`run` until SIGTERM or SIGINT; a second signal ends the process at once."""

    async def main() -> bool:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def signalled(number: int) -> None:
            loop.remove_signal_handler(number)
            stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, signalled, number)
        return await run(config, build, listening, stop)

    return event_loop.run(main())


class Background:
    """A server on a thread of its own, for notebooks, the demo and tests. `with Background(config,
    build) as server` listens."""

    def __init__(self, config: ServerConfig, build: Build):
        self._config = config
        self._build = build
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
        with contextlib.suppress(RuntimeError):  # it ended by itself
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        if self._error is not None and kind is None:
            raise self._error

    def wait_ready(self) -> None:
        """Returns once requests are taken. Errors: what building the engine raised."""
        while self._thread.is_alive() and self.server.front.engine is None:
            self._thread.join(0.02)
        if self._error is not None:
            raise self._error

    @property
    def target(self) -> str:
        """The gRPC address."""
        return self.server.address("grpc")

    @property
    def url(self) -> str:
        """Of the HTTP port."""
        return self.server.address("http")

    def _listening(self, server: Server) -> None:
        self.server = server
        self._started.set()

    def _main(self) -> None:
        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            self._stop = asyncio.Event()
            await run(self._config, self._build, self._listening, self._stop)

        try:
            event_loop.run(main())
        except Exception as error:
            self._error = error
        finally:
            self._started.set()


def _reflect(names: Sequence[str], server: grpc.aio.Server) -> None:
    """Reflection under its old name, v1alpha, and its new one; the messages are the same, the
    library knows only the old one."""
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


def _in_thread(work: Callable[[], Any]) -> asyncio.Future:
    """A daemon thread: unlike an executor's it does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    done = asyncio.get_running_loop().create_future()

    def tell(setter: Callable[[Any], None], value: Any) -> None:
        if not done.done():
            setter(value)

    def main() -> None:
        try:
            result = work()
        except BaseException as error:
            tell_loop = (done.set_exception, error)
        else:
            tell_loop = (done.set_result, result)
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(tell, *tell_loop)

    threading.Thread(target=main, name="jaxserve-build", daemon=True).start()
    return done
