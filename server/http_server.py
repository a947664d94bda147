"""HTTP listeners and their connections.

uvicorn reads and writes; this adds what it leaves open. A connection must send its header in time
and no longer than allowed; the number of connections is limited; and a caller who does not read its
response is cut off. `http_guard` checks what was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxserve.server import logs
from jaxserve.server.event_loop import MAX_READY_SOCKETS
from jaxserve.server.http_errors import HttpError, error_body
from jaxserve.server.http_guard import header_too_long
from jaxserve.settings.schema import ConfigError, ServerConfig

connection_log = logging.getLogger(__name__)
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
            self._refuse(HttpError("", "there are too many connections", 503))
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
            self._refuse(header_too_long(self.limits))
        else:
            self._refuse(HttpError("", "this is not HTTP/1.1", 400))

    @property
    def _max_header_bytes(self) -> int:
        return self.limits.max_header_kib << 10

    @property
    def _reading_header(self) -> bool:
        return self.conn.their_state is h11.IDLE

    def _start_header_timer(self) -> None:
        if self._header_timer is None:
            error = HttpError("", "the header took too long", 408)
            self._header_timer = self.loop.call_later(
                self.limits.header_timeout, self._refuse, error
            )

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _refuse(self, error: HttpError) -> None:
        """Sends an error without a request to answer, and closes the connection."""
        body = json.dumps(error_body(error)).encode()
        head = (
            f"HTTP/1.1 {error.code} \r\n"
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
