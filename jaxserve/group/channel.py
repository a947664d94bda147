"""Authenticated frames between the leader of a group and its workers, over TCP or TLS.

Both sides prove that they know the group's secret, each by a code over fresh numbers of both; where
the leader has a certificate, the code covers that too, so that nobody can stand between. Every
frame then carries a code over its number, kind and content: a frame that was changed, repeated or
left out ends the channel. Without a certificate the content travels in plain text.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from jaxserve.settings.schema import ConfigError

MAGIC = b"jaxserve group 1"  # changes with the form of frames
NONCE_BYTES = 32
STRANGER = bytes(32)  # in place of the leader's proof, for who does not know the secret
CODE_BYTES = 16
MAX_FRAME_BYTES = 1 << 28  # a mask of the largest batch and vocabulary has a tenth of that
HANDSHAKE_SECONDS = 10.0
PART_BYTES = 1 << 18  # that are read or written at a time
STALL_SECONDS = 10.0  # that a peer may take no bytes, or its host may not answer TCP
TURN_SECONDS = 1.0  # between looks whether a channel that waits was closed
_HEAD = struct.Struct("<IB")  # bytes of the content, kind
Given = TypeVar("Given")
Done = TypeVar("Done")


class ChannelError(OSError):
    """The other side is gone, does not know the secret, or said what is no frame."""


class StrangerError(ChannelError):
    """The leader has another secret: it is of no use to try again."""


@dataclass(frozen=True)
class Frame:
    """What one side said: a kind, of `Kind`, and its content."""

    kind: int
    content: bytes


class Channel:
    """One connection. `send` may be called by any thread, `receive` by one at a time; neither
    waits for the other. After an error of `send` no more can be sent, but what the other side said
    last can be received; an error of `receive` closes the channel."""

    def __init__(self, connection: socket.socket, sending: bytes, receiving: bytes):
        connection.setblocking(False)
        self._socket = connection
        self._buffer = bytearray()
        self._sending = sending
        self._receiving = receiving
        self._sent = 0
        self._received = 0
        self._torn = False  # a part of a frame was sent
        self._closed = False
        self._order = threading.Lock()  # of frames: one is sent at a time
        self._lock = threading.Lock()  # of the socket, never held while waiting

    def send(self, kind: int, content: bytes = b"") -> None:
        """Errors: ChannelError where the other side is gone or takes no bytes for a while."""
        if len(content) > MAX_FRAME_BYTES:
            raise ChannelError(f"a frame of {len(content)} bytes; the limit is {MAX_FRAME_BYTES}")
        head = _HEAD.pack(len(content), kind)
        with self._order:
            if self._torn:
                raise ChannelError("the other side is gone")
            code = _code(self._sending, self._sent, head, content)
            self._sent += 1
            left = memoryview(b"".join((head, content, code)))
            try:
                while left:
                    taken = self._do(self._socket.send, left[:PART_BYTES], select.POLLOUT)
                    left = left[taken:]
            except OSError as error:
                self._torn = True
                raise ChannelError(str(error)) from None

    def receive(self) -> Frame:
        """Waits for the next frame. Errors: ChannelError."""
        try:
            if self._closed:
                raise ChannelError("the connection was closed")
            head = self._exactly(_HEAD.size)
            size, kind = _HEAD.unpack(head)
            if size > MAX_FRAME_BYTES:
                raise ChannelError(f"a frame of {size} bytes; the limit is {MAX_FRAME_BYTES}")
            content = self._exactly(size)
            code = self._exactly(CODE_BYTES)
            if not hmac.compare_digest(code, _code(self._receiving, self._received, head, content)):
                raise ChannelError("a frame was changed on its way")
        except OSError as error:
            self.close()
            raise ChannelError(str(error)) from None
        self._received += 1
        return Frame(kind, content)

    def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            part = self._do(self._socket.recv, PART_BYTES, select.POLLIN)
            if not part:
                raise ChannelError("the connection was closed")
            self._buffer += part
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    def _do(self, operation: Callable[[Given], Done], given: Given, event: int) -> Done:
        """Tries an operation of the socket until it need not wait. event: what it waits for; TLS
        may wait for another. Writing waits for STALL_SECONDS. Errors: OSError."""
        began = time.monotonic()
        while True:
            awaited = event
            with self._lock:
                if self._closed:
                    raise ChannelError("the connection was closed")
                try:
                    return operation(given)
                except BlockingIOError:
                    pass
                except ssl.SSLWantReadError:
                    awaited = select.POLLIN
                except ssl.SSLWantWriteError:
                    awaited = select.POLLOUT
                file = self._socket.fileno()
            if event == select.POLLOUT and time.monotonic() - began > STALL_SECONDS:
                raise ChannelError(f"the other side took no bytes for {STALL_SECONDS:g} s")
            poll = select.poll()
            poll.register(file, awaited)
            poll.poll(1000 * min(TURN_SECONDS, STALL_SECONDS))

    @property
    def own_host(self) -> str:
        """This side's address. Errors: ChannelError."""
        try:
            return self._socket.getsockname()[0]
        except OSError as error:
            raise ChannelError(str(error)) from None

    def close(self) -> None:
        """Ends the connection; a `send` or `receive` that waits fails."""
        with self._lock:
            self._closed = True
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(OSError):
                self._socket.close()


