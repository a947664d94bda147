"""Gives and takes the blocks of an engine as files, by way of its host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxserve.api.errors import RequestError
from jaxserve.cache import CacheManager
from jaxserve.cache.hashes import BlockHashes, is_block
from jaxserve.cache.prefix_match import BlockPage
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

    @property
    def _facts(self) -> KvFacts:
        fingerprint, dtype, layout = self._cache.identity
        return KvFacts(self._cache.block_size, fingerprint, dtype, layout)

    def get(self, prompt: np.ndarray, salt: str, first: int, most_bytes: int) -> KvFile:
        hashes = self._hashes(prompt, salt)
        found = sum(is_block(key) for keys in self._found(prompt, salt) for key in keys)
        most = max(most_bytes // self._tiers.block_bytes, 1)
        end = min(found, first + most)
        beside = self._beside(hashes, end)
        if end - first + len(beside) > most:
            end = min(end, first + max(most - len(beside), 1))
            beside = self._beside(hashes, end)
        keys = [hashes[block] for block in range(first, end)]
        blocks = self._read(keys)
        if not len(blocks):
            raise RequestError("prompt", f"has no block {first} here", "NOT_FOUND")
        if len(blocks) < len(keys):
            beside = []
        further = [part.key(hashes) for part in beside]
        pages = self._read(further)
        keys = [*keys[: len(blocks)], *further[: len(pages)]]
        sums = [block_checksum(key, row) for key, row in zip(keys, [*blocks, *pages])]
        tokens = prompt[: (first + len(blocks)) * self._facts.block_size]
        places = np.array(beside[: len(pages)], np.int32).reshape(-1, 2)
        return KvFile(self._facts, tokens, blocks, np.array(sums, np.uint32), pages, places)

    def _beside(self, hashes: BlockHashes, end: int) -> list[BlockPage]:
        """Returns the pages through which windows see behind blocks to before `end`, or behind one
        less, as far as they are here."""
        seen = self._cache.published.seen
        parts = dict.fromkeys([*seen.parts(max(end - 1, 0)), *seen.parts(end)])
        return self._run(lambda: [part for part in parts if self._has(part.key(hashes))])

    def _has(self, key: bytes) -> bool:
        return key in self._cache.pages.with_key or self._tiers.holds(key)

    def _read(self, keys: list[bytes]) -> np.ndarray:
        """Returns what has these keys, uint8 [keys, bytes], up to the first that is not here."""
        rows = np.empty((len(keys), self._tiers.block_bytes), np.uint8)
        self._exporter.want(keys)
        try:
            count = 0
            while count < len(keys) and self._exporter.read(keys[count], rows[count], READ_SECONDS):
                count += 1
        finally:
            self._exporter.unwant(keys)
        return rows[:count]

    def put(self, file: KvFile, salt: str) -> int:
        for name, here, given in zip(KvFacts._fields, self._facts, file.facts):
            if here != given:
                raise RequestError(FIELD, f"has {name} {given!r:.80}; here it is {here!r:.80}")
        if file.blocks.shape[1] != self._tiers.block_bytes:
            size = self._tiers.block_bytes
            raise RequestError(FIELD, f"has blocks of {file.blocks.shape[1]} bytes, not {size}")
        hashes = self._hashes(file.tokens, salt)
        parts = file.parts()
        keys = [part.key(hashes) for part in parts]
        for part, key, row, checksum in zip(parts, keys, file.rows, file.checksums):
            if block_checksum(key, row) != checksum:
                raise RequestError(FIELD, f"has a wrong checksum of block {part.block}")
        put = [self._put(key, row) for key, row in zip(keys, file.rows)]
        return sum(put[: len(file.blocks)])

    def _put(self, key: bytes, row: np.ndarray) -> bool:
        return self._tiers.put(key, lambda view: np.copyto(view, row))
