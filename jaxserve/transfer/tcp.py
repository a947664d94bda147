"""Transfers over plain TCP sockets, with nothing to install.

Peers prove by a challenge that they know the cluster's secret before they can name a window; with a
certificate all bytes are encrypted (TLS 1.3). Windows are fenced: once `end` has returned, not even
a sender that was stopped in the middle of a write can change the memory. Every wait has a bound.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from jaxserve.group.handshake import Certificate
from jaxserve.transfer.frames import decode_token
from jaxserve.transfer.protocol import (
    Ticket,
    TransferCounts,
    TransferError,
    Window,
    check_memory,
    check_range,
    check_seconds,
    join_address,
)
from jaxserve.transfer.receiver import Receiver
from jaxserve.transfer.sender import Sender
from jaxserve.transfer.windows import Windows

PATHS = 2  # connections to one peer; more are of use where one core cannot fill the network
MAX_CONNECTIONS = 256  # in each direction


class TcpTransfer:
    """A `Transfer`. `write` takes any contiguous array of uint8, also outside the staging memory.

    host, port: where it listens, port 0 for any that is free. peer_hosts: how others reach this
    host, by default by `host`; senders use them side by side. secret: the cluster's. tls: this
    process's certificate; where one peer has one, all must. Errors: TransferError, OSError where it
    cannot listen.
    """

    def __init__(
        self,
        memory: np.ndarray,
        secret: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        peer_hosts: Sequence[str] = (),
        tls: Certificate | None = None,
        paths: int = PATHS,
        max_connections: int = MAX_CONNECTIONS,
    ):
        check_memory(memory)
        if not secret:
            raise TransferError("secret", "must not be empty")
        if paths < 1 or max_connections < 1:
            raise TransferError("paths", "there must be at least one, and one connection")
        self.memory = memory
        self._closed = False
        self._windows = Windows()
        self._receiver = Receiver(memory, self._windows, host, port, secret, tls, max_connections)
        self._sender = Sender(secret, tls is not None, paths, max_connections)
        hosts = peer_hosts or [host]
        self.address = ",".join(join_address(one, self._receiver.port) for one in hosts)

    def lend(self, base: int, size: int, seconds: float) -> Window:
        check_range("base", base, size, self.memory.size)
        check_seconds(seconds)
        if self._closed:
            raise TransferError("transfer", "it was closed")
        now = time.monotonic()
        if self._windows.end_expired(now):
            self._receiver.settle()
        token, epoch = self._windows.lend(base, size, now + seconds)
        return Window(self.address, token.hex(), size, epoch)

    def end(self, window: Window) -> None:
        self._windows.end(decode_token(window.token), window.epoch)
        self._receiver.settle()

    def write(self, window: Window, offset: int, data: np.ndarray, seconds: float) -> Ticket:
        return self._sender.write_many(window, [(offset, data)], seconds)

    def write_many(
        self, window: Window, pieces: Sequence[tuple[int, np.ndarray]], seconds: float
    ) -> Ticket:
        return self._sender.write_many(window, pieces, seconds)

    def status(self, ticket: Ticket) -> str | None:
        return self._sender.status(ticket)

    def wait(self, ticket: Ticket, seconds: float) -> str | None:
        return self._sender.wait(ticket, seconds)

    def release(self, ticket: Ticket) -> None:
        self._sender.release(ticket)

    def counts(self) -> TransferCounts:
        return TransferCounts(
            len(self._windows),
            self._sender.tickets,
            self._receiver.connections + self._sender.connections,
            self._sender.sent_bytes,
            self._receiver.received_bytes,
            self._sender.retries,
            self._receiver.refused,
        )

    def close(self) -> None:
        self._closed = True
        self._windows.end_all()
        self._receiver.settle()
        self._sender.close()
        self._receiver.close()
