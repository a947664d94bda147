"""Brings blocks of prompts that wait from slower tiers to host memory, on threads."""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from jaxserve.cache.tiers import Lookup
from jaxserve.store.backing import BackingTiers
from jaxserve.store.host_index import NORMAL, PREFETCHED_SHARE
from jaxserve.store.host_tier import HostTier
from jaxserve.store.tally import Tally

log = logging.getLogger(__name__)


class _Missing(Exception):
    """A block is not on disk after all."""


class Prefetcher:
    """Prefetches blocks from the disk and from the shared store, whose `Coming` it implements. All
    methods may be called from any thread."""

    def __init__(self, host: HostTier, behind: BackingTiers, tally: Tally):
        self._host = host
        self._behind = behind
        self._tally = tally
        self._lock = threading.Lock()
        self._closing = False
        self.pending = 0  # blocks that are to be prefetched
        self._thread = ThreadPoolExecutor(1, "kv-prefetch")

    @property
    def most(self) -> int:
        """Blocks that may be on their way from slower tiers at once."""
        return self._host.blocks.slots // PREFETCHED_SHARE

    def prefetch(self, keys: Sequence[bytes]) -> Lookup:
        """Has blocks of a prompt that are on disk, or in the shared store behind those that are
        nearer, brought to host memory: the first of them, as far as there is room."""
        on_disk = [key for key in keys if key in self._behind]
        if on_disk:
            self._from_disk(on_disk)
        shared = self._behind.shared
        if shared is None:
            return Lookup(answered=True)
        is_near = lambda key: self._host.holds(key) or key in self._behind
        missing = itertools.dropwhile(is_near, keys)
        return shared.look(list(itertools.islice(missing, self._room)), self)

    @property
    def _room(self) -> int:
        return max(self.most - self.pending, 0)

    # --- from disk

    def _from_disk(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            wanted = [key for key in keys if not self._host.holds(key)][: self._room]
            if wanted and not self._closing:
                self.pending += len(wanted)
                self._thread.submit(self._bring_all, wanted)

    def _bring_all(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            try:
                if not self._closing and self._bring(key):
                    self._tally.add("prefetched")
            except _Missing:
                pass
            except Exception:
                log.exception("a block was not prefetched")
            finally:
                self._count(-1)

    def _bring(self, key: bytes) -> bool:
        return self._host.put(key, functools.partial(self._fill, key), self._behind.until(key))

    def _fill(self, key: bytes, into: np.ndarray) -> None:
        """Reads a block from disk. Errors: _Missing."""
        if not self._behind.read(key, into):
            raise _Missing

    def _count(self, more: int) -> None:
        with self._lock:
            self.pending += more

    # --- from the shared store

    def expect(self, keys: Sequence[bytes]) -> None:
        """Counts blocks as coming from the shared store."""
        self._count(len(keys))
        self._host.expect(keys)

    def came(self, key: bytes, block: np.ndarray) -> None:
        """Copies a block that came from the shared store."""
        if self._host.put(key, lambda view: np.copyto(view, block), NORMAL):
            self._tally.add_read("shared_reads", key)

    def settle(self, keys: Sequence[bytes]) -> None:
        """Ends the expectation of blocks from the shared store."""
        self._host.settle(keys)
        self._count(-len(keys))

    def close(self) -> None:
        """Brings no more blocks from disk."""
        with self._lock:
            self._closing = True
        self._thread.shutdown()
