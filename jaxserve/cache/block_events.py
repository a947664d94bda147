"""Sends listeners what a cache stores and loses, block by block.

Routers send requests to the replica that has most of their prefix: the conductor's directory and
the KV events for other people's routers are fed from here. A block is named by its key. Without
listeners the cache pays one look at an empty list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

import numpy as np

from jaxserve.cache.hashes import is_block


class Medium(Enum):
    """Kinds of memory that blocks are on."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """Consecutive blocks of one sequence, in order, that can be found by their keys from now on.

    parent: key of the block before the first; None where that begins the sequence. tokens
    [len(keys) * block_size]: their tokens; None where listeners have had them before, as of blocks
    that are now on one more medium, or where the cache does not know them: then the blocks may be
    of many sequences. salt: what keeps prefixes of tenants apart; '' for none.
    """

    keys: Sequence[bytes]
    medium: Medium = Medium.DEVICE
    parent: bytes | None = None
    tokens: np.ndarray | None = None
    salt: str = ""


class BlockListener(Protocol):
    """Receives what a cache stores and loses. Called on the thread that changes the cache: it must
    be short, must not block and must not raise."""

    def stored(self, blocks: StoredBlocks) -> None:
        """Notes blocks that can be found from now on."""

    def removed(self, keys: Sequence[bytes], medium: Medium) -> None:
        """Notes blocks that are no longer on this medium."""

    def cleared(self, medium: Medium) -> None:
        """Notes that no block is on this medium any more."""


class BlockEvents:
    """The listeners of one cache. They hear of blocks alone, by the pages of the first page group:
    what else of them is stored is for the cache to know.

    present: gives the blocks that can be found now, which a new listener receives first. heard:
    returns whether listeners hear of a page, by its key.
    """

    def __init__(
        self,
        present: Callable[[], Iterable[StoredBlocks]] = tuple,
        heard: Callable[[bytes], bool] = is_block,
    ):
        self._present = present
        self._heard = heard
        self._listeners: list[BlockListener] = []

    def __bool__(self) -> bool:
        return bool(self._listeners)

    def subscribe(self, listener: BlockListener) -> None:
        """Sends `listener` what can be found, and from now on what changes. To be called on the
        thread that changes the cache (see `Replica.post`)."""
        for blocks in self._present():
            self._stored(blocks, [listener])
        self._listeners.append(listener)

    def unsubscribe(self, listener: BlockListener) -> None:
        """Sends `listener` nothing more. To be called on the thread that changes the cache. Errors:
        ValueError where it does not listen."""
        self._listeners.remove(listener)

    def stored(self, blocks: StoredBlocks) -> None:
        """Sends all listeners blocks that can be found from now on."""
        self._stored(blocks, self._listeners)

    def _stored(self, blocks: StoredBlocks, listeners: Iterable[BlockListener]) -> None:
        if not all(map(self._heard, blocks.keys)):
            blocks = replace(blocks, keys=list(filter(self._heard, blocks.keys)))
        if blocks.keys:
            for listener in listeners:
                listener.stored(blocks)

    def removed(self, keys: Sequence[bytes], medium: Medium) -> None:
        """Sends all listeners blocks that are no longer on this medium."""
        heard = list(filter(self._heard, keys))
        if heard:
            for listener in self._listeners:
                listener.removed(heard, medium)

    def cleared(self, medium: Medium) -> None:
        """Sends all listeners that no block is on this medium any more."""
        for listener in self._listeners:
            listener.cleared(medium)
