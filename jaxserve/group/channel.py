"""Authenticated frames between the leader of a group and its workers, over TCP or TLS.

Both sides prove that they know the group's secret (`handshake`). Every frame then carries a code
over its number, kind and content: a frame that was changed, repeated or left out ends the channel.
Without a certificate the content travels in plain text.
"""

from __future__ import annotations

import contextlib
import hmac
import random
import socket
import struct
import threading
from dataclasses import dataclass

from jaxserve.group import handshake
from jaxserve.group.connection import ChannelError, Connection
from jaxserve.group.handshake import CODE_BYTES, Certificate, Purpose, Session, frame_code

MAGIC = b"jaxserve group 1"  # changes with the form of frames
PURPOSE = Purpose(MAGIC, "leader", "group")
MAX_FRAME_BYTES = 1 << 28  # a mask of the largest batch and vocabulary has a tenth of that
PART_BYTES = 1 << 18  # that are read or written at a time
STALL_SECONDS = 10.0  # that a peer may take no bytes, or its host may not answer TCP
LASTING_PORTS = range(15_000, 30_000)  # below those that Linux gives to connections
_HEAD = struct.Struct("<IB")  # bytes of the content, kind


@dataclass(frozen=True)
class Frame:
    """A message of one side: a kind, of `Kind`, and its content."""

    kind: int
    content: bytes


class Channel:
    """One connection. `send` may be called by any thread, `receive` by one at a time; neither
    waits for the other. After an error of `send` no more can be sent, but what the other side said
    last can be received; an error of `receive` closes the channel."""

    def __init__(self, session: Session):
        self._connection = Connection(session.connection, STALL_SECONDS)
        self._buffer = bytearray()
        self._sending = session.sending
        self._receiving = session.receiving
        self._sent = 0
        self._received = 0
        self._torn = False  # a part of a frame was sent
        self._order = threading.Lock()  # of frames: one is sent at a time

    def send(self, kind: int, content: bytes = b"") -> None:
        """Sends a message. Errors: ChannelError if the other side is gone or takes no bytes for a
        while."""
        if len(content) > MAX_FRAME_BYTES:
            raise ChannelError(f"a frame of {len(content)} bytes; the limit is {MAX_FRAME_BYTES}")
        head = _HEAD.pack(len(content), kind)
        with self._order:
            if self._torn:
                raise ChannelError("the other side is gone")
            code = frame_code(self._sending, self._sent, head, content)
            self._sent += 1
            frame = memoryview(b"".join((head, content, code)))
            try:
                while frame:
                    part = frame[:PART_BYTES]
                    count = self._connection.write(
                        self._connection.socket.send, part, STALL_SECONDS
                    )
                    frame = frame[count:]
            except OSError as error:
                self._torn = True
                raise ChannelError(str(error)) from None

    def receive(self) -> Frame:
        """Waits for the next frame. Errors: ChannelError."""
        try:
            if self._connection.closed:
                raise ChannelError("the connection was closed")
            head = self._exactly(_HEAD.size)
            size, kind = _HEAD.unpack(head)
            if size > MAX_FRAME_BYTES:
                raise ChannelError(f"a frame of {size} bytes; the limit is {MAX_FRAME_BYTES}")
            content = self._exactly(size)
            code = self._exactly(CODE_BYTES)
            expected = frame_code(self._receiving, self._received, head, content)
            if not hmac.compare_digest(code, expected):
                raise ChannelError("a frame was changed on its way")
        except OSError as error:
            self.close()
            raise ChannelError(str(error)) from None
        self._received += 1
        return Frame(kind, content)

    def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            part = self._connection.read(self._connection.socket.recv, PART_BYTES)
            if not part:
                raise ChannelError("the connection was closed")
            self._buffer += part
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    @property
    def own_host(self) -> str:
        """This side's address. Errors: ChannelError."""
        return self._connection.own_host

    def close(self) -> None:
        """Ends the connection; a `send` or `receive` that waits fails."""
        self._connection.close()


def free_port(host: str = "") -> int:
    """Returns a port that no process listens on now."""
    with socket.create_server((host, 0)) as server:
        return server.getsockname()[1]


def lasting_ports(count: int, host: str = "") -> list[int]:
    """Returns different ports that no process listens on now, outside of the range of connections:
    a process that restarts can listen on them again. Errors: OSError if there are too few."""
    ports: list[int] = []
    for port in random.sample(LASTING_PORTS, len(LASTING_PORTS)):
        if len(ports) == count:
            return ports
        with contextlib.suppress(OSError), socket.create_server((host, port)):
            ports.append(port)
    raise OSError(f"there are no {count} free ports in {LASTING_PORTS}")


def accept(connection: socket.socket, secret: bytes, tls: Certificate | None = None) -> Channel:
    """The leader's side of the handshake. Errors: ChannelError for a stranger."""
    return Channel(handshake.accept(connection, secret, PURPOSE, tls))


def connect(address: tuple[str, int], secret: bytes, tls: bool = False) -> Channel:
    """The worker's side. tls: whether the leader has a certificate. Errors: ChannelError, of these
    StrangerError where the leader has another secret."""
    return Channel(handshake.connect(address, secret, PURPOSE, tls))
