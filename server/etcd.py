"""A client of etcd v3 by its HTTP gateway: keys under leases, and lists of them.

https://etcd.io/docs/v3.5/dev-guide/api_grpc_gateway/
"""

from __future__ import annotations

import base64
import dataclasses
import http.client
import json
import os
import re
import ssl
from typing import Any

from jaxserve.settings.schema import ConfigError

USER = "JAXSERVE_ETCD_USER"
PASSWORD = "JAXSERVE_ETCD_PASSWORD"
CALL_SECONDS = 2.0  # for a server of etcd to answer; then the next one is asked
MAX_ANSWER_BYTES = 4 << 20
MAX_KEYS = 1024  # of a list
UNAUTHENTICATED = 401
URL = re.compile(r"(etcds?)://([^/@]+)(?:/([A-Za-z0-9._/-]{0,200}))?")
ENDPOINT = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
DEFAULT_PREFIX = "jaxserve"


class EtcdError(OSError):
    """etcd does not answer, or refuses."""


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

    def values(self, prefix: str) -> list[str]:
        """The values of all keys that begin with `prefix`, at most MAX_KEYS, in the order of the
        keys."""
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        question = {"key": _encoded(prefix), "range_end": _encoded(end), "limit": MAX_KEYS}
        rows = self._call("kv/range", question).get("kvs", [])
        try:
            return [base64.b64decode(row.get("value", "")).decode() for row in rows]
        except (AttributeError, TypeError, ValueError):
            raise EtcdError("etcd answered a list in another form") from None

    def _call(self, path: str, question: dict[str, Any]) -> dict[str, Any]:
        fault: EtcdError | None = None
        for endpoint in self._url.endpoints:
            try:
                return self._authenticated(endpoint, path, question)
            except EtcdError as error:
                fault = error
        assert fault is not None
        raise fault

    def _authenticated(self, endpoint: str, path: str, question: dict[str, Any]) -> dict[str, Any]:
        """Calls with a token, which is requested if there is none or it has expired."""
        user, password = os.environ.get(USER), os.environ.get(PASSWORD, "")
        for _ in range(2):
            if user and not self._token:
                who = {"name": user, "password": password}
                status, answer = self._ask(endpoint, "auth/authenticate", who)
                self._token = str(answer.get("token", "")) if status == http.client.OK else ""
                if not self._token:
                    raise EtcdError(f"etcd at {endpoint} does not accept {USER} and {PASSWORD}")
            status, answer = self._ask(endpoint, path, question)
            if status == http.client.OK:
                return answer
            self._token = ""
            if status != UNAUTHENTICATED:
                break
        message = str(answer.get("message") or answer.get("error"))[:200]
        raise EtcdError(f"etcd at {endpoint} answered {path} with status {status}: {message}")

    def _ask(
        self, endpoint: str, path: str, question: dict[str, Any]
    ) -> tuple[int, dict[str, Any]]:
        connection = self._connection(endpoint)
        headers = {"Authorization": self._token} if self._token else {}
        try:
            connection.request("POST", f"/v3/{path}", json.dumps(question), headers)
            response = connection.getresponse()
            content = response.read(MAX_ANSWER_BYTES + 1)
            if len(content) > MAX_ANSWER_BYTES:
                raise EtcdError(f"etcd at {endpoint} answered over {MAX_ANSWER_BYTES} bytes")
            answer = json.loads(content)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise EtcdError(f"etcd at {endpoint} does not answer: {error}") from None
        finally:
            connection.close()
        return response.status, answer if isinstance(answer, dict) else {}

    def _connection(self, endpoint: str) -> http.client.HTTPConnection:
        if self._context is None:
            return http.client.HTTPConnection(endpoint, timeout=CALL_SECONDS)
        return http.client.HTTPSConnection(endpoint, timeout=CALL_SECONDS, context=self._context)

    def _field(self, answer: dict[str, Any], name: str) -> Any:
        if name not in answer:
            raise EtcdError(f"etcd answered without {name}")
        return answer[name]


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _number(value: Any) -> int:
    """A 64-bit number, which JSON has as text."""
    try:
        return int(value)
    except (TypeError, ValueError):
        return 0
