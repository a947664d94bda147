"""A small etcd for tests: the parts of v3's HTTP gateway that registries need, in one process. It
answers as etcd 3.5 does: 64-bit numbers are text, what is 0 or empty is left out, and a lease that
has ended renews to nothing."""

from __future__ import annotations

import base64
import itertools
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Row(NamedTuple):
    """A key's value, its lease if it has one, and the revision of its last change."""

    value: bytes
    lease: str
    revision: int


class Gateway:
    """Serves until `stop`; `start` again on the same port with what it had, or `forget` it. users:
    passwords by name; where there are any, other calls need a token. `cut` ends all watches;
    `compact` forgets the history."""

    def __init__(self, port: int = 0, users: dict[str, str] | None = None):
        self.keys: dict[bytes, Row] = {}
        self.leases: dict[str, tuple[int, float]] = {}  # seconds, and when it ends
        self.users = users or {}
        self.tokens: set[str] = set()
        self.calls: list[str] = []
        self.revision = 1
        self.watches = 0  # that are open
        self._history: list[tuple[int, bytes, Row | None]] = []
        self._compacted = 0
        self._cluster = "7"
        self._numbers = itertools.count(7587862094803370000)
        self._lock = threading.Condition()
        self._cuts = 0
        self.port = port
        self.start()

    def start(self) -> None:
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, answer = gateway.answer(self.path, asked, self.headers["Authorization"])
                if status == 200 and self.path == "/v3/watch":
                    self.send_response(200)
                    self.end_headers()
                    for message in gateway.watch(asked["create_request"]):
                        self.wfile.write(json.dumps({"result": message}).encode() + b"\n")
                    return
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
        self.cut()
        self._server.server_close()

    def forget(self) -> None:
        with self._lock:
            self.keys.clear()
            self.leases.clear()
            self._history.clear()
            self.revision = 1
            self._cluster += "7"

    def cut(self) -> None:
        with self._lock:
            self._cuts += 1
            self._lock.notify_all()

    def compact(self) -> None:
        with self._lock:
            self._history.clear()
            self._compacted = self.revision

    def answer(self, path: str, asked: dict[str, Any], token: str | None) -> tuple[int, dict]:
        with self._lock:
            name = path.removeprefix("/v3/")
            self.calls.append(name)
            if name == "auth/authenticate":
                return self._authenticate(asked)
            if self.users and token not in self.tokens:
                return 401, {"error": "etcdserver: invalid auth token", "code": 16}
            self._expire()
            if name == "watch":
                return 200, {}
            return getattr(self, "_" + name.replace("/", "_"))(asked)

    @property
    def _header(self) -> dict[str, str]:
        return {"cluster_id": self._cluster, "revision": str(self.revision)}

    def _authenticate(self, asked: dict[str, Any]) -> tuple[int, dict]:
        if self.users.get(asked["name"]) != asked["password"]:
            return 400, {"error": "etcdserver: authentication failed", "code": 3}
        self.tokens.add(token := f"token.{next(self._numbers)}")
        return 200, {"header": {}, "token": token}

    def _expire(self) -> None:
        now = time.monotonic()
        self.leases = {id: lease for id, lease in self.leases.items() if lease[1] > now}
        for key, row in list(self.keys.items()):
            if row.lease and row.lease not in self.leases:
                self.set(key, None)

    def set(self, key: bytes, value: bytes | None, lease: str = "") -> None:
        """Sets a key, or deletes it."""
        with self._lock:
            self.revision += 1
            row = None if value is None else Row(value, lease, self.revision)
            if row is None:
                self.keys.pop(key, None)
            else:
                self.keys[key] = row
            self._history.append((self.revision, key, row))
            self._lock.notify_all()

    def _lease_grant(self, asked: dict[str, Any]) -> tuple[int, dict]:
        id, seconds = str(next(self._numbers)), int(asked["TTL"])
        self.leases[id] = seconds, time.monotonic() + seconds
        return 200, {"header": self._header, "ID": id, "TTL": str(seconds)}

    def _lease_keepalive(self, asked: dict[str, Any]) -> tuple[int, dict]:
        id = str(asked["ID"])
        if id not in self.leases:
            return 200, {"result": {"header": self._header, "ID": id}}
        seconds = self.leases[id][0]
        self.leases[id] = seconds, time.monotonic() + seconds
        return 200, {"result": {"header": self._header, "ID": id, "TTL": str(seconds)}}

    def _lease_revoke(self, asked: dict[str, Any]) -> tuple[int, dict]:
        if self.leases.pop(str(asked["ID"]), None) is None:
            return 404, {"error": "etcdserver: requested lease not found", "code": 5}
        self._expire()
        return 200, {"header": self._header}

    def _kv_put(self, asked: dict[str, Any]) -> tuple[int, dict]:
        lease = asked.get("lease", "")
        if lease and lease not in self.leases:
            return 404, {"error": "etcdserver: requested lease not found", "code": 5}
        self.set(base64.b64decode(asked["key"]), base64.b64decode(asked["value"]), lease)
        return 200, {"header": self._header}

    def _kv_range(self, asked: dict[str, Any]) -> tuple[int, dict]:
        """Answers as of now, whatever revision is asked for."""
        first, end = (base64.b64decode(asked[name]) for name in ("key", "range_end"))
        found = sorted(key for key in self.keys if first <= key < end)
        page = found[: int(asked["limit"])]
        answer: dict[str, Any] = {"header": self._header, "count": str(len(found))}
        if page:
            answer["kvs"] = [_shown(key, self.keys[key]) for key in page]
        if len(page) < len(found):
            answer["more"] = True
        return 200, answer

    def _kv_txn(self, asked: dict[str, Any]) -> tuple[int, dict]:
        (compare,), (success,) = asked["compare"], asked["success"]
        assert (compare["target"], compare["result"]) == ("MOD", "EQUAL")
        row = self.keys.get(base64.b64decode(compare["key"]))
        if (0 if row is None else row.revision) != int(compare["mod_revision"]):
            return 200, {"header": self._header}
        self._kv_put(success["request_put"])
        return 200, {"header": self._header, "succeeded": True}

    def watch(self, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the messages of a watch until it is cut."""
        first, end = (base64.b64decode(asked[name]) for name in ("key", "range_end"))
        after = int(asked["start_revision"]) - 1
        with self._lock:
            self.watches += 1
            cuts = self._cuts
            begun = {"header": self._header, "created": True}
            compacted = after < self._compacted
        yield begun
        if compacted:
            yield {"header": self._header, "canceled": True, "compact_revision": "1"}
            return
        while True:
            with self._lock:
                self._lock.wait_for(
                    lambda after=after: self._cuts != cuts or self.revision > after, 0.05
                )
                self._expire()
                if self._cuts != cuts:
                    self.watches -= 1
                    return
                news = [one for one in self._history if one[0] > after and first <= one[1] < end]
                after = max(after, self.revision)
                header = self._header
            if news:
                yield {"header": header, "events": [_event(*one) for one in news]}


def _shown(key: bytes, row: Row) -> dict[str, str]:
    parts = {"key": key, "value": row.value}
    shown = {name: base64.b64encode(part).decode() for name, part in parts.items() if part}
    return {**shown, "mod_revision": str(row.revision)}


def _event(revision: int, key: bytes, row: Row | None) -> dict[str, Any]:
    if row is not None:
        return {"kv": _shown(key, row)}
    return {"type": "DELETE", "kv": _shown(key, Row(b"", "", revision))}
