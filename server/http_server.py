"""HTTP listeners: connection and body limits, API keys and browser checks, before any application.

uvicorn reads and writes; this adds what it leaves open. A connection must send its header in time
and no longer than allowed; the number of connections is limited; a body has a size and a time; and
a caller who does not read its response is cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import json
import logging
import socket
import ssl
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxserve.api.errors import RequestError, internal_error
from jaxserve.server import logs
from jaxserve.server.auth.access import Caller, sole_header
from jaxserve.server.event_loop import MAX_READY_SOCKETS
from jaxserve.server.frontend_metrics import FrontendMetrics
from jaxserve.server.http_errors import HttpError, error_body, error_response
from jaxserve.settings.schema import ConfigError, ServerConfig

log = logging.getLogger(__name__)
connection_log = logging.getLogger(f"{__name__}.connections")
# uvicorn warns of everything that is not HTTP: strangers could fill the log
connection_log.setLevel(logging.ERROR)
STOP_SECONDS = 2.0  # for responses that were cut short to get out
BACKLOG = 1024  # connections that may wait to be accepted


class Connection(H11Protocol):
    """uvicorn's connection, with a time limit for headers, a limit of connections, and a time limit
    for readers. The scope of its requests has the `transport`.

    Builds on uvicorn's internals (`conn`, `flow`, `connections`, `send_400_response`,
    `on_response_complete`): setup.py bounds uvicorn's version.
    """

    limits: ServerConfig  # set by the listener, which derives a class for it

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.logger = connection_log
        self._header_timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None
        self.app = functools.partial(self._with_transport, self.app)  # type: ignore[assignment]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self._refuse(503, "there are too many connections")
        else:
            self._start_header_timer()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._reading_header:
            self._start_header_timer()
        super().data_received(data)
        if not self._reading_header:
            self._stop_header_timer()
        pipelined = len(self.conn.trailing_data[0])
        if self.conn.their_state is h11.DONE and pipelined <= self._max_header_bytes:
            # uvicorn stops reading at a pipelined request: then a disconnect would go unnoticed
            self.flow.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        if self._reader_timer is not None:
            self._reader_timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # the unread rest of a body would have no time limit
        if self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY:
            self.transport.close()
        self._check_reader()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._check_reader()

    def _check_reader(self, unread_before: int | None = None) -> None:
        """Cuts off a caller who has read nothing of its response in `stall_timeout`.

        unread_before: unsent bytes when the timer was set; None to set it.
        """
        unread = self.transport.get_write_buffer_size()
        if unread_before is None and self._reader_timer is not None:
            return
        self._reader_timer = None
        if unread_before is not None and unread >= unread_before:
            self.transport.abort()
        elif unread:
            self._reader_timer = self.loop.call_later(
                self.limits.stall_timeout, self._check_reader, unread
            )

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for what it cannot parse."""
        if len(self.conn.trailing_data[0]) > self._max_header_bytes:
            self._refuse(431, f"the header is longer than {self.limits.max_header_kib} KiB")
        else:
            self._refuse(400, "this is not HTTP/1.1")

    @property
    def _max_header_bytes(self) -> int:
        return self.limits.max_header_kib << 10

    @property
    def _reading_header(self) -> bool:
        return self.conn.their_state is h11.IDLE

    def _start_header_timer(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(
                self.limits.header_timeout, self._refuse, 408, "the header took too long"
            )

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _refuse(self, code: int, message: str) -> None:
        """Sends an error without a request to answer, and closes the connection."""
        body = json.dumps(error_body(HttpError("", message, code))).encode()
        head = (
            f"HTTP/1.1 {code} \r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\n"
            "connection: close\r\n\r\n"
        )
        self._stop_header_timer()
        self.transport.write(head.encode() + body)
        self.transport.close()

    async def _with_transport(
        self, app: ASGIApp, scope: Scope, receive: Receive, send: Send
    ) -> None:
        # unbound: a kept connection may be read in the context of the request before
        with logs.bound(""):
            await app({**scope, "transport": self.transport}, receive, send)


class _SendMonitor:
    """Sends a response, and notes its status, None before it begins, and whether all was sent."""

    def __init__(self, send: Send):
        self.status: int | None = None
        self.complete = False
        self._send = send

    async def __call__(self, message: Message) -> None:
        self.status = message.get("status", self.status)
        is_body = message["type"] == "http.response.body"
        self.complete = is_body and not message.get("more_body", False)
        await self._send(message)


class HttpGuard:
    """Wraps an application: authenticates, refuses encodings, large bodies and other sites' pages,
    answers whatever the application raises, and counts responses.

    authenticate: finds the caller of an Authorization header, see `Authenticator.authenticate`; it
    is left in the request's state. open_paths: that need no API key.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        authenticate: Callable[[str | None], Caller],
        open_paths: frozenset[str],
        metrics: FrontendMetrics,
    ):
        self._app = app
        self._config = config
        self._authenticate = authenticate
        self._open_paths = open_paths
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        monitor = _SendMonitor(send)
        try:
            await self._respond(scope, receive, monitor)
        finally:
            self._metrics.answered("http", 499 if monitor.status is None else monitor.status)

    async def _respond(self, scope: Scope, receive: Receive, monitor: _SendMonitor) -> None:
        try:
            self._check(scope)
            await self._app(scope, self._limited(receive), monitor)
        except RequestError as error:
            if monitor.status is not None:
                raise
            await error_response(error)(scope, receive, monitor)
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"][:200])
            if monitor.status is None:
                await error_response(internal_error())(scope, receive, monitor)
            elif not monitor.complete:
                scope["transport"].abort()

    def _check(self, scope: Scope) -> None:
        """Refuses a request by its header. Errors: RequestError."""
        if scope["path"] not in self._open_paths:
            scope["state"]["caller"] = self._authenticate(_authorization(scope))
        headers = dict(scope["headers"])
        self._check_browser(scope["method"], headers)
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise HttpError("content-encoding", "bodies must not be compressed", 415)
        length = headers.get(b"content-length", b"0")
        if int(length) > self._max_body_bytes:  # h11 has checked that it is a number
            raise self._too_large()

    def _check_browser(self, method: str, headers: Mapping[bytes, bytes]) -> None:
        """Refuses requests that another site's page makes a browser send.

        Without API keys, DNS rebinding (another site's name that resolves to the loopback address)
        makes its page look like ours, so names are checked too. Browsers send Sec-Fetch-Site only
        to addresses they trust, Origin to all. Errors: RequestError, PERMISSION_DENIED.
        """
        config = self._config
        host = headers.get(b"host", b"")
        local_only = not config.asks_for_keys and not config.insecure and is_loopback(config.host)
        if local_only and host and not is_loopback(_host_name(host)):
            raise RequestError(
                "host",
                "without --api_key, --api_keys or --insecure the address must be a loopback one",
                "PERMISSION_DENIED",
            )
        if method in ("GET", "HEAD"):
            return
        site = headers.get(b"sec-fetch-site")
        origin = headers.get(b"origin")
        if origin is not None and site is None:
            site = b"same-origin" if origin.partition(b"://")[2] == host else b"cross-site"
        if origin is not None and self._allows(origin.decode("latin-1")):
            return
        if site not in (None, b"same-origin", b"none"):
            raise RequestError(
                "origin",
                "pages of other sites may not send requests; --allowed_origins says which may",
                "PERMISSION_DENIED",
            )

    def _allows(self, origin: str) -> bool:
        return not {"*", origin}.isdisjoint(self._config.allowed_origins)

    @property
    def _max_body_bytes(self) -> int:
        return self._config.max_body_mib << 20

    def _too_large(self) -> HttpError:
        return HttpError("", f"the body is larger than {self._config.max_body_mib} MiB", 413)

    def _limited(self, receive: Receive) -> Receive:
        """Receives a body of limited size, in limited time. Errors: HttpError."""
        loop = asyncio.get_running_loop()
        size = 0
        ended = False
        deadline = loop.time() + self._config.body_timeout

        async def receive_limited() -> Message:
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
            if size > self._max_body_bytes:
                raise self._too_large()
            ended = not message.get("more_body", False)
            return message

        return receive_limited


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers: the supervisor has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Listener:
    """Serves an application on a port.

    port_field: the setting with the port, for errors. port: 0 for any free one; the attribute
    `port` is the one in use. Errors: ConfigError if the address cannot be had.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        port_field: str,
        port: int,
        ssl_context: ssl.SSLContext | None = None,
    ):
        self._socket = _bind(config.host.strip("[]"), port, port_field)
        self.port = self._socket.getsockname()[1]
        settings = uvicorn.Config(
            app,
            http=type("LimitedConnection", (Connection,), {"limits": config}),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=config.max_header_kib << 10,
            proxy_headers=False,
            backlog=MAX_READY_SOCKETS,
            # asyncio, which this goes to, takes fractions
            timeout_keep_alive=config.keep_alive,  # type: ignore[arg-type]
            timeout_graceful_shutdown=int(STOP_SECONDS),
        )
        settings.load()
        settings.ssl = ssl_context
        self._server = _Server(settings)

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve([self._socket]))
        while not self._server.started:
            await asyncio.sleep(0)
        # asyncio uses its `backlog` also for how many connections it accepts at once, so that the
        # number above is small; how many may wait is set again
        self._socket.listen(BACKLOG)

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._server.server_state.connections)

    async def stop(self) -> None:
        self._server.should_exit = True
        await self._task


