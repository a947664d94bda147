"""Two processes prove to each other that they know a secret, over TCP or TLS.

Each sends a code over fresh numbers of both; where the one that listens has a certificate, the code
covers that too, so that no third party can stand between. What follows on the connection has a key
for each direction, which no other party knows.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import logging
import secrets
import socket
import ssl
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from jaxserve.files import FileSignature, file_signature
from jaxserve.group.connection import ChannelError
from jaxserve.settings.schema import ConfigError

NONCE_BYTES = 32
STRANGER = bytes(32)  # in place of the listener's proof, for who does not know the secret
CODE_BYTES = 16
HANDSHAKE_SECONDS = 10.0
log = logging.getLogger(__name__)


class StrangerError(ChannelError):
    """The listener has another secret: it is of no use to try again."""


@dataclass(frozen=True)
class Purpose:
    """The purpose of a connection; connections of two purposes do not meet.

    magic: the first bytes that the listener sends. listener, scope: words of the errors: who
    listens, and whose secret it is.
    """

    magic: bytes
    listener: str
    scope: str


@dataclass(frozen=True)
class Session:
    """A connection after the handshake, with the keys of the codes of what is sent and received."""

    connection: socket.socket
    sending: bytes
    receiving: bytes


@dataclass(frozen=True)
class Certificate:
    """The listener's: what speaks TLS with it, and the certificate itself in DER form. files: of
    the certificate and its key; signature: of these files when they were read."""

    context: ssl.SSLContext
    der: bytes
    files: tuple[str, str]
    signature: FileSignature | None

    @classmethod
    def load(cls, certificate: str, key: str) -> Certificate:
        """From PEM files. Errors: OSError, ssl.SSLError."""
        signature = file_signature(Path(certificate), Path(key))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(certificate, key)
        begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
        with open(certificate, errors="replace") as file:
            first = file.read().partition(begin)[2].partition(end)[0]
        der = ssl.PEM_cert_to_DER_cert(begin + first + end)
        return cls(context, der, (certificate, key), signature)

    def renewed(self) -> Certificate:
        """Returns the certificate that its files have now. Files that cannot be used are logged,
        and this certificate stays."""
        signature = file_signature(*map(Path, self.files))
        if signature == self.signature:
            return self
        try:
            newer = Certificate.load(*self.files)
        except (OSError, ValueError) as error:
            log.error("%s: %s; the certificate stays as it was", self.files[0], error)
            return dataclasses.replace(self, signature=signature)
        log.info("read the certificate %s again", self.files[0])
        return newer

    @classmethod
    def given(cls, certificate: str, key: str) -> Certificate:
        """Loads like `load`, from files that a setting names. Errors: ConfigError."""
        try:
            return cls.load(certificate, key)
        except (OSError, ValueError) as error:
            raise ConfigError("tls_cert", f"{certificate}, {key}: {error}") from None


def accept(
    connection: socket.socket, secret: bytes, purpose: Purpose, tls: Certificate | None = None
) -> Session:
    """The listener's side. Closes the connection of a stranger. Errors: ChannelError."""
    certificate = b""
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    try:
        connection.settimeout(HANDSHAKE_SECONDS)
        if tls is not None:
            connection = tls.context.wrap_socket(connection, server_side=True)
            certificate = tls.der
        mine = secrets.token_bytes(NONCE_BYTES)
        connection.sendall(purpose.magic + mine)
        theirs = _read(connection, NONCE_BYTES, deadline)
        code = _read(connection, 32, deadline)
        proofs = Proofs(secret, purpose, mine, theirs, certificate)
        if not hmac.compare_digest(code, proofs.of(b"worker")):
            connection.sendall(STRANGER)
            raise ChannelError(f"it does not know the {purpose.scope}'s secret")
        connection.sendall(proofs.of(b"leader"))
        return Session(connection, proofs.key(b"to worker"), proofs.key(b"to leader"))
    except OSError as error:
        connection.close()
        raise ChannelError(str(error)) from None


def connect(
    address: tuple[str, int], secret: bytes, purpose: Purpose, tls: bool = False
) -> Session:
    """Connects, and does as `introduce`. Errors: ChannelError."""
    try:
        connection = socket.create_connection(address, HANDSHAKE_SECONDS)
    except OSError as error:
        raise ChannelError(str(error)) from None
    return introduce(connection, secret, purpose, tls)


def introduce(
    connection: socket.socket,
    secret: bytes,
    purpose: Purpose,
    tls: bool = False,
    seconds: float = HANDSHAKE_SECONDS,
) -> Session:
    """The other side. tls: whether the listener has a certificate; it need not be signed by anybody
    known, for the proof of the secret covers it. Closes the connection where that fails. Errors:
    ChannelError."""
    certificate = b""
    seconds = min(seconds, HANDSHAKE_SECONDS)
    deadline = time.monotonic() + seconds
    try:
        connection.settimeout(seconds)
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            wrapped = context.wrap_socket(connection)
            certificate = wrapped.getpeercert(binary_form=True) or b""
            connection = wrapped
        if _read(connection, len(purpose.magic), deadline) != purpose.magic:
            raise ChannelError(f"it is no {purpose.listener} of this version")
        theirs = _read(connection, NONCE_BYTES, deadline)
        mine = secrets.token_bytes(NONCE_BYTES)
        proofs = Proofs(secret, purpose, theirs, mine, certificate)
        connection.sendall(mine + proofs.of(b"worker"))
        code = _read(connection, 32, deadline)
        if code == STRANGER:
            raise StrangerError(f"the {purpose.listener}'s secret is another one")
        if not hmac.compare_digest(code, proofs.of(b"leader")):
            raise ChannelError(f"it does not know the {purpose.scope}'s secret")
        return Session(connection, proofs.key(b"to leader"), proofs.key(b"to worker"))
    except StrangerError:
        connection.close()
        raise
    except OSError as error:
        connection.close()
        raise ChannelError(str(error)) from None


@dataclass(frozen=True)
class Proofs:
    """Facts that both sides of a connection know: the secret and the fresh numbers of the listener
    and of the other side."""

    secret: bytes
    purpose: Purpose
    listeners: bytes
    others: bytes
    certificate: bytes

    def of(self, role: bytes) -> bytes:
        fingerprint = hashlib.sha256(self.certificate).digest()
        text = b"".join((self.purpose.magic, role, self.listeners, self.others, fingerprint))
        return hmac.digest(self.secret, text, "sha256")

    def key(self, direction: bytes) -> bytes:
        return hmac.digest(self.secret, direction + self.listeners + self.others, "sha256")


def frame_code(key: bytes, number: int, head: bytes, content: bytes = b"") -> bytes:
    """Code of a frame: of its number in its direction, its head and its content."""
    code = hashlib.blake2b(struct.pack("<Q", number), key=key, digest_size=CODE_BYTES)
    code.update(head)
    code.update(content)
    return code.digest()


def _read(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Reads a number of bytes. Errors: OSError if fewer come in time."""
    data = b""
    while len(data) < size:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(size - len(data))
        if not part:
            raise ChannelError("the connection was closed")
        data += part
    return data