def _code(key: bytes, number: int, head: bytes, content: bytes) -> bytes:
    code = hashlib.blake2b(struct.pack("<Q", number), key=key, digest_size=CODE_BYTES)
    code.update(head)
    code.update(content)
    return code.digest()


@dataclass(frozen=True)
class Certificate:
    """The leader's: what speaks TLS with it, and the certificate itself in DER form."""

    context: ssl.SSLContext
    der: bytes

    @classmethod
    def load(cls, certificate: str, key: str) -> Certificate:
        """From PEM files. Errors: OSError, ssl.SSLError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(certificate, key)
        begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
        with open(certificate, errors="replace") as file:
            first = file.read().partition(begin)[2].partition(end)[0]
        return cls(context, ssl.PEM_cert_to_DER_cert(begin + first + end))

    @classmethod
    def given(cls, certificate: str, key: str) -> Certificate:
        """As `load`, for files that a setting names. Errors: ConfigError."""
        try:
            return cls.load(certificate, key)
        except (OSError, ValueError) as error:
            raise ConfigError("tls_cert", f"{certificate}, {key}: {error}") from None


def free_port(host: str = "") -> int:
    """A port that nobody listens on just now."""
    with socket.create_server((host, 0)) as server:
        return server.getsockname()[1]


def accept(connection: socket.socket, secret: bytes, tls: Certificate | None = None) -> Channel:
    """The leader's side of the handshake. Errors: ChannelError for a stranger."""
    certificate = b""
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    try:
        connection.settimeout(HANDSHAKE_SECONDS)
        if tls is not None:
            connection = tls.context.wrap_socket(connection, server_side=True)
            certificate = tls.der
        mine = secrets.token_bytes(NONCE_BYTES)
        connection.sendall(MAGIC + mine)
        theirs = _read(connection, NONCE_BYTES, deadline)
        code = _read(connection, 32, deadline)
        if not hmac.compare_digest(code, _proof(secret, b"worker", mine, theirs, certificate)):
            connection.sendall(STRANGER)
            raise ChannelError("it does not know the group's secret")
        connection.sendall(_proof(secret, b"leader", mine, theirs, certificate))
        return _channel(connection, secret, mine, theirs, leads=True)
    except OSError as error:
        connection.close()
        raise ChannelError(str(error)) from None


def connect(address: tuple[str, int], secret: bytes, tls: bool = False) -> Channel:
    """The worker's side. tls: whether the leader has a certificate; it need not be signed by
    anybody known, for the proof of the secret covers it. Errors: ChannelError."""
    certificate = b""
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    try:
        connection = socket.create_connection(address, HANDSHAKE_SECONDS)
    except OSError as error:
        raise ChannelError(str(error)) from None
    try:
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            wrapped = context.wrap_socket(connection)
            certificate = wrapped.getpeercert(binary_form=True) or b""
            connection = wrapped
        if _read(connection, len(MAGIC), deadline) != MAGIC:
            raise ChannelError("it is no leader of this version")
        theirs = _read(connection, NONCE_BYTES, deadline)
        mine = secrets.token_bytes(NONCE_BYTES)
        connection.sendall(mine + _proof(secret, b"worker", theirs, mine, certificate))
        code = _read(connection, 32, deadline)
        if code == STRANGER:
            raise StrangerError("the leader's secret is another one")
        if not hmac.compare_digest(code, _proof(secret, b"leader", theirs, mine, certificate)):
            raise ChannelError("it does not know the group's secret")
        return _channel(connection, secret, theirs, mine, leads=False)
    except StrangerError:
        connection.close()
        raise
    except OSError as error:
        connection.close()
        raise ChannelError(str(error)) from None


def _channel(
    connection: socket.socket, secret: bytes, leaders: bytes, workers: bytes, leads: bool
) -> Channel:
    """leaders, workers: the fresh numbers of both. Each direction has a key of its own."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _notice_a_vanished_host(connection)
    keys = [
        hmac.digest(secret, direction + leaders + workers, "sha256")
        for direction in (b"to worker", b"to leader")
    ]
    return Channel(connection, *(keys if leads else reversed(keys)))


def _proof(secret: bytes, role: bytes, leaders: bytes, workers: bytes, certificate: bytes) -> bytes:
    text = b"".join((MAGIC, role, leaders, workers, hashlib.sha256(certificate).digest()))
    return hmac.digest(secret, text, "sha256")


def _notice_a_vanished_host(connection: socket.socket) -> None:
    """Has the kernel ask the other side's whether it is there, and end the connection where no
    answer comes: a host that lost its power or its network closes nothing."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    most = max(2, round(STALL_SECONDS))
    for name, value in (
        ("TCP_KEEPIDLE", most // 2),  # seconds
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", most - most // 2),
        ("TCP_USER_TIMEOUT", 1000 * most),  # of what was sent
    ):
        if hasattr(socket, name):  # Linux has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _read(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Errors: OSError where fewer bytes come in time."""
    data = b""
    while len(data) < size:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(size - len(data))
        if not part:
            raise ChannelError("the connection was closed")
        data += part
    return data
