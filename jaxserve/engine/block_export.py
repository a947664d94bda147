"""Offers the blocks of a replica to other replicas: see `store.peers`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from jaxserve.cache import CacheManager
from jaxserve.cache.tiers import LowerTiers
from jaxserve.replica.registry import Registry

WANT_SECONDS = 10.0  # for the engine's thread to take in what is wanted
WAY_SECONDS = 10.0  # from a page to host memory


class TierExporter:
    """Blocks of an engine, by way of its host memory; implements `BlockExporter`. post: runs a
    command on the engine's thread."""

    def __init__(
        self,
        cache: CacheManager,
        tiers: LowerTiers,
        registry: Registry,
        post: Callable[[Callable[[], object]], None],
    ):
        self._stores = cache.stores
        self._tiers = tiers
        self._registry = registry
        self._post = post

    @property
    def block_bytes(self) -> int:
        return self._tiers.block_bytes

    def want(self, keys: Sequence[bytes]) -> None:
        noted = threading.Event()

        def want() -> None:
            self._stores.want(keys, self._tiers.holds)
            noted.set()

        self._post(want)
        noted.wait(WANT_SECONDS)

    def unwant(self, keys: Sequence[bytes]) -> None:
        self._post(lambda: self._stores.unwant(keys))

    def coming(self, request_id: str) -> bool:
        return request_id in self._registry

    def read(self, key: bytes, into: np.ndarray, seconds: float) -> bool:
        arrived = self._tiers.wait(key, seconds)
        if not arrived and seconds and key in self._stores.promised:
            arrived = self._tiers.wait(key, WAY_SECONDS)
        if not (arrived or self._tiers.holds(key)):  # one on its way is worth the wait of `read`
            return False
        # what was sent is used there: kept longest here, it would drive out what is to be sent
        return self._tiers.read(key, into, use=False)
