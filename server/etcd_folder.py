"""The keys of a folder in etcd as a process knows them, kept current by a watch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType

from jaxserve.server.etcd import Etcd, EtcdError, EtcdUrl, HistoryLost, Key, Listing, Watch

RETRY_SECONDS = 0.5  # after etcd did not answer
CLOSE_SECONDS = 5.0
log = logging.getLogger(__name__)


class EtcdFolder:
    """Keys that begin with `prefix`, by name, followed by a thread from `start` until `close`.

    They are listed once, then changes come from the revision of the list on; where etcd does not
    know these any more, or has lost its data, keys are listed again. Without etcd the keys stay as
    they were. changed: called by the thread after each change.
    """

    def __init__(self, url: EtcdUrl, prefix: str, changed: Callable[[], None]):
        self.keys: Mapping[str, Key] = MappingProxyType({})
        self._etcd = Etcd(url)
        self._prefix = prefix
        self._changed = changed
        self._known: Listing | None = None  # what a watch goes on from
        self._watch: Watch | None = None
        self._failing = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="etcd", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        watch = self._watch
        if watch is not None:
            watch.close()
        self._thread.join(CLOSE_SECONDS)

    def _keep(self) -> None:
        while not self._closing.is_set():
            try:
                self._follow(self._known or self._list())
                self._failing = False
            except EtcdError as error:
                if isinstance(error, HistoryLost):
                    self._known = None
                elif not self._failing:
                    log.error("etcd: %s; what was read there stays as it was", error)
                    self._failing = True
                self._closing.wait(RETRY_SECONDS)

    def _list(self) -> Listing:
        listing = self._etcd.list(self._prefix)
        self._known = listing
        self._set({key.name: key for key in listing.keys})
        return listing

    def _follow(self, since: Listing) -> None:
        """Takes changes until the watch ends. Errors: EtcdError."""
        with_changes = self._etcd.watch(self._prefix, since)
        self._watch = with_changes
        if self._closing.is_set():
            with_changes.close()
        self._failing = False
        for changes, revision in with_changes:
            keys = dict(self.keys)
            for key in changes:
                keys.pop(key.name, None)
                if key.value is not None:
                    keys[key.name] = key
            self._known = since._replace(revision=revision)
            self._set(keys)

    def _set(self, keys: Mapping[str, Key]) -> None:
        self.keys = MappingProxyType(dict(keys))
        self._changed()
