"""Makes blocks of one size out of a stream of blocks of another size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxserve.cache.tiers import SourceBlocks
from jaxserve.engine.block_layout import BlockLayout
from jaxserve.store.peers import BlockStream, Route


class ResizedStream:
    """A `BlockStream` of the blocks `keys`, made of those of `source`, which cover them. Blocks may
    be left out, but not come again. here, there: the layouts of both."""

    def __init__(
        self,
        stream: BlockStream,
        keys: Sequence[bytes],
        source: SourceBlocks,
        ours: BlockLayout,
        theirs: BlockLayout,
    ):
        self._stream = stream
        self._place = {key: number for number, key in enumerate(keys)}
        self._source = source
        self._here = ours
        self._there = theirs
        self._block = np.empty(theirs.bytes, np.uint8)
        self._number = -1  # of the source's block that `_block` is

    @property
    def route(self) -> Route:
        return self._stream.route

    def read(self, key: bytes, into: np.ndarray) -> bool:
        """Copies a block; False where one of the source's that it needs does not come."""
        size = self._here.block_size
        first = self._source.skip + self._place[key] * size
        at = first
        while at < first + size:
            if not self._bring(at // self._source.size):
                return False
            begin = at % self._source.size
            count = min(self._source.size - begin, first + size - at)
            for mine, part in zip(self._here.parts(into), self._there.parts(self._block)):
                mine[:, :, :, at - first : at - first + count] = part[:, :, :, begin:][
                    :, :, :, :count
                ]
            at += count
        return True

    def _bring(self, number: int) -> bool:
        """Reads on to the source's block with this number."""
        while self._number < number:
            if not self._stream.read(self._source.keys[self._number + 1], self._block):
                return False
            self._number += 1
        return True

    def close(self) -> None:
        self._stream.close()
