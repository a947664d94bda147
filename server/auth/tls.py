"""TLS for every port: the server's certificate, optionally authorities that clients' certificates
must come from, and those of other servers in a cluster.

Certificate, key and other servers' authorities are read again when their files change, as they do
on renewal; open connections keep theirs. Files that cannot be used are logged and change nothing.
The clients' authorities are read once.
"""

from __future__ import annotations

import datetime
import logging
import ssl
import threading
import time
from pathlib import Path

import grpc

from jaxserve.files import check_private, file_signature
from jaxserve.settings.schema import ConfigError, ServerConfig

log = logging.getLogger(__name__)
WARN_DAYS = 7  # before a certificate expires
# verify codes of OpenSSL
X509_EXPIRED = 10
X509_NOT_YET = 9
HANDSHAKE_ROUNDS = 3  # turns that each side of a handshake in memory needs at most


class Tls:
    """The certificate of a server, kept current by `refresh`. Errors: ConfigError that names the
    setting at fault."""

    def __init__(self, config: ServerConfig):
        assert config.tls_cert is not None and config.tls_key is not None
        self._cert = Path(config.tls_cert)
        self._key = Path(config.tls_key)
        self._authorities = (
            None
            if config.tls_client_ca is None
            else read_authorities("tls_client_ca", Path(config.tls_client_ca))
        )
        self._contexts: list[ssl.SSLContext] = []
        self._signature = file_signature(self._cert, self._key)
        self._pair = self._read()

    @classmethod
    def from_config(cls, config: ServerConfig) -> Tls | None:
        """The certificate that the settings name; None if they ask for no TLS."""
        if config.tls_cert is None and config.tls_key is None:
            if config.tls_client_ca is not None:
                raise ConfigError(
                    "tls_client_ca", "clients' certificates need TLS: give tls_cert and tls_key"
                )
            return None
        for name, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
            if getattr(config, name) is None:
                raise ConfigError(name, f"is missing: {other} needs it")
        return cls(config)

    def context(self) -> ssl.SSLContext:
        """A context for HTTP servers. It stays current as long as `refresh` is called."""
        context = _context(self._cert, self._key)
        if self._authorities is not None:
            _trust(context, self._authorities)
            context.verify_mode = ssl.CERT_REQUIRED
        self._contexts.append(context)
        return context

    def credentials(self, clients: bool = True) -> grpc.ServerCredentials:
        """Credentials for one gRPC server. They stay current as long as `refresh` is called.
        clients: whether those need certificates, where there are authorities for these."""
        authorities = self._authorities if clients else None
        pair = self._pair

        def newer() -> grpc.ServerCertificateConfiguration | None:
            """Called by gRPC before each handshake, on its own threads; None means unchanged."""
            nonlocal pair
            if pair is self._pair:
                return None
            pair = self._pair
            return grpc.ssl_server_certificate_configuration([pair], authorities)

        first = grpc.ssl_server_certificate_configuration([pair], authorities)
        return grpc.dynamic_ssl_server_credentials(first, newer, authorities is not None)

    def refresh(self) -> None:
        """Reads the files again if they have changed. To be called periodically."""
        try:
            now = file_signature(self._cert, self._key)
            if now == self._signature:
                return
            self._signature = now
            self._pair = self._read()
            for context in self._contexts:
                context.load_cert_chain(self._cert, self._key)
        except (ConfigError, OSError) as error:
            log.error("%s; the certificate stays as it was", error)
            return
        log.info("read the certificate %s again", self._cert)

    def _read(self) -> tuple[bytes, bytes]:
        """Reads key and certificates, and checks that they can be used."""
        pair = _read_pem("tls_key", self._key), _read_pem("tls_cert", self._cert)
        check_private("tls_key", self._key, self._key.stat())
        _warn_of_expiry(self._cert, _expiry(_context(self._cert, self._key), pair[1]))
        return pair


class Authorities:
    """The authorities of other servers' certificates, in a PEM file that is read again when it
    changes. field: the setting that names it. Errors: ConfigError."""

    def __init__(self, field: str, file: Path):
        self._field = field
        self._file = file
        self._lock = threading.Lock()
        self._signature = file_signature(file)
        self._credentials = self._read()

    def credentials(self) -> grpc.ChannelCredentials:
        """Returns credentials for the next connection. A file that cannot be used is logged and
        changes nothing."""
        with self._lock:
            signature = file_signature(self._file)
            if signature != self._signature:
                self._signature = signature
                try:
                    self._credentials = self._read()
                    log.info("read the authorities in %s again", self._file)
                except ConfigError as error:
                    log.error("%s; the authorities stay as they were", error)
            return self._credentials

    def _read(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(read_authorities(self._field, self._file))


def read_authorities(field: str, file: Path) -> bytes:
    """Returns the certificates in a PEM file, as gRPC takes them: it would silently fail to read
    wrong ones. Errors: ConfigError that names `field`."""
    data = _read_pem(field, file)
    try:
        _trust(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), data)
    except (ssl.SSLError, ValueError):
        raise ConfigError(field, "holds no PEM certificates that can be read") from None
    return data


def _trust(context: ssl.SSLContext, authorities: bytes) -> None:
    """Has a context trust certificates; comments between them may be in any script."""
    context.load_verify_locations(cadata=authorities.decode("ascii", "ignore"))


def _read_pem(field: str, file: Path) -> bytes:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(field, f"{file}: {error.strerror}") from None
    if b"-----BEGIN " not in data:
        raise ConfigError(field, f"{file} is not a PEM file")
    return data


def _context(cert: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError("tls_key", f"{key} is not the key of {cert}") from None
        raise ConfigError(
            "tls_cert",
            f"{cert} and {key} cannot be used: {error.reason or 'not a certificate and its key'}",
        ) from None
    except ValueError:
        raise ConfigError(
            "tls_key", f"{key} is encrypted; a server cannot ask for its password"
        ) from None
    return context


def _no_password() -> str:
    raise ValueError


def _expiry(server: ssl.SSLContext, cert: bytes) -> float:
    """Returns when a certificate expires, in Unix seconds; 0.0 if it has, or is not valid yet.

    Found by a handshake in memory, with a client that trusts this certificate alone. Besides the
    date, which the ssl module tells of a peer only, this checks what clients will: the key's use,
    its strength, the signature. Errors: ConfigError if the handshake fails.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cadata=cert.decode("ascii", "ignore"))
    to_client = ssl.MemoryBIO()
    to_server = ssl.MemoryBIO()
    sides = (
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for side in sides * HANDSHAKE_ROUNDS:
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            if error.verify_code in (X509_EXPIRED, X509_NOT_YET):
                return 0.0
            raise ConfigError(
                "tls_cert", f"clients will not accept it: {error.verify_message}"
            ) from None
        except ssl.SSLError as error:
            raise ConfigError(
                "tls_cert", f"no handshake succeeds with it: {error.reason}"
            ) from None
    peer = sides[0].getpeercert() or {}
    return ssl.cert_time_to_seconds(str(peer["notAfter"]))


def _warn_of_expiry(file: Path, expiry: float) -> None:
    if expiry == 0.0:
        log.warning(
            "the certificate %s has expired or is not valid yet; clients will not accept it", file
        )
    elif expiry - time.time() < WARN_DAYS * 86400:
        log.warning(
            "the certificate %s expires on %s",
            file,
            datetime.datetime.fromtimestamp(expiry, datetime.UTC).date(),
        )
