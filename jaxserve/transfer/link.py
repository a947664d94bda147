"""One connection from a sender to a receiver: requests with their bytes out, answers in."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence

from jaxserve.group import handshake
from jaxserve.group.connection import ChannelError, Connection
from jaxserve.group.handshake import Session
from jaxserve.transfer.frames import ANSWER_BYTES, PURPOSE, Answer, Request, decode_answer
from jaxserve.transfer.protocol import split_address

CONNECT_SECONDS = 5.0  # for connection and handshake
VANISH_SECONDS = 10.0  # after which a host that does not answer TCP counts as gone
TLS_PART_BYTES = 1 << 18  # that are encrypted at a time


class SendingLink:
    """Connects when it is first used. `carry` is called by one thread; `close` by any."""

    def __init__(self, address: str, secret: bytes, tls: bool):
        self._address = split_address(address)
        self._secret = secret
        self._tls = tls
        self._lock = threading.Lock()  # of the three below
        self._handle: socket.socket | None = None  # of a connection in the handshake
        self._connection: Connection | None = None
        self._closed = False
        self._sending = self._receiving = b""
        self._sent = 0
        self._answered = 0

    def carry(
        self, parts: Sequence[tuple[Request, memoryview]], answers: list[Answer], until: float
    ) -> None:
        """Sends requests and their bytes, and adds the receiver's answers to `answers`, in order.

        until: the moment, by time.monotonic(), at which it fails. After an error the connection is
        to be closed; the answers that came before it hold. Errors: OSError.
        """
        connection = self._connected(until)
        buffers = []
        for request, data in parts:
            buffers.append(memoryview(request.encode(self._sending, self._sent)))
            buffers.append(data)
            self._sent += 1
        self._send(connection, buffers, until)
        for _ in parts:
            answers.append(self._answer(connection, until))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._handle is not None:
                with contextlib.suppress(OSError):
                    self._handle.shutdown(socket.SHUT_RDWR)
            if self._connection is not None:
                self._connection.close()

    def _connected(self, until: float) -> Connection:
        if self._connection is None:
            session = self._introduced(until)
            connection = Connection(session.connection, VANISH_SECONDS)
            self._sending, self._receiving = session.sending, session.receiving
            with self._lock:
                self._connection = connection
                if self._closed:
                    connection.close()
        return self._connection

    def _introduced(self, until: float) -> Session:
        """Connects and does the handshake, which `close` can end by another handle of the same
        connection: TLS takes this one away. Errors: OSError."""
        seconds = min(_left(until), CONNECT_SECONDS)
        connection = socket.create_connection(self._address, seconds)
        with self._shared(connection):
            return handshake.introduce(connection, self._secret, PURPOSE, self._tls, seconds)

    @contextlib.contextmanager
    def _shared(self, connection: socket.socket) -> Iterator[None]:
        try:
            handle = connection.dup()
        except OSError:
            connection.close()
            raise
        with handle:
            with self._lock:
                self._handle = handle
                if self._closed:
                    handle.shutdown(socket.SHUT_RDWR)
            try:
                yield
            finally:
                with self._lock:
                    self._handle = None

    def _send(self, connection: Connection, buffers: list[memoryview], until: float) -> None:
        buffers.reverse()  # the next is the last
        while buffers:
            if self._tls:
                part = buffers[-1][:TLS_PART_BYTES]
                sent = connection.write(connection.socket.send, part, _left(until))
            else:
                sent = connection.write(connection.socket.sendmsg, buffers[::-1], _left(until))
            _advance(buffers, sent)

    def _answer(self, connection: Connection, until: float) -> Answer:
        view = memoryview(bytearray(ANSWER_BYTES))
        taken = 0
        while taken < ANSWER_BYTES:
            part = connection.read(connection.socket.recv_into, view[taken:], _left(until))
            if not part:
                raise ChannelError("the receiver has closed the connection")
            taken += part
        answer = decode_answer(view, self._receiving, self._answered)
        self._answered += 1
        return answer


def _advance(buffers: list[memoryview], sent: int) -> None:
    """Takes bytes from buffers, the last buffer first."""
    while buffers and sent >= len(buffers[-1]):
        sent -= len(buffers.pop())
    if sent:
        buffers[-1] = buffers[-1][sent:]


def _left(until: float) -> float:
    """Seconds from now. Errors: ChannelError where there are none."""
    seconds = until - time.monotonic()
    if seconds <= 0:
        raise ChannelError("the time is over")
    return seconds
