"""Connections over HTTP: who may come in, how much one may send, how slowly, and how answers go out
that take minutes.

uvicorn reads and writes; what it leaves open is here. A connection must send its header in time and
no more of it than allowed; there are so many connections and no more; a body has a size and a time;
and whoever does not read what he asked for is cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import json
import logging
import socket
import urllib.parse
from collections.abc import (
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    MutableMapping,
)
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxserve.api.errors import RequestError, internal_error
from jaxserve.server import logs
from jaxserve.server.event_loop import MAX_READY_SOCKETS
from jaxserve.server.frontend_metrics import FrontendMetrics
from jaxserve.server.http_errors import HttpError, error_body, error_response
from jaxserve.settings.schema import ConfigError, ServerConfig

log = logging.getLogger(__name__)
of_connections = logging.getLogger(f"{__name__}.connections")
# whoever sends what is not HTTP cannot fill our log with warnings
of_connections.setLevel(logging.ERROR)
STOP_SECONDS = 2.0  # for answers that were cut short to get out
BACKLOG = 1024
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Connection(H11Protocol):
    """uvicorn's, with a time limit for headers and a limit of connections. Applications find the
    transport in their scope."""

    limits: ServerConfig  # set by the listener that makes the class

    def __init__(self, *arguments: Any, **rest: Any):
        super().__init__(*arguments, **rest)
        self.logger = of_connections
        self._timer: asyncio.TimerHandle | None = None
        self._reader: asyncio.TimerHandle | None = None
        self.app = functools.partial(self._with_transport, self.app)  # type: ignore[assignment]

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self._refuse(503, "there are too many connections")
        else:
            self._expect_header()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._reading_header:
            self._expect_header()
        super().data_received(data)
        if not self._reading_header:
            self._stop_timer()
        if (
            self.conn.their_state is h11.DONE
            and len(self.conn.trailing_data[0]) <= self.limits.max_header_kib << 10
        ):
            # whoever sends his next request before the answer may still go away
            self.flow.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._reader is not None:
            self._reader.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # the rest of the body has no time limit
        if self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY:
            self.transport.close()
        self._watch_reader()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def _watch_reader(self, left: int | None = None) -> None:
        """Cuts off a caller who has read nothing of what waits for him in `stall_timeout`. left:
        bytes that waited then."""
        size = self.transport.get_write_buffer_size()
        if left is None and self._reader is not None:
            return
        self._reader = None
        if left is not None and size >= left:
            self.transport.abort()
        elif size:
            self._reader = self.loop.call_later(self.limits.stall_timeout, self._watch_reader, size)

    def send_400_response(self, msg: str) -> None:
        long = len(self.conn.trailing_data[0]) > self.limits.max_header_kib << 10
        self._refuse(
            *(431, f"the header is longer than {self.limits.max_header_kib} KiB")
            if long
            else (400, "this is not HTTP/1.1")
        )

    @property
    def _reading_header(self) -> bool:
        return self.conn.their_state is h11.IDLE

    def _expect_header(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(
                self.limits.header_timeout, self._refuse, 408, "the header took too long"
            )

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, code: int, message: str) -> None:
        """An answer without a request to answer."""
        body = json.dumps(error_body(HttpError("", message, code))).encode()
        head = f"HTTP/1.1 {code} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self._stop_timer()
        self.transport.write(head.encode() + body)
        self.transport.close()

    async def _with_transport(self, app: App, scope: Scope, receive: Receive, send: Send) -> None:
        with logs.bound(""):  # a connection may be read in the name of the request before
            await app({**scope, "transport": self.transport}, receive, send)


class _Sent:
    """Sends, and knows of an answer its status, None before it has begun, and whether all of it was
    sent."""

    def __init__(self, send: Send):
        self.status: int | None = None
        self.whole = False
        self._send = send

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        self.status = message.get("status", self.status)
        self.whole = message["type"] == "http.response.body" and not message.get("more_body", False)
        await self._send(message)


class HttpGuard:
    """Before any application: keys, encodings, sizes, and the last word where something fails."""

    def __init__(
        self,
        app: App,
        config: ServerConfig,
        authenticate: Callable[[str | None], Any],
        open_paths: frozenset[str],
        metrics: FrontendMetrics,
    ):
        self._app = app
        self._config = config
        self._authenticate = authenticate
        self._open = open_paths
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent = _Sent(send)
        try:
            await self._answer(scope, receive, sent)
        finally:
            self._metrics.answered("http", 499 if sent.status is None else sent.status)

    async def _answer(self, scope: Scope, receive: Receive, sent: _Sent) -> None:
        try:
            self._check(scope)
            await self._app(scope, self._bounded(receive), sent)
        except RequestError as error:
            if sent.status is not None:
                raise
            await error_response(error)(scope, receive, sent)  # type: ignore[arg-type]
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"][:200])
            if sent.status is None:
                await error_response(internal_error())(scope, receive, sent)  # type: ignore[arg-type]
            elif not sent.whole:
                scope["transport"].abort()

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        if (
            len(headers) < len(scope["headers"])
            and len([name for name, _ in scope["headers"] if name == b"authorization"]) > 1
        ):
            # which a proxy has looked at, nobody knows
            raise RequestError("authorization", "is there twice", "UNAUTHENTICATED")
        given = headers.get(b"authorization")
        if scope["path"] not in self._open:
            scope["state"]["caller"] = self._authenticate(
                None if given is None else given.decode("latin-1")
            )
        self._check_browser(scope["method"], headers)
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise HttpError("content-encoding", "bodies are read as they are: no compression", 415)
        length = headers.get(b"content-length", b"0")
        if int(length) > self._most:  # h11 has seen that it is a number
            raise self._too_large()

    def _check_browser(self, method: str, headers: Mapping[bytes, bytes]) -> None:
        """A browser brings what its user may do to whichever page asks for it: pages of others send
        nothing here.

        Without keys, a name that is led to the loopback address makes another's page look like
        ours, so names are checked too. Browsers tell the site of a page only to addresses they
        trust, its origin to all.
        """
        config = self._config
        host = headers.get(b"host", b"")
        if (
            config.api_keys is None
            and not config.insecure
            and is_loopback(config.host)
            and host
            and not is_loopback(_name_in(host))
        ):
            raise RequestError(
                "host",
                "without --api_keys or --insecure the address must be a loopback one",
                "PERMISSION_DENIED",
            )
        if method in ("GET", "HEAD"):
            return
        site = headers.get(b"sec-fetch-site")
        origin = headers.get(b"origin")
        if origin is not None and site is None:
            site = b"same-origin" if origin.partition(b"://")[2] == host else b"cross-site"
        if site not in (None, b"same-origin", b"none"):
            raise RequestError(
                "origin", "pages of other sites may not send requests", "PERMISSION_DENIED"
            )

    @property
    def _most(self) -> int:
        return self._config.max_body_mib << 20

    def _too_large(self) -> HttpError:
        return HttpError("", f"the body is larger than {self._config.max_body_mib} MiB", 413)

    def _bounded(self, receive: Receive) -> Receive:
        """Counts what comes of the body, and gives it so much time."""
        loop = asyncio.get_running_loop()
        size = 0
        ended = False
        deadline = loop.time() + self._config.body_timeout

        async def receiving() -> MutableMapping[str, Any]:
            nonlocal size, ended
            if ended:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise HttpError(
                    "", f"the body took longer than {self._config.body_timeout:g} s", 408
                ) from None
            size += len(message.get("body", b""))
            if size > self._most:
                raise self._too_large()
            ended = not message.get("more_body", False)
            return message

        return receiving


class _Quiet(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # they are `launch`'s
        yield


class Listener:
    """An application on a port."""

    def __init__(self, app: App, config: ServerConfig, name: str, port: int, ssl: Any = None):
        """name: of the setting with the port. Errors: ConfigError where the address cannot be
        had."""
        self._socket = _listening(config.host.strip("[]"), port, name)
        self.port = self._socket.getsockname()[1]
        settings = uvicorn.Config(
            app,
            http=type("Limited", (Connection,), {"limits": config}),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=config.max_header_kib << 10,
            proxy_headers=False,
            backlog=MAX_READY_SOCKETS,
            timeout_keep_alive=config.keep_alive,  # type: ignore[arg-type]     # goes to asyncio, which takes fractions
            timeout_graceful_shutdown=int(STOP_SECONDS),
        )
        settings.load()
        settings.ssl = ssl
        self._server = _Quiet(settings)

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve([self._socket]))
        while not self._server.started:
            await asyncio.sleep(0)
        # asyncio has one number for how many may wait and how many it accepts in a turn
        self._socket.listen(BACKLOG)

    async def stop(self) -> None:
        self._server.should_exit = True
        await self._task


def _listening(host: str, port: int, name: str) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # with its protocol: asyncio sends without delay on what it knows to be TCP
        listener = socket.socket(*found[:3])
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(found[4])
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        raise ConfigError(
            name, f"cannot listen on {host}:{port}: {error.strerror or error}"
        ) from None
    return listener


def _name_in(host: bytes) -> str:
    """The name or address in a header `host`, which may have a port; '' where there is none."""
    with contextlib.suppress(ValueError):
        return urllib.parse.urlsplit("//" + host.decode("latin-1")).hostname or ""
    return ""


def is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"
