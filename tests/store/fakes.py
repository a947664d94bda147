"""Blocks for tests: bytes that follow from the key, so that whoever reads one can tell."""

from hashlib import blake2b

import numpy as np


def key_of(number: int) -> bytes:
    return blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


def block_of(key: bytes, size: int) -> np.ndarray:
    """The right bytes [size] for a key; no two parts of a block are equal."""
    seed = int.from_bytes(key, "little")
    return np.random.Generator(np.random.SFC64(seed)).integers(0, 256, size, np.uint8)
