"""A small etcd for tests: the parts of v3's HTTP gateway that registries need, in one process. It
answers as etcd 3.4 does: 64-bit numbers are text, and a lease that has ended renews to nothing."""

from __future__ import annotations

import base64
import itertools
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Gateway:
    """Serves until `stop`; `start` again on the same port with what it had, or `forget` it. users:
    passwords by name; where there are any, other calls need a token, which `expire_tokens` ends."""

    def __init__(self, port: int = 0, users: dict[str, str] | None = None):
        self.keys: dict[bytes, tuple[bytes, str]] = {}  # value and lease of each
        self.leases: dict[str, tuple[int, float]] = {}  # seconds, and when it ends
        self.users = users or {}
        self.tokens: set[str] = set()
        self.calls: list[str] = []
        self._numbers = itertools.count(7587862094803370000)
        self._lock = threading.Lock()
        self.port = port
        self.start()

    def start(self) -> None:
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                size = int(self.headers["Content-Length"])
                status, answer = gateway.answer(
                    self.path, json.loads(self.rfile.read(size)), self.headers["Authorization"]
                )
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def forget(self) -> None:
        with self._lock:
            self.keys.clear()
            self.leases.clear()

    def answer(self, path: str, asked: dict[str, Any], token: str | None) -> tuple[int, dict]:
        with self._lock:
            name = path.removeprefix("/v3/")
            self.calls.append(name)
            if name == "auth/authenticate":
                return self._authenticate(asked)
            if self.users and token not in self.tokens:
                return 401, {"error": "etcdserver: invalid auth token", "code": 16}
            self._expire()
            return getattr(self, "_" + name.replace("/", "_"))(asked)

    def _authenticate(self, asked: dict[str, Any]) -> tuple[int, dict]:
        if self.users.get(asked["name"]) != asked["password"]:
            return 400, {"error": "etcdserver: authentication failed", "code": 3}
        self.tokens.add(token := f"token.{next(self._numbers)}")
        return 200, {"header": {}, "token": token}

    def _expire(self) -> None:
        now = time.monotonic()
        self.leases = {id: lease for id, lease in self.leases.items() if lease[1] > now}
        self.keys = {key: row for key, row in self.keys.items() if row[1] in self.leases}

    def _lease_grant(self, asked: dict[str, Any]) -> tuple[int, dict]:
        id, seconds = str(next(self._numbers)), int(asked["TTL"])
        self.leases[id] = seconds, time.monotonic() + seconds
        return 200, {"header": {}, "ID": id, "TTL": str(seconds)}

    def _lease_keepalive(self, asked: dict[str, Any]) -> tuple[int, dict]:
        id = str(asked["ID"])
        if id not in self.leases:
            return 200, {"result": {"header": {}, "ID": id}}
        seconds = self.leases[id][0]
        self.leases[id] = seconds, time.monotonic() + seconds
        return 200, {"result": {"header": {}, "ID": id, "TTL": str(seconds)}}

    def _lease_revoke(self, asked: dict[str, Any]) -> tuple[int, dict]:
        if self.leases.pop(str(asked["ID"]), None) is None:
            return 404, {"error": "etcdserver: requested lease not found", "code": 5}
        self._expire()
        return 200, {"header": {}}

    def _kv_put(self, asked: dict[str, Any]) -> tuple[int, dict]:
        if asked["lease"] not in self.leases:
            return 404, {"error": "etcdserver: requested lease not found", "code": 5}
        key, value = (base64.b64decode(asked[name]) for name in ("key", "value"))
        self.keys[key] = value, asked["lease"]
        return 200, {"header": {}}

    def _kv_range(self, asked: dict[str, Any]) -> tuple[int, dict]:
        first, end = (base64.b64decode(asked[name]) for name in ("key", "range_end"))
        found = sorted(key for key in self.keys if first <= key < end)[: int(asked["limit"])]
        rows = [[base64.b64encode(part).decode() for part in (k, self.keys[k][0])] for k in found]
        answer: dict[str, Any] = {"header": {}, "count": str(len(found))}
        if found:  # gateways leave out what is empty
            answer["kvs"] = [{"key": key, "value": value, "lease": "1"} for key, value in rows]
        return 200, answer
