"""The address by which other machines reach this process."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from dataclasses import dataclass

from jaxserve.settings.schema import ConfigError

MAX_ADDRESSES = 8
ANY_HOST = ("", "0.0.0.0", "::")
GIVEN = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
# reserved for documentation: nothing is sent there, but the system chooses an address of its own
FAR = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


@dataclass(frozen=True)
class OwnAddress:
    """Host and port by which others reach this process. port: None: that on which it listens.
    others: more such addresses, by which other replicas reach it too."""

    host: str
    port: int | None = None
    others: tuple[OwnAddress, ...] = ()

    @classmethod
    def of(cls, given: str | None, host: str) -> OwnAddress:
        """Returns what is given, HOST or HOST:PORT or several, apart by commas, else the address of
        a server that listens on `host`. Errors: ConfigError that names advertise_address."""
        if given is None:
            return cls(host.strip("[]") if host not in ANY_HOST else _found(host))
        first, *others = map(cls._given, given.split(","))
        if len(others) >= MAX_ADDRESSES or len({first, *others}) <= len(others):
            raise ConfigError(
                "advertise_address",
                f"{given[:100]!r} has one more than once, or more than {MAX_ADDRESSES}",
            )
        return cls(first.host, first.port, tuple(others))

    @classmethod
    def _given(cls, given: str) -> OwnAddress:
        match = GIVEN.fullmatch(given)
        if match is None or not 0 < int(match[2] or 1) < 65536:
            raise ConfigError("advertise_address", f"{given[:100]!r} is not HOST or HOST:PORT")
        if match[1].strip("[]") in ANY_HOST:
            raise ConfigError("advertise_address", f"{given} is no address that others can reach")
        return cls(match[1].strip("[]"), int(match[2]) if match[2] else None)

    @property
    def hosts(self) -> list[str]:
        """All hosts, the first one first."""
        return [self.host, *(other.host for other in self.others)]

    def all_at(self, port: int) -> list[str]:
        """Returns all HOST:PORT of a server of this process that listens on `port`."""
        return [self.at(port), *(other.at(port) for other in self.others)]

    def at(self, port: int) -> str:
        """Returns the first HOST:PORT of a server of this process that listens on `port`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port or port}"


def is_loopback(host: str) -> bool:
    """Returns whether an address, or a name, is the loopback one."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


def _found(host: str) -> str:
    """Returns this machine's name, or else its address. Errors: ConfigError where others could not
    reach it by either."""
    name = socket.getfqdn()
    candidates = [name, *_outgoing_addresses()]
    for candidate in candidates:
        if _leads_out(candidate):
            return candidate
    raise ConfigError(
        "advertise_address",
        f"must be given with --host={host}: this machine's name, {name}, stands for loopback here, "
        "and it has no address by which others reach it",
    )


def _outgoing_addresses() -> list[str]:
    found = []
    for family, far in FAR:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as end:
                end.connect((far, 9))
                found.append(end.getsockname()[0])
        except OSError:  # there is no way out
            continue
    return found


def _leads_out(name: str) -> bool:
    """Returns whether a name or address stands for addresses beyond loopback alone."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(name, None)}
    except OSError:
        return False
    return not any(ipaddress.ip_address(str(one).partition("%")[0]).is_loopback for one in found)
