"""The replicas of a cluster, as a list of addresses names them: given once, in a file that may
change while it is read, or in a registry.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from jaxserve.cluster.conductor import Conductor, ConductorSettings
from jaxserve.cluster.member import Member
from jaxserve.files import file_signature
from jaxserve.server.auth.tls import Authorities
from jaxserve.server.registry import Registry
from jaxserve.server.remote_replica import RemoteReplica
from jaxserve.settings.schema import ConfigError

log = logging.getLogger(__name__)
MAX_MEMBERS = 1024
ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
FILE_SECONDS = 1.0  # between looks at the file
FIRST_SECONDS = 0.1  # between looks for a first replica that answers


def addresses(text: str, field: str) -> list[str]:
    """Addresses HOST:PORT, apart by commas or white space; '#' begins a comment. Errors:
    ConfigError that names `field`."""
    lines = (line.partition("#")[0] for line in text.splitlines())
    words = " ".join(lines).replace(",", " ").split()
    for address in words:
        match = ADDRESS.fullmatch(address)
        if match is None or not 0 < int(match[2]) < 65536:
            raise ConfigError(field, f"{address[:100]!r} is not HOST:PORT")
    if len(set(words)) < len(words):
        raise ConfigError(field, "names a replica more than once")
    if len(words) > MAX_MEMBERS:
        raise ConfigError(field, f"has {len(words)} replicas; the limit is {MAX_MEMBERS}")
    return words


class Members:
    """Replicas by address, each with a session that is kept up.

    file: with their addresses, read again when it changes. registry: of their addresses; it is
    closed with the members. One that cannot be read, or a changed file without addresses, changes
    nothing.
    """

    def __init__(
        self,
        targets: Iterable[str],
        secret: bytes,
        authorities: Authorities | None = None,
        file: Path | None = None,
        registry: Registry | None = None,
    ):
        self._secret = secret
        self._authorities = authorities
        self._file = file
        self._registry = registry
        self._failing = False  # the registry has what is no address
        self._signature = None if file is None else file_signature(file)
        self._closed = threading.Event()
        self._changing = threading.Lock()
        self._members: dict[str, RemoteReplica] = {}
        self._conductor: Conductor | None = None
        self._set(targets if file is None else self._read(file))
        self._watching = threading.Thread(target=self._watch, name="members", daemon=True)
        self._watching.start()

    @property
    def all(self) -> list[RemoteReplica]:
        return list(self._members.values())

    def wait_for_one(self) -> RemoteReplica:
        """Waits for the first replica that answers. Errors: ConfigError once this was closed."""
        while not self._closed.is_set():
            for member in self.all:
                if member.available:
                    return member
            time.sleep(FIRST_SECONDS)
        raise ConfigError("replicas", "none has answered")

    def conductor(self, settings: ConductorSettings) -> Conductor:
        """A conductor over these replicas, which follows their changes, once one of them answers.
        Errors: ConfigError once this was closed, and for wrong settings."""
        first = self.wait_for_one()
        conductor = Conductor([_member(first)], settings, roles=self._registry)
        with self._changing:
            self._conductor = conductor
            self._tell(conductor)
        return conductor

    def close(self) -> None:
        """Ends all sessions; the replicas go on."""
        self._closed.set()
        if self._registry is not None:
            self._registry.close()
            self._registry.changed.set()
        self._watching.join()
        for member in self.all:
            member.close()

    def _read(self, file: Path) -> list[str]:
        try:
            return addresses(file.read_text(), "replicas_file")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("replicas_file", f"{file}: {error}") from None

    def _watch(self) -> None:
        news = self._closed if self._registry is None else self._registry.changed
        while not self._closed.is_set():
            if self._file is not None:
                self._look_at_file(self._file)
            if self._registry is not None:
                self._registry.changed.clear()
                self._look_at_registry(self._registry)
            news.wait(FILE_SECONDS)

    def _look_at_file(self, file: Path) -> None:
        signature = file_signature(file)
        if signature == self._signature:
            return
        self._signature = signature
        try:
            targets = self._read(file)
            if not targets:  # as before it is written again
                raise ConfigError("replicas_file", f"{file}: names no replica")
            self._set(targets)
        except ConfigError as error:
            log.error("%s; the replicas stay as they were", error)

    def _look_at_registry(self, registry: Registry) -> None:
        try:
            self._set(addresses("\n".join(registry.addresses()), "replicas"))
            self._failing = False
        except ConfigError as error:
            if not self._failing:
                log.error("the registry: %s; the replicas stay as they were", error)
            self._failing = True

    def _set(self, targets: Iterable[str]) -> None:
        targets = list(targets)
        with self._changing:
            removed = [self._members.pop(old) for old in set(self._members) - set(targets)]
            for target in targets:
                if target not in self._members:
                    member = RemoteReplica(target, self._secret, self._authorities)
                    self._members[target] = member
            if self._conductor is not None:
                self._tell(self._conductor)
                return
        for member in removed:
            member.close()

    def _tell(self, conductor: Conductor) -> None:
        """Has the conductor use the replicas that there are now. It closes those that it has had,
        once their requests have ended."""
        members = self.all
        used = [member for member in conductor.members if not member.leaving]
        replicas = {member.replica for member in used}
        for replica in members:
            if replica not in replicas:
                conductor.add(_member(replica))
        for member in used:
            if member.replica not in members:
                conductor.remove(member)


def _member(replica: RemoteReplica) -> Member:
    return Member(
        replica.target,
        replica,
        replica.target,
        lambda: replica.recent_load,
        lambda: replica.other_requests,
        lambda: replica.facts.kv_peer,
    )
