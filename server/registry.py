"""The registry of a cluster's replicas in etcd, for several conductors.

A replica puts its address under a lease, which it renews; when it ends, the address goes with the
lease. Conductors watch the addresses. Where etcd cannot be reached, replicas go on trying, and
conductors go on with whom they know. An address that is not in the list any more is
believed to be gone after a while only, in which a replica registers again with an etcd that has
lost its data.
"""

from __future__ import annotations

import logging
import threading
import time

from jaxserve.server.etcd import Etcd, EtcdError, EtcdUrl
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


class RegisteredReplicas:
    """The addresses of the replicas in the registry, as a conductor believes them. changed: set
    when they may have changed."""

    def __init__(self, url: EtcdUrl):
        self.changed = threading.Event()
        self._folder = EtcdFolder(url, _folder(url), self.changed.set)
        self._listed: dict[str, float] = {}  # when each was listed last, monotonic seconds
        self._folder.start()

    def addresses(self) -> list[str]:
        """Returns the addresses that are listed now or were lately. Entries that are no addresses
        are included."""
        now = time.monotonic()
        self._listed.update({key.value: now for key in self._folder.keys.values() if key.value})
        self._listed = {
            address: seen_at
            for address, seen_at in self._listed.items()
            if now - seen_at < GONE_SECONDS
        }
        return list(self._listed)

    def close(self) -> None:
        """Follows the registry no more."""
        self._folder.close()
