"""TLS for every port: the server's certificate, and optionally authorities that clients'
certificates must come from.

Certificate and key are read again when their files change, as they do on renewal; open connections
keep theirs. A pair that cannot be used is logged and changes nothing. The clients' authorities are
read once.
"""

from __future__ import annotations

import datetime
import logging
import ssl
import time
from pathlib import Path

import grpc

from jaxserve.server.files import check_private, file_signature
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
            else _read_pem("tls_client_ca", Path(config.tls_client_ca))
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
            try:
                # comments may be in any script
                context.load_verify_locations(cadata=self._authorities.decode("ascii", "ignore"))
            except (ssl.SSLError, ValueError):
                raise ConfigError(
                    "tls_client_ca", "holds no PEM certificates that can be read"
                ) from None
            context.verify_mode = ssl.CERT_REQUIRED
        self._contexts.append(context)
        return context

    def credentials(self, clients: bool = True) -> grpc.ServerCredentials:
        """Credentials for one gRPC server. They stay current as long as `refresh` is called.
        clients: whether those need certificates, where there are authorities for these."""
        authorities = self._authorities if clients else None
        if authorities is not None:
            self.context()  # raises for authorities that gRPC would silently fail to read
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
