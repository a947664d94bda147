"""Checks of HTTP requests before any application: the size of header and body, API keys and
browsers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import urllib.parse
from collections.abc import Callable, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.api.errors import RequestError, internal_error
from jaxserve.server.auth.access import Caller, sole_header
from jaxserve.server.frontend_metrics import FrontendMetrics
from jaxserve.server.http_errors import HttpError, error_response
from jaxserve.server.own_address import is_loopback
from jaxserve.settings.schema import ServerConfig

log = logging.getLogger(__name__)
MAX_HEADERS = 256  # of a request
LINE_BYTES = 4  # of a header beside its name and value
API_PATHS = "/v1/"  # a slash at the end of these has no effect
REQUEST_ID = b"x-request-id"
SKIPPED_BYTES = 1 << 16  # of the body of a call that is refused unread


class _SendMonitor:
    """Sends a response, and notes its status, None before it begins, and whether all was sent.

    request_id: as the caller sent it, to be sent back; empty where it sent none.
    """

    def __init__(self, send: Send, request_id: bytes):
        self.status: int | None = None
        self.complete = False
        self._send = send
        self._request_id = request_id

    async def __call__(self, message: Message) -> None:
        self.status = message.get("status", self.status)
        if message["type"] == "http.response.start" and self._request_id:
            others = [header for header in message["headers"] if header[0] != REQUEST_ID]
            message = {**message, "headers": [*others, (REQUEST_ID, self._request_id)]}
        is_body = message["type"] == "http.response.body"
        self.complete = is_body and not message.get("more_body", False)
        await self._send(message)


class HttpGuard:
    """Wraps an application: authenticates, refuses encodings, large headers, large bodies and other
    sites' pages, answers whatever the application raises, and counts responses.

    authenticate: finds the caller of an Authorization header, see `Authenticator.authenticate`; it
    is left in the request's state. open_paths: that need no API key. throttled_paths: whose calls
    are refused unread at overload, see `Throttle`.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        authenticate: Callable[[str | None], Caller],
        open_paths: frozenset[str],
        metrics: FrontendMetrics,
        throttled_paths: frozenset[str] = frozenset(),
    ):
        self._app = app
        self._config = config
        self._authenticate = authenticate
        self._open_paths = open_paths
        self._metrics = metrics
        self._throttled_paths = throttled_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        monitor = _SendMonitor(send, dict(scope["headers"]).get(REQUEST_ID, b""))
        try:
            await self._respond(scope, receive, monitor)
        finally:
            self._metrics.answered("http", 499 if monitor.status is None else monitor.status)

    async def _respond(self, scope: Scope, receive: Receive, monitor: _SendMonitor) -> None:
        try:
            self._check(scope)
            if scope["method"] == "POST" and scope["path"].rstrip("/") in self._throttled_paths:
                await self._throttle(scope, receive)
            await self._app(_routed(scope), self._limited(receive), monitor)
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
        self._check_header_size(scope)
        if scope["path"] not in self._open_paths:
            scope["state"]["caller"] = self._authenticate(_authorization(scope))
        headers = dict(scope["headers"])
        self._check_browser(scope["method"], headers)
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise HttpError("content-encoding", "bodies must not be compressed", 415)
        length = headers.get(b"content-length", b"0")
        if int(length) > self._max_body_bytes:  # h11 has checked that it is a number
            raise self._too_large()

    async def _throttle(self, scope: Scope, receive: Receive) -> None:
        """Refuses a call at overload. A small body is received first, so that the connection can be
        used again, and unread bytes do not reset it. Errors: RequestError."""
        caller: Caller = scope["state"]["caller"]
        try:
            caller.usage.throttle.check(asyncio.get_running_loop().time())
        except RequestError:
            length = int(dict(scope["headers"]).get(b"content-length", b"0"))
            if length <= SKIPPED_BYTES:
                receive = self._limited(receive)
                while (await receive()).get("more_body", False):
                    pass
            raise

    def _check_header_size(self, scope: Scope) -> None:
        """Refuses a header that came at once: h11 limits only those that come in pieces."""
        size = len(scope["raw_path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) + LINE_BYTES for name, value in scope["headers"])
        if size > self._config.max_header_kib << 10:
            raise header_too_long(self._config)
        if len(scope["headers"]) > MAX_HEADERS:
            raise HttpError("", f"there are more than {MAX_HEADERS} header fields", 431)

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


def header_too_long(config: ServerConfig) -> HttpError:
    """The error for a header over its limit."""
    return HttpError("", f"the header is longer than {config.max_header_kib} KiB", 431)


def _routed(scope: Scope) -> Scope:
    """The scope that the application routes: HEAD is GET, whose body uvicorn leaves out, and a path
    that comes as a whole URL, as to a proxy, is one without the host."""
    path = urllib.parse.urlsplit(scope["path"]).path if "://" in scope["path"] else scope["path"]
    if path.startswith(API_PATHS):
        path = path.rstrip("/")
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    return {**scope, "path": path, "method": method}


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


def _host_name(host: bytes) -> str:
    """The name or address in a Host header, without its port; '' if there is none."""
    with contextlib.suppress(ValueError):
        return urllib.parse.urlsplit("//" + host.decode("latin-1")).hostname or ""
    return ""
