"""TLS for every port: the server's certificate, and the authorities of its clients' certificates
where these are asked for.

Certificate and key are read again when their files change, as renewal does; connections that are
open keep what they have. A pair that cannot be used is logged and changes nothing. The clients'
authorities are read once.
"""

from __future__ import annotations

import datetime
import logging
import ssl
import time
from pathlib import Path

import grpc

from jaxserve.server.files import check_private, signature
from jaxserve.settings.schema import ConfigError, ServerConfig

log = logging.getLogger(__name__)
SOON_DAYS = 7
# OpenSSL's verify codes
X509_EXPIRED = 10
X509_NOT_YET = 9


class Tls:
    """The certificates of a server. Errors: ConfigError that names the setting at fault."""

    def __init__(self, config: ServerConfig):
        assert config.tls_cert is not None and config.tls_key is not None
        self._cert = Path(config.tls_cert)
        self._key = Path(config.tls_key)
        self._authorities = (
            None
            if config.tls_client_ca is None
            else _text("tls_client_ca", Path(config.tls_client_ca))
        )
        self._contexts: list[ssl.SSLContext] = []
        self._seen = signature(self._cert, self._key)
        self._pair = self._read()
        self._told: tuple[bytes, bytes] | None = None  # what gRPC has

    @classmethod
    def of(cls, config: ServerConfig) -> Tls | None:
        """None where the settings ask for no TLS."""
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
        """For servers that take an SSLContext. It stays current as long as `refresh` is called."""
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

    def credentials(self) -> grpc.ServerCredentials:
        """For gRPC servers. They stay current as long as `refresh` is called."""
        if self._authorities is not None:
            self.context()  # gRPC would say nothing of authorities that it cannot read
        self._told = self._pair
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(), self._newer, self._authorities is not None
        )

    def refresh(self) -> None:
        """To be called now and then: sees whether the files have changed."""
        try:
            now = signature(self._cert, self._key)
            if now == self._seen:
                return
            self._seen = now
            self._pair = self._read()
            for context in self._contexts:
                context.load_cert_chain(self._cert, self._key)
        except (ConfigError, OSError) as error:
            log.error("%s; the certificate stays as it was", error)
            return
        log.info("read the certificate %s again", self._cert)

    def _read(self) -> tuple[bytes, bytes]:
        """Key and certificates, tried out."""
        pair = _text("tls_key", self._key), _text("tls_cert", self._cert)
        check_private("tls_key", self._key, self._key.stat())
        _warn_of_dates(self._cert, _end_of(_context(self._cert, self._key), pair[1]))
        return pair

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([self._pair], self._authorities)

    def _newer(self) -> grpc.ServerCertificateConfiguration | None:
        """Asked by gRPC before each handshake, on its own threads; None: nothing is new."""
        if self._told is self._pair:
            return None
        self._told = self._pair
        return self._configuration()


def _text(field: str, file: Path) -> bytes:
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
            "tls_key", f"{key} is encrypted; a server has nobody to ask for the password"
        ) from None
    return context


def _no_password() -> str:
    raise ValueError


def _end_of(server: ssl.SSLContext, cert: bytes) -> float:
    """Unix seconds when a certificate ends, 0.0 where it has; from a handshake with ourselves,
    which the library tells it by."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cadata=cert.decode("ascii", "ignore"))
    wires = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        client.wrap_bio(wires[0], wires[1]),
        server.wrap_bio(wires[1], wires[0], server_side=True),
    )
    for side in sides * 3:
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            if error.verify_code in (X509_EXPIRED, X509_NOT_YET):
                return 0.0
            raise ConfigError(
                "tls_cert", f"clients will not take it: {error.verify_message}"
            ) from None
        except ssl.SSLError as error:
            raise ConfigError(
                "tls_cert", f"no handshake succeeds with it: {error.reason}"
            ) from None
    found = sides[0].getpeercert() or {}
    return ssl.cert_time_to_seconds(str(found["notAfter"]))


def _warn_of_dates(file: Path, end: float) -> None:
    if end == 0.0:
        log.warning(
            "the certificate %s has expired or is not valid yet; clients will not take it", file
        )
    elif end - time.time() < SOON_DAYS * 86400:
        log.warning(
            "the certificate %s ends on %s",
            file,
            datetime.datetime.fromtimestamp(end, datetime.UTC).date(),
        )
