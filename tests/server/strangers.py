"""Callers of a replica port that do not know the cluster's secret: silent ones, and ones that throw
bytes at it."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import grpc

from jaxserve.server import replica_pb2 as pb
from jaxserve.server import replica_pb2_grpc as rpc

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
PART_BYTES = 1 << 20
MESSAGE_BYTES = 120 << 20
THROWERS = 4
CALLS = ("Replica.Session", "Blocks.Fetch")


class Strangers:
    """Threads that bother the port at 127.0.0.1 until `end`."""

    def __init__(self, port: int):
        self._address = ("127.0.0.1", port)
        self._target = f"127.0.0.1:{port}"
        self._over = threading.Event()
        self._stack = contextlib.ExitStack()
        self._threads: list[threading.Thread] = []

    def connect_silently(self, count: int) -> None:
        """Opens connections on which nothing is ever said."""
        for _ in range(count):
            self._stack.enter_context(socket.create_connection(self._address))

    def call_silently(self, count: int) -> None:
        """Has threads make one call after the other, without a message in any."""
        for number in range(count):
            self._start(self._call_silently, CALLS[number % 2])

    def throw_messages(self, size: int) -> None:
        """Makes calls with large messages, several at once, `size` bytes in all; returns when they
        were made."""
        message = pb.Command(submit=pb.Submit(prompt=bytes(MESSAGE_BYTES)))
        with concurrent.futures.ThreadPoolExecutor(THROWERS) as throwers:
            for _ in range(-(-size // MESSAGE_BYTES)):
                throwers.submit(self._call, "Replica.Session", iter([message]))

    def throw_bytes(self, size: int) -> None:
        """Sends bytes that are no calls, on as many connections as that needs."""
        part = bytes(PART_BYTES)
        sent = 0
        while sent < size:
            with contextlib.suppress(OSError), socket.create_connection(self._address) as stranger:
                stranger.sendall(PREFACE)
                while sent < size:
                    sent += stranger.send(part)

    def end(self) -> None:
        self._over.set()
        self._stack.close()
        for thread in self._threads:
            thread.join()

    def _start(self, run: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _call_silently(self, name: str) -> None:
        while not self._over.is_set():
            self._call(name, self._silence())
            self._over.wait(0.01)

    def _silence(self) -> Iterator[pb.Command]:
        self._over.wait()
        yield from ()

    def _call(self, name: str, messages: Iterator[object]) -> None:
        """Makes a call, and reads all answers to it."""
        service, method = name.split(".")
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        with grpc.insecure_channel(self._target, options) as channel:
            stub = getattr(rpc, f"{service}Stub")(channel)
            with contextlib.suppress(grpc.RpcError):
                collections.deque(getattr(stub, method)(messages, timeout=60), maxlen=0)
