"""Pools of KV over a cache that holds some prompts, for tests."""

from __future__ import annotations

import numpy as np

from jaxserve.cache import CacheIdentity, CacheManager
from jaxserve.cache.tiers import LowerTiers
from jaxserve.clock import WallClock
from jaxserve.engine.block_export import BlockWishes, TierExporter
from jaxserve.engine.block_files import TierFiles
from jaxserve.replica.kv_pool import LocalKvPool
from jaxserve.replica.registry import Registry
from jaxserve.settings.schema import CacheConfig
from jaxserve.store.block_part import BlockPart, PartBytes
from jaxserve.store.tiered import TieredBlocks

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


class FilesOf:
    """A pool with files, over host memory for eight blocks of `size` bytes. model: the weights that
    they are of."""

    def __init__(self, model: str = "weights", size: int = 32):
        config = CacheConfig(block_size=BLOCK, pages=4)
        self.tiers = TieredBlocks(8, size, WallClock())
        identity = CacheIdentity(model, "float32")
        self.cache = CacheManager(config, 1, 1, identity, lower=self.tiers)
        run = lambda work: work()
        wishes = BlockWishes(self.cache, self.tiers, Registry(), run)
        layout = PartBytes(BlockPart(range(1), range(1)), size)
        exporter = TierExporter(wishes, self.tiers, layout)
        self.pool = TierFiles(self.cache, run, lambda: 0.0, exporter, self.tiers)

    def fill(self, prompt: np.ndarray, blocks: int, salt: str = "") -> np.ndarray:
        """Puts the first blocks of a prompt into host memory; returns them [blocks, bytes]."""
        hashes = self.cache.block_hashes(salt, lambda first, last: prompt[first:last])
        drawn = np.random.default_rng(blocks).integers(0, 256, (blocks, 32), np.uint8)
        for key, row in zip(hashes.keys(0, blocks), drawn):
            self.tiers.put(key, lambda view, row=row: np.copyto(view, row))
        return drawn
