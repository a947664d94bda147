"""A proxy of TCP connections that can be made to do harm to some of them for a while."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

PART = 1 << 14  # bytes that are passed on at a time
DELAY_SECONDS = 0.3  # by which `delay` holds each part
THROTTLE_BYTES = 20_000  # that `throttle` passes each second in each direction
KINDS = {
    "delay": f"each part comes {DELAY_SECONDS:g} s later",
    "throttle": f"{THROTTLE_BYTES} bytes pass each second, each way",
    "cut": "connections are reset, and new ones too",
    "hold": "nothing passes, and nothing says so",
    "half-close": "the side that listens sees the other one's end, and may go on sending",
    "duplicate": "the next part of each connection comes twice",
    "reorder": "the halves of the next part of each connection change places",
}
ONCE = ("half-close", "duplicate", "reorder")  # done to each connection once


@dataclass
class Harm:
    """What a proxy does to connections. touches: takes a connection's port at the side that
    connects. done: times that it was done."""

    kind: str
    touches: Callable[[int], bool]
    done: int = 0
    over: threading.Event = field(default_factory=threading.Event)


class Connection:
    """Two sockets whose bytes are passed on in both directions, until both have ended. port: of the
    side that connects, by which its process is found."""

    def __init__(self, client: socket.socket, server: socket.socket, proxy: Proxy):
        self.client = client
        self.server = server
        self.port = client.getpeername()[1]
        self._proxy = proxy
        self._harmed: set[int] = set()
        self._passing = 2
        self._lock = threading.Lock()  # of the number

    def start(self) -> None:
        for ends in ((self.client, self.server), (self.server, self.client)):
            threading.Thread(target=self._pass, args=ends, daemon=True).start()

    @property
    def is_open(self) -> bool:
        return self._passing > 0

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(PART):
                target.sendall(self._changed(data, source is self.client))
            target.shutdown(socket.SHUT_WR)
        except OSError:
            self.reset()
        with self._lock:
            self._passing -= 1
        if not self._passing:
            self.client.close()
            self.server.close()

    def _changed(self, data: bytes, to_server: bool) -> bytes:
        """Returns what is passed on in place of this part, when it is time."""
        harm = self._proxy.harm
        if harm is None or harm.over.is_set() or not harm.touches(self.port):
            return data
        if harm.kind in ONCE:
            if not to_server or id(harm) in self._harmed or len(data) < 2:
                return data
            self._harmed.add(id(harm))
        harm.done += 1
        match harm.kind:
            case "delay":
                harm.over.wait(DELAY_SECONDS)
            case "throttle":
                harm.over.wait(len(data) / THROTTLE_BYTES)
            case "hold":
                harm.over.wait()
            case "cut":
                raise OSError("cut")
            case "duplicate":
                return data + data
            case "reorder":
                return data[len(data) // 2 :] + data[: len(data) // 2]
        return data

    def half_close(self) -> None:
        with contextlib.suppress(OSError):
            self.server.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        for end in (self.client, self.server):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.shutdown(socket.SHUT_RDWR)


class Proxy:
    """Listens at an address and passes connections on to another one."""

    def __init__(self, listen: tuple[str, int], target: tuple[str, int]):
        self.address = listen
        self.target = target
        self.harm: Harm | None = None
        self._socket = socket.create_server(listen, backlog=64)
        self._connections: list[Connection] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._socket.accept()
                self._take(client)

    def _take(self, client: socket.socket) -> None:
        harm = self.harm
        try:
            if harm is not None and harm.kind == "cut" and harm.touches(client.getpeername()[1]):
                harm.done += 1
                raise OSError("cut")
            server = socket.create_connection(self.target, 5)
            server.settimeout(None)
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections = [one for one in self._connections if one.is_open]
            connection = Connection(client, server, self)
            self._connections.append(connection)  # first: harm may be done to it as soon as it runs
            connection.start()
        except OSError:
            client.close()

    def begin(self, kind: str, touches: Callable[[int], bool]) -> Harm:
        """Does harm to the connections that `touches` names, those to come too, until `end`."""
        harm = Harm(kind, touches)
        self.harm = harm
        if kind in ("cut", "half-close"):
            for connection in self._connections:
                if connection.is_open and touches(connection.port):
                    harm.done += 1
                    connection.reset() if kind == "cut" else connection.half_close()
        return harm

    def end(self) -> None:
        if self.harm is not None:
            self.harm.over.set()
        self.harm = None

    def close(self) -> None:
        self.end()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for connection in self._connections:
            connection.reset()


class PortsOf:
    """Tells whether a connection's port belongs to one of some processes. pids: asked each time, as
    processes restart."""

    def __init__(self, pids: Callable[[], set[int]], inverse: bool = False):
        self._pids = pids
        self._inverse = inverse
        self._known: dict[int, bool] = {}
        self._read = 0.0

    def __call__(self, port: int) -> bool:
        if port not in self._known or time.monotonic() > self._read + 1.0:
            self._look(port)
        return self._known[port] != self._inverse

    def _look(self, port: int) -> None:
        self._read = time.monotonic()
        found: set[int] = set()
        for pid in self._pids():
            with contextlib.suppress(psutil.Error):
                connections = psutil.Process(pid).net_connections("tcp")
                found.update(one.laddr.port for one in connections)
        self._known = {known: known in found for known in {*self._known, port}}


def every_port(port: int) -> bool:
    return True
