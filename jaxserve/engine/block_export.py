"""Offers the blocks of a replica to other replicas: see `store.peers`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jaxserve.cache import CacheManager
from jaxserve.cache.tiers import LowerTiers
from jaxserve.replica.registry import Registry


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
        self._cache = cache
        self._tiers = tiers
        self._registry = registry
        self._post = post

    @property
    def block_bytes(self) -> int:
        return self._tiers.block_bytes

    def want(self, keys: Sequence[bytes]) -> None:
        self._post(lambda: self._cache.stores.want(keys, self._tiers.holds))

    def unwant(self, keys: Sequence[bytes]) -> None:
        self._post(lambda: self._cache.stores.unwant(keys))

    def coming(self, request_id: str) -> bool:
        return request_id in self._registry

    def read(self, key: bytes, into: np.ndarray, seconds: float) -> bool:
        return self._tiers.wait(key, seconds) and self._tiers.read(key, into)
