"""The registry of a cluster in etcd, for several conductors: its replicas, and their roles.

A replica puts its address under a lease, which it renews; when it ends, the address goes with the
lease. Conductors watch the addresses. Where etcd cannot be reached, replicas go on trying, and
conductors go on with whom they know. An address that is not in the list any more is
believed to be gone after a while only, in which a replica registers again with an etcd that has
lost its data. Roles are one key without a lease, which a conductor replaces only if it has not
changed since it was read: they last over restarts of all.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping
from types import MappingProxyType

from jaxserve.cluster.role_board import AssignedRoles
from jaxserve.cluster.roles import Role
from jaxserve.server.etcd import Etcd, EtcdError, EtcdUrl, Key
from jaxserve.server.etcd_folder import EtcdFolder

LEASE_SECONDS = 10  # without a sign of life, after which a replica is not listed
RENEW_SECONDS = LEASE_SECONDS / 3
RETRY_SECONDS = 0.5  # after etcd did not answer
GONE_SECONDS = 15.0  # that a replica is kept after it was last listed
CLOSE_SECONDS = 10.0
log = logging.getLogger(__name__)


def _folder(url: EtcdUrl) -> str:
    return f"{url.prefix}/replicas/"


class Registration:
    """Keeps the address of a replica in the registry until `close`, on a thread of its own."""

    def __init__(self, url: EtcdUrl, address: str):
        self._etcd = Etcd(url)
        self._key = _folder(url) + address
        self._address = address
        self._lease = ""
        self._failing = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="registry", daemon=True)
        self._thread.start()

    def _keep(self) -> None:
        pause = 0.0
        while not self._closing.wait(pause):
            try:
                self._register()
                pause = RENEW_SECONDS
                self._failing = False
            except EtcdError as error:
                pause = RETRY_SECONDS
                if not self._failing:
                    log.warning("this replica cannot be registered: %s", error)
                self._failing = True

    def _register(self) -> None:
        """Renews the lease, or takes a new one if it has ended."""
        if self._lease and self._etcd.renew(self._lease):
            return
        self._lease = ""
        lease = self._etcd.grant(LEASE_SECONDS)
        self._etcd.put(self._key, self._address, lease)
        self._lease = lease
        log.info("registered as %s", self._address)

    def close(self) -> None:
        """Takes the address out. Without etcd it goes when the lease ends."""
        self._closing.set()
        self._thread.join(CLOSE_SECONDS)
        if self._lease and not self._thread.is_alive():
            try:
                self._etcd.revoke(self._lease)
            except EtcdError as error:
                log.warning("this replica cannot be unregistered: %s", error)


class Registry:
    """Facts that conductors share by etcd, as one of them knows them: the addresses of replicas,
    and the roles on which conductors agree (`RoleBoard`). changed: set when addresses may have
    changed."""

    def __init__(self, url: EtcdUrl):
        self.changed = threading.Event()
        self._etcd = Etcd(url)
        self._proposing = threading.Lock()
        self._replicas = _folder(url)
        self._roles = f"{url.prefix}/roles"
        self._keys = EtcdFolder(url, f"{url.prefix}/", self._take)
        self._listed: dict[str, float] = {}  # when each was listed last, monotonic seconds
        self._agreed = AssignedRoles()
        self._keys.start()

    def _take(self) -> None:
        """Reads the keys, which have changed."""
        key = self._keys.keys.get(self._roles)
        revision = 0 if key is None else key.revision
        if revision != self._agreed.version:
            self._agreed = AssignedRoles(_roles_of(key), revision)
        self.changed.set()

    def addresses(self) -> list[str]:
        """Returns the addresses that are listed now or were lately. Entries that are no addresses
        are included."""
        now = time.monotonic()
        for key in self._keys.keys.values():
            if key.name.startswith(self._replicas) and key.value:
                self._listed[key.value] = now
        self._listed = {
            address: seen_at
            for address, seen_at in self._listed.items()
            if now - seen_at < GONE_SECONDS
        }
        return list(self._listed)

    def read(self) -> AssignedRoles:
        return self._agreed

    def propose(self, roles: Mapping[str, Role], version: int) -> bool:
        text = json.dumps({name: role.value for name, role in roles.items()})
        with self._proposing:
            try:
                return self._etcd.put_if(self._roles, text, version)
            except EtcdError as error:
                log.warning("roles of replicas cannot be changed: %s", error)
                return False

    def close(self) -> None:
        """Follows the registry no more."""
        self._keys.close()


def _roles_of(key: Key | None) -> Mapping[str, Role]:
    """Returns the roles in a key; none if it has something else."""
    try:
        roles = json.loads(key.value) if key is not None and key.value else {}
        return MappingProxyType({name: Role(role) for name, role in roles.items()})
    except (ValueError, AttributeError, TypeError) as error:
        log.error("the roles in the registry are not used: %s", error)
        return MappingProxyType({})
