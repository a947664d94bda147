"""Blocks in host memory: numbered slots of one allocation, each with the checksum of what is in it.

Who owns a slot decides what is in it and when. A slot is filled through `view`, then sealed under
its block's key; readers verify the bytes first.
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

from jaxserve.settings.schema import ConfigError
from jaxserve.store.checksum import block_checksum

_UNSEALED = -1


class HostBlocks:
    """Slots for blocks of `block_bytes` each, numbered from 0, in one contiguous allocation.

    Memory is taken from the system when a slot is first written to. Every slot begins on a page of
    the system, as direct I/O needs, so `stride` may be larger than `block_bytes`; `memory`
    [slots * stride] uint8 is all of it, for registering. It is left out of core dumps.
    Different slots may be used by different threads at once; a slot belongs to one at a time.
    """

    def __init__(self, slots: int, block_bytes: int):
        """Reserves the memory. Errors: ValueError for less than one slot or byte; ConfigError where
        the system has not that much memory."""
        if slots < 1 or block_bytes < 1:
            raise ValueError(f"slots {slots} and block_bytes {block_bytes} must be at least 1")
        self.slots = slots
        self.block_bytes = block_bytes
        self.stride = -(-block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.memory = _reserve(slots * self.stride)
        self._checksums = np.full(slots, _UNSEALED, np.int64)

    def view(self, slot: int) -> np.ndarray:
        """The bytes of a slot, uint8 [block_bytes], to read and write in place."""
        begin = self._checked(slot) * self.stride
        return self.memory[begin : begin + self.block_bytes]

    def seal(self, slot: int, key: bytes) -> None:
        """Computes and keeps the checksum of what the slot holds, for the block `key`."""
        self._checksums[slot] = block_checksum(key, self.view(slot))

    def verify(self, slot: int, key: bytes) -> bool:
        """Returns whether the slot was sealed for the block `key` and still holds the same bytes.
        A slot that is not sealed holds no block."""
        kept = self._checksums[self._checked(slot)]
        return bool(kept == block_checksum(key, self.view(slot)))

    def clear(self, slot: int) -> None:
        """Forgets the block in a slot; its memory stays taken, for the next one."""
        self._checksums[self._checked(slot)] = _UNSEALED

    def _checked(self, slot: int) -> int:
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot}: there are {self.slots}")
        return slot


def _reserve(size: int) -> np.ndarray:
    try:
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            "host_cache_gib", f"{size / 2**30:.2f} GiB of host memory cannot be reserved: {error}"
        ) from None
    if hasattr(mmap, "MADV_DONTDUMP"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_DONTDUMP)
    return np.frombuffer(memory, np.uint8)
