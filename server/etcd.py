"""A client of etcd v3 by its HTTP gateway: keys under leases, lists of them, and their changes.

https://etcd.io/docs/v3.5/dev-guide/api_grpc_gateway/
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import http.client
import json
import os
import re
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from jaxserve.settings.schema import ConfigError

T = TypeVar("T")
USER = "JAXSERVE_ETCD_USER"
PASSWORD = "JAXSERVE_ETCD_PASSWORD"
CALL_SECONDS = 2.0  # for a server of etcd to answer; then the next one is asked
MAX_ANSWER_BYTES = 4 << 20
PAGE_KEYS = 512  # of a list, in one answer
WATCH_SECONDS = 30.0  # that a watch may be silent; then another one goes on
UNAUTHENTICATED = 401
URL = re.compile(r"(etcds?)://([^/@]+)(?:/([A-Za-z0-9._/-]{0,200}))?")
ENDPOINT = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
DEFAULT_PREFIX = "jaxserve"


class EtcdError(OSError):
    """etcd does not answer, or refuses."""


class HistoryLost(EtcdError):
    """Changes since a revision are not known any more: keys are to be listed again."""


class Key(NamedTuple):
    """A key and its value; None: it was deleted. revision: of its last change."""

    name: str
    value: str | None
    revision: int


class Listing(NamedTuple):
    """Keys in their order, as of a revision of the whole etcd cluster with the id `cluster`."""

    keys: list[Key]
    revision: int
    cluster: str


@dataclasses.dataclass(frozen=True)
class EtcdUrl:
    """Address of etcd. endpoints: HOST:PORT of its servers. prefix: of all keys, without slashes at
    its ends. tls: whether connections are encrypted."""

    endpoints: tuple[str, ...]
    prefix: str
    tls: bool

    @classmethod
    def parse(cls, text: str, field: str) -> EtcdUrl:
        """Reads etcd://HOST:PORT[,HOST:PORT...][/PREFIX], or etcds:// for TLS. Errors: ConfigError
        that names `field`."""
        match = URL.fullmatch(text)
        endpoints = tuple(match[2].split(",")) if match else ()
        matches = [ENDPOINT.fullmatch(endpoint) for endpoint in endpoints]
        if match is None or not all(one and 0 < int(one[2]) < 65536 for one in matches):
            message = "is not etcd://HOST:PORT[,HOST:PORT...][/PREFIX], or etcds:// for TLS"
            raise ConfigError(
                field, f"what is given {message}; {USER} and {PASSWORD} tell who asks"
            )
        return cls(endpoints, (match[3] or "").strip("/") or DEFAULT_PREFIX, match[1] == "etcds")


class Etcd:
    """Calls etcd's servers, the next one where one does not answer. Each call takes at most a few
    CALL_SECONDS per server, and raises EtcdError. One thread at a time may call.

    Certificates are checked against the system's authorities, or those of SSL_CERT_FILE. User and
    password are those of the environment, if there are any.
    """

    def __init__(self, url: EtcdUrl):
        self._url = url
        self._context = ssl.create_default_context() if url.tls else None
        self._token = ""

    def grant(self, seconds: int) -> str:
        """Returns a new lease that ends after so long without `renew`."""
        return str(self._field(self._call("lease/grant", {"TTL": seconds}), "ID"))

    def renew(self, lease: str) -> bool:
        """Renews a lease; returns False if it has ended."""
        answer = self._field(self._call("lease/keepalive", {"ID": lease}), "result")
        return isinstance(answer, dict) and _number(answer.get("TTL", 0)) > 0

    def revoke(self, lease: str) -> None:
        """Ends a lease, with its keys."""
        self._call("lease/revoke", {"ID": lease})

    def put(self, key: str, value: str, lease: str) -> None:
        """Sets a key that is gone when the lease ends."""
        self._call("kv/put", {"key": _encoded(key), "value": _encoded(value), "lease": lease})

    def put_if(self, key: str, value: str, revision: int) -> bool:
        """Sets a key without a lease if it was last changed at `revision`; 0: if it is not there.
        Returns whether it was set."""
        name = _encoded(key)
        unchanged = {"key": name, "target": "MOD", "result": "EQUAL", "mod_revision": revision}
        put = {"request_put": {"key": name, "value": _encoded(value)}}
        answer = self._call("kv/txn", {"compare": [unchanged], "success": [put]})
        return answer.get("succeeded") is True

    def list(self, prefix: str) -> Listing:
        """Returns all keys that begin with `prefix`, as of one revision."""
        question = {"range_end": _encoded(_end(prefix)), "limit": PAGE_KEYS}
        keys: list[Key] = []
        revision = 0
        first = prefix
        while True:
            answer = self._call(
                "kv/range", {**question, "key": _encoded(first), "revision": revision}
            )
            page = [_key(row) for row in answer.get("kvs", [])]
            keys += page
            cluster, found = _header(answer)
            revision = revision or found
            if not answer.get("more"):
                return Listing(keys, revision, cluster)
            first = keys[-1].name + "\0"

    def watch(self, prefix: str, since: Listing) -> Watch:
        """Returns the changes of keys that begin with `prefix` after a listing. Errors:
        HistoryLost."""
        create = {
            "key": _encoded(prefix),
            "range_end": _encoded(_end(prefix)),
            "start_revision": since.revision + 1,
        }
        watch = self._any_endpoint(
            lambda endpoint: Watch(
                *self._authenticated(endpoint, "watch", {"create_request": create})
            )
        )
        cluster, revision = watch.begin()
        if cluster != since.cluster or revision < since.revision:
            watch.end()
            raise HistoryLost("etcd has lost what it had")
        return watch

    def _call(self, path: str, question: dict[str, Any]) -> dict[str, Any]:
        return self._any_endpoint(lambda endpoint: self._answer(endpoint, path, question))

    def _any_endpoint(self, ask: Callable[[str], T]) -> T:
        fault: EtcdError | None = None
        for endpoint in self._url.endpoints:
            try:
                return ask(endpoint)
            except EtcdError as error:
                fault = error
        assert fault is not None
        raise fault

    def _answer(self, endpoint: str, path: str, question: dict[str, Any]) -> dict[str, Any]:
        _, response = self._authenticated(endpoint, path, question)
        with contextlib.closing(response):
            return _content(endpoint, response)

    def _authenticated(
        self, endpoint: str, path: str, question: dict[str, Any]
    ) -> tuple[socket.socket, http.client.HTTPResponse]:
        """Calls with a token, which is requested if there is none or it has expired. Returns the
        socket and the response, which was not read."""
        user, password = os.environ.get(USER), os.environ.get(PASSWORD, "")
        status, answer = 0, {}
        for _ in range(2):
            if user and not self._token:
                self._token = self._authenticate(endpoint, user, password)
            sock, response = self._ask(endpoint, path, question)
            if response.status == http.client.OK:
                return sock, response
            status = response.status
            with contextlib.closing(response):
                answer = _content(endpoint, response)
            self._token = ""
            if status != UNAUTHENTICATED:
                break
        message = str(answer.get("message") or answer.get("error"))[:200]
        raise EtcdError(f"etcd at {endpoint} answered {path} with status {status}: {message}")

    def _authenticate(self, endpoint: str, user: str, password: str) -> str:
        """Returns a token. Errors: EtcdError if user and password are not accepted."""
        who = {"name": user, "password": password}
        _, response = self._ask(endpoint, "auth/authenticate", who)
        with contextlib.closing(response):
            answer = _content(endpoint, response)
        token = str(answer.get("token", "")) if response.status == http.client.OK else ""
        if not token:
            raise EtcdError(f"etcd at {endpoint} does not accept {USER} and {PASSWORD}")
        return token

    def _ask(
        self, endpoint: str, path: str, question: dict[str, Any]
    ) -> tuple[socket.socket, http.client.HTTPResponse]:
        connection = self._connection(endpoint)
        headers = {"Connection": "close"}  # the response owns the socket
        if self._token:
            headers["Authorization"] = self._token
        try:
            connection.connect()
            sock = connection.sock
            connection.request("POST", f"/v3/{path}", json.dumps(question), headers)
            return sock, connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise EtcdError(f"etcd at {endpoint} does not answer: {error}") from None

    def _connection(self, endpoint: str) -> http.client.HTTPConnection:
        if self._context is None:
            return http.client.HTTPConnection(endpoint, timeout=CALL_SECONDS)
        return http.client.HTTPSConnection(endpoint, timeout=CALL_SECONDS, context=self._context)

    def _field(self, answer: dict[str, Any], name: str) -> Any:
        if name not in answer:
            raise EtcdError(f"etcd answered without {name}")
        return answer[name]


class Watch:
    """Iterates over changes of keys, which come in lists with the revision of the last one. It ends
    when etcd was silent for WATCH_SECONDS, or another thread called `close`. Errors: EtcdError."""

    def __init__(self, sock: socket.socket, response: http.client.HTTPResponse):
        self._sock = sock
        self._response = response
        self._closed = False

    def begin(self) -> tuple[str, int]:
        """Returns the cluster's id and its revision when the watch began."""
        message = self._read()
        if message is None or not message.get("created"):
            self.end()
            raise EtcdError("etcd did not begin to watch")
        self._sock.settimeout(WATCH_SECONDS)
        return _header(message)

    def __iter__(self) -> Iterator[tuple[list[Key], int]]:
        try:
            while (message := self._read()) is not None:
                if message.get("canceled"):
                    raise HistoryLost(f"etcd has ended a watch: {message.get('cancel_reason')}")
                changes = [_change(event) for event in message.get("events", [])]
                yield changes, _header(message)[1]
        finally:
            self.end()

    def _read(self) -> dict[str, Any] | None:
        """Returns the next message; None at the end."""
        try:
            line = self._response.readline(MAX_ANSWER_BYTES + 1)
        except TimeoutError:
            return None
        except (OSError, http.client.HTTPException, ValueError) as error:
            if self._closed:
                return None
            raise EtcdError(f"etcd has ended a watch: {error}") from None
        if self._closed:
            return None
        try:
            result = json.loads(line)["result"]
        except (ValueError, KeyError, TypeError):
            raise EtcdError("etcd has ended a watch") from None
        if not isinstance(result, dict):
            raise EtcdError("etcd described a change in another form")
        return result

    def close(self) -> None:
        """Ends the watch: a thread that iterates returns. For other threads."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Closes the connection. For the thread that iterates."""
        self._response.close()


