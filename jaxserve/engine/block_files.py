"""Gives and takes the blocks of an engine as files, by way of its host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxserve.api.errors import RequestError
from jaxserve.cache import CacheManager
from jaxserve.replica.kv_pool import LocalKvPool
from jaxserve.store.checksum import block_checksum
from jaxserve.store.kv_file import FIELD, KvFacts, KvFile
from jaxserve.store.peers import BlockExporter
from jaxserve.store.tiered import TieredBlocks

READ_SECONDS = 1.0  # to wait for a block that is not on its way


class TierFiles(LocalKvPool):
    """The pool of an engine with tiers below its devices; implements `KvFiles`. exporter: offers
    its blocks. The rest: see `LocalKvPool`."""

    def __init__(
        self,
        cache: CacheManager,
        run: Callable[[Callable[[], Any]], Any],
        now: Callable[[], float],
        exporter: BlockExporter,
        tiers: TieredBlocks,
    ):
        super().__init__(cache, run, now)
        self._exporter = exporter
        self._tiers = tiers
        self._facts = KvFacts(cache.block_size, *cache.identity)

    def get(self, prompt: np.ndarray, salt: str, first: int, most_bytes: int) -> KvFile:
        on_pages, below = self._found(prompt, salt)
        keys = [*on_pages, *below][first:]
        keys = keys[: max(most_bytes // self._tiers.block_bytes, 1)]
        rows = np.empty((len(keys), self._tiers.block_bytes), np.uint8)
        self._exporter.want(keys)
        try:
            count = 0
            while count < len(keys) and self._exporter.read(keys[count], rows[count], READ_SECONDS):
                count += 1
        finally:
            self._exporter.unwant(keys)
        if not count:
            raise RequestError("prompt", f"has no block {first} here", "NOT_FOUND")
        sums = [block_checksum(key, row) for key, row in zip(keys[:count], rows)]
        tokens = prompt[: (first + count) * self._facts.block_size]
        return KvFile(self._facts, tokens, rows[:count], np.array(sums, np.uint32))

    def put(self, file: KvFile, salt: str) -> int:
        for name, here, given in zip(KvFacts._fields, self._facts, file.facts):
            if here != given:
                raise RequestError(FIELD, f"has {name} {given!r:.80}; here it is {here!r:.80}")
        if file.blocks.shape[1] != self._tiers.block_bytes:
            size = self._tiers.block_bytes
            raise RequestError(FIELD, f"has blocks of {file.blocks.shape[1]} bytes, not {size}")
        keys = list(self._hashes(file.tokens, salt).keys(file.first, file.first + len(file.blocks)))
        for number, (key, row) in enumerate(zip(keys, file.blocks), file.first):
            if block_checksum(key, row) != file.checksums[number - file.first]:
                raise RequestError(FIELD, f"has a wrong checksum of block {number}")
        return sum(self._put(key, row) for key, row in zip(keys, file.blocks))

    def _put(self, key: bytes, row: np.ndarray) -> bool:
        return self._tiers.put(key, lambda view: np.copyto(view, row))
