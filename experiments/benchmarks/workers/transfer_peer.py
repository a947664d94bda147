"""One side of the benchmark of transfers, as a process that is asked and answers by lines of JSON.
First argument: one of `ENGINES`; second: bytes of memory.

    {"do": "lend", "size": N}                      -> a window, as JSON, of whom the other writes to
                                                      or, with mooncake, reads from
    {"do": "cpu"}                                  -> CPU seconds of this process so far
    {"do": "move", "window": W, "pieces": P, "size": N, "times": T}
                                                   -> seconds for T times P pieces of N bytes
    {"do": "right", "size": N}                     -> whether the first bytes are the sender's
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import threading
import time
import zlib
from typing import Any

import numpy as np

SECRET = b"the benchmark's"
SECONDS = 60.0
HEAD = struct.Struct("<QQ")  # of the plain sockets: offset, size


class Sockets:
    """Plain blocking sockets: one connection, a header and a byte of answer for each piece, and
    nothing else. What there is to lose by all that a transfer adds."""

    def __init__(self, memory: np.ndarray):
        self._memory = memory.data
        self._server = socket.create_server(("127.0.0.1", 0))
        self._connection: socket.socket | None = None
        threading.Thread(target=self._receive, daemon=True).start()

    def lend(self, size: int) -> Any:
        return self._server.getsockname()[1]

    def _receive(self) -> None:
        connection, _ = self._server.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = bytearray(HEAD.size)
        while _fill(connection, memoryview(head)):
            offset, size = HEAD.unpack(head)
            _fill(connection, self._memory[offset : offset + size])
            connection.sendall(b"+")

    def move(self, window: Any, pieces: list[tuple[int, np.ndarray]]) -> None:
        if self._connection is None:
            self._connection = socket.create_connection(("127.0.0.1", window))
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for offset, data in pieces:
            self._connection.sendall(HEAD.pack(offset, data.nbytes))
            self._connection.sendall(data)
        assert _fill(self._connection, memoryview(bytearray(len(pieces))))


class Transfers:
    """A transfer of this project, a ticket for each piece, as layers come one by one."""

    def __init__(self, transfer: Any):
        self._transfer = transfer

    def lend(self, size: int) -> Any:
        return self._transfer.lend(0, size, 3600.0).to_json()

    def move(self, window: Any, pieces: list[tuple[int, np.ndarray]]) -> None:
        from jaxserve.transfer import Window

        lent = Window.from_json(window)
        tickets = [self._transfer.write(lent, offset, data, SECONDS) for offset, data in pieces]
        for ticket in tickets:
            status = self._transfer.wait(ticket, SECONDS)
            assert status == "", status
            self._transfer.release(ticket)


def _tcp(memory: np.ndarray) -> Transfers:
    from jaxserve.transfer import TcpTransfer

    return Transfers(TcpTransfer(memory, SECRET))


class Brought:
    """The plane of the Mooncake Transfer Engine: the receiver brings each piece."""

    def __init__(self, memory: np.ndarray):
        from jaxserve.transfer.mooncake import MooncakePlane

        self._memory = memory
        self._plane = MooncakePlane(memory, send_bytes=2 * memory.size)

    def lend(self, size: int) -> Any:
        staging = self._plane.stage(size, SECONDS)
        assert staging is not None
        data = staging.buffers[0]
        data[:] = self._memory[:size]
        return self._plane.expose(data, self._plane.lend(0, size, SECONDS), 0, SECONDS)

    def move(self, window: Any, pieces: list[tuple[int, np.ndarray]]) -> None:
        peer, _, address = window.partition("@")
        arrivals = []
        for offset, data in pieces:
            place = f"{peer}@{int(address, 16) + offset:x}"
            arrivals.append(self._plane.bring(data, place, lambda: None))
        for arrival in arrivals:
            assert arrival.over.wait(SECONDS) and not arrival.error, arrival.error


ENGINES = {"jaxserve": _tcp, "mooncake": Brought, "sockets": Sockets}


def _fill(connection: socket.socket, view: memoryview) -> bool:
    while view:
        taken = connection.recv_into(view)
        if not taken:
            return False
        view = view[taken:]
    return True


def _noise(size: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)


def _moved(engine: Any, memory: np.ndarray, window: Any, pieces: int, size: int, times: int):
    parts = [(at * size, memory[at * size : (at + 1) * size]) for at in range(pieces)]
    began = time.perf_counter()
    for _ in range(times):
        engine.move(window, parts)
    return time.perf_counter() - began


def main(name: str, size: int, sends: bool) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    memory = _noise(size) if sends else np.ones(size, np.uint8)
    engine: Any = ENGINES[name](memory)
    for line in sys.stdin:
        told = json.loads(line)
        what = told.pop("do")
        said: Any = None
        if what == "lend":
            said = engine.lend(told["size"])
        elif what == "cpu":
            said = time.process_time()
        elif what == "move":
            said = _moved(engine, memory, **told)
        elif what == "right":
            said = zlib.crc32(memory[: told["size"]]) == zlib.crc32(_noise(size)[: told["size"]])
        print(json.dumps(said), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "send")
