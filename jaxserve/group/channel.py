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
from dataclasses import dataclass

MAGIC = b"jaxserve group 1"  # changes with the form of frames
NONCE_BYTES = 32
CODE_BYTES = 16
MAX_FRAME_BYTES = 1 << 28  # a mask of the largest batch and vocabulary has a tenth of that
HANDSHAKE_SECONDS = 10.0
READ_BYTES = 1 << 18
SEND_SECONDS = 15.0  # that a peer may take no bytes
_HEAD = struct.Struct("<IB")  # bytes of the content, kind


class ChannelError(OSError):
    """The other side is gone, does not know the secret, or said what is no frame."""


@dataclass(frozen=True)
class Frame:
    """What one side said: a kind, of `Kind`, and its content."""

    kind: int
    content: bytes


class Channel:
    """One connection. `send` may be called by any thread, `receive` by one at a time."""

    def __init__(self, connection: socket.socket, sending: bytes, receiving: bytes):
        self._socket = connection
        self._buffer = bytearray()
        self._sending = sending
        self._receiving = receiving
        self._sent = 0
        self._received = 0
        self._lock = threading.Lock()

    def send(self, kind: int, content: bytes = b"") -> None:
        """Errors: ChannelError where the other side is gone or takes no bytes for a while."""
        head = _HEAD.pack(len(content), kind)
        with self._lock:
            code = _code(self._sending, self._sent, head, content)
            self._sent += 1
            try:
                self._socket.sendall(b"".join((head, content, code)))
            except OSError as error:
                raise ChannelError(str(error)) from None

    def receive(self) -> Frame:
        """Waits for the next frame. Errors: ChannelError."""
        try:
            head = self._exactly(_HEAD.size)
            size, kind = _HEAD.unpack(head)
            if size > MAX_FRAME_BYTES:
                raise ChannelError(f"a frame of {size} bytes; the limit is {MAX_FRAME_BYTES}")
            content = self._exactly(size)
            code = self._exactly(CODE_BYTES)
        except (OSError, ValueError) as error:
            raise ChannelError(str(error)) from None
        if not hmac.compare_digest(code, _code(self._receiving, self._received, head, content)):
            raise ChannelError("a frame was changed on its way")
        self._received += 1
        return Frame(kind, content)

    def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            if not getattr(self._socket, "pending", bool)():
                select.select([self._socket], [], [])
            with self._lock:  # TLS must not read and write at the same time
                part = self._socket.recv(READ_BYTES)
            if not part:
                raise ChannelError("the connection was closed")
            self._buffer += part
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    @property
    def own_host(self) -> str:
        """This side's address."""
        return self._socket.getsockname()[0]

    def close(self) -> None:
        """Ends the connection; a `receive` that waits fails."""
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
        end = "-----END CERTIFICATE-----"
        with open(certificate) as file:
            first = file.read().split(end)[0] + end
        return cls(context, ssl.PEM_cert_to_DER_cert(first[first.index("-----BEGIN") :]))


def accept(connection: socket.socket, secret: bytes, tls: Certificate | None = None) -> Channel:
    """The leader's side of the handshake. Errors: ChannelError for a stranger."""
    certificate = b""
    try:
        connection.settimeout(HANDSHAKE_SECONDS)
        if tls is not None:
            connection = tls.context.wrap_socket(connection, server_side=True)
            certificate = tls.der
        mine = secrets.token_bytes(NONCE_BYTES)
        connection.sendall(MAGIC + mine)
        theirs = _read(connection, NONCE_BYTES)
        code = _read(connection, 32)
        if not hmac.compare_digest(code, _proof(secret, b"worker", mine, theirs, certificate)):
            raise ChannelError("it does not know the group's secret")
        connection.sendall(_proof(secret, b"leader", mine, theirs, certificate))
    except OSError as error:
        connection.close()
        raise ChannelError(str(error)) from None
    return _channel(connection, secret, mine, theirs, leads=True)


def connect(address: tuple[str, int], secret: bytes, tls: bool = False) -> Channel:
    """The worker's side. tls: whether the leader has a certificate; it need not be signed by
    anybody known, for the proof of the secret covers it. Errors: ChannelError."""
    certificate = b""
    try:
        connection = socket.create_connection(address, HANDSHAKE_SECONDS)
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            wrapped = context.wrap_socket(connection)
            certificate = wrapped.getpeercert(binary_form=True) or b""
            connection = wrapped
        if _read(connection, len(MAGIC)) != MAGIC:
            raise ChannelError("it is no leader of this version")
        theirs = _read(connection, NONCE_BYTES)
        mine = secrets.token_bytes(NONCE_BYTES)
        connection.sendall(mine + _proof(secret, b"worker", theirs, mine, certificate))
        code = _read(connection, 32)
        if not hmac.compare_digest(code, _proof(secret, b"leader", theirs, mine, certificate)):
            raise ChannelError("it does not know the group's secret")
    except OSError as error:
        with contextlib.suppress(OSError, UnboundLocalError):
            connection.close()
        raise ChannelError(str(error)) from None
    return _channel(connection, secret, theirs, mine, leads=False)


def _channel(
    connection: socket.socket, secret: bytes, leaders: bytes, workers: bytes, leads: bool
) -> Channel:
    """leaders, workers: the fresh numbers of both. Each direction has a key of its own."""
    connection.settimeout(SEND_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keys = [
        hmac.digest(secret, direction + leaders + workers, "sha256")
        for direction in (b"to worker", b"to leader")
    ]
    return Channel(connection, *(keys if leads else reversed(keys)))


def _proof(secret: bytes, role: bytes, leaders: bytes, workers: bytes, certificate: bytes) -> bytes:
    text = b"".join((MAGIC, role, leaders, workers, hashlib.sha256(certificate).digest()))
    return hmac.digest(secret, text, "sha256")


def _read(connection: socket.socket, size: int) -> bytes:
    """Errors: OSError where fewer bytes come."""
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ChannelError("the connection was closed")
        data += part
    return data
