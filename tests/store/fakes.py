"""Blocks for tests: bytes that follow from the key, so that whoever reads one can tell."""

from hashlib import blake2b
from pathlib import Path

import numpy as np

from jaxserve.cache.hashes import FIRST_PART
from jaxserve.store.tiered import TieredBlocks


def key_of(number: int) -> bytes:
    return FIRST_PART + blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


def slot_of(tiers: TieredBlocks, key: bytes) -> int:
    """The slot of host memory with a block."""
    blocks = tiers.host.blocks
    return next(slot for slot in range(blocks.slots) if blocks.verify(slot, key))


def flip_bit(tiers: TieredBlocks, slot: int, bit: int) -> None:
    """Flips a bit of the block in a slot of host memory."""
    tiers.host.blocks.view(slot)[bit // 8] ^= 1 << bit % 8


def descriptors_of(file: Path) -> list[int]:
    """Numbers under which this process has a file open."""
    links = Path("/proc/self/fd").iterdir()
    return [int(link.name) for link in links if link.resolve() == file]


def block_of(key: bytes, size: int) -> np.ndarray:
    """The right bytes [size] for a key; no two parts of a block are equal."""
    seed = int.from_bytes(key, "little")
    return np.random.Generator(np.random.SFC64(seed)).integers(0, 256, size, np.uint8)