def _authorization(scope: Scope) -> str | None:
    """Returns the header Authorization, or else the key of x-api-key, as Anthropic's clients send
    it. Errors: RequestError for several of one name."""
    values = {name: _sole_value(scope, name) for name in (b"authorization", b"x-api-key")}
    key = values[b"x-api-key"]
    if values[b"authorization"] is None and key is not None:
        return f"Bearer {key}"
    return values[b"authorization"]


def _sole_value(scope: Scope, header: bytes) -> str | None:
    values = [value.decode("latin-1") for name, value in scope["headers"] if name == header]
    return sole_header(values)


def _bind(host: str, port: int, port_field: str) -> socket.socket:
    """A listening socket. Errors: ConfigError."""
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # with its protocol: asyncio sets TCP_NODELAY only on what it knows to be TCP
        listener = socket.socket(*info[:3])
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(info[4])
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        message = f"cannot listen on {host}:{port}: {error.strerror or error}"
        raise ConfigError(port_field, message) from None
    return listener


def _host_name(host: bytes) -> str:
    """The name or address in a Host header, without its port; '' if there is none."""
    with contextlib.suppress(ValueError):
        return urllib.parse.urlsplit("//" + host.decode("latin-1")).hostname or ""
    return ""


def is_loopback(host: str) -> bool:
    """Returns whether an address, or a name, is the loopback one."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"
