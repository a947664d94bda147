"""Pools of KV over a cache that holds some prompts, for tests."""

from __future__ import annotations

import numpy as np

from jaxserve.cache import CacheManager
from jaxserve.cache.tiers import LowerTiers
from jaxserve.replica.kv_pool import LocalKvPool
from jaxserve.settings.schema import CacheConfig

BLOCK = 4


class PoolOf:
    """A pool over a cache of `pages` pages of four tokens. now: of its clock."""

    def __init__(self, pages: int = 16, lower: LowerTiers | None = None):
        config = CacheConfig(block_size=BLOCK, pages=pages)
        self.cache = CacheManager(config, 1, 1, lower=lower)
        self.now = 100.0
        self.pool = LocalKvPool(self.cache, lambda work: work(), lambda: self.now)

    def hold(self, prompt: np.ndarray, blocks: int, salt: str = "") -> list[bytes]:
        """Caches the first blocks of a prompt, as those of a request that has ended; returns the
        keys of all of its blocks."""
        cache = self.cache
        hashes = cache.block_hashes(salt, lambda first, last: prompt[first:last])
        cache.admit(0, cache.match(hashes, 0).pages, 0)
        cache.extend(0, blocks)
        cache.stores.take()
        cache.publish(0, 0, blocks, hashes)
        cache.release(0)
        return list(hashes.keys(0, len(prompt) // BLOCK))