def _content(endpoint: str, response: http.client.HTTPResponse) -> dict[str, Any]:
    """Reads an answer. Errors: EtcdError."""
    try:
        content = response.read(MAX_ANSWER_BYTES + 1)
        if len(content) > MAX_ANSWER_BYTES:
            raise EtcdError(f"etcd at {endpoint} answered over {MAX_ANSWER_BYTES} bytes")
        answer = json.loads(content)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise EtcdError(f"etcd at {endpoint} does not answer: {error}") from None
    return answer if isinstance(answer, dict) else {}


def _header(answer: dict[str, Any]) -> tuple[str, int]:
    """Returns the cluster's id and its revision of an answer."""
    header = answer.get("header", {})
    return str(header.get("cluster_id", "")), _number(header.get("revision", 0))


def _key(row: dict[str, Any]) -> Key:
    """Reads a key of an answer. Errors: EtcdError for another form."""
    try:
        name, value = (base64.b64decode(row.get(part, "")).decode() for part in ("key", "value"))
    except (AttributeError, TypeError, ValueError):
        raise EtcdError("etcd answered a list in another form") from None
    return Key(name, value, _number(row.get("mod_revision", 0)))


def _change(event: dict[str, Any]) -> Key:
    key = _key(event.get("kv", {}))
    return key._replace(value=None) if event.get("type") == "DELETE" else key


def _end(prefix: str) -> str:
    """Returns the first key after all that begin with `prefix`."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _number(value: Any) -> int:
    """A 64-bit number, which JSON has as text."""
    try:
        return int(value)
    except (TypeError, ValueError):
        return 0
