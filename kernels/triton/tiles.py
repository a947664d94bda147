"""Block shapes of the Triton kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxserve.kernels.kv_pages import FP8

LEAST_ROWS = 16  # of a product on tensor cores
MOST_ROWS = 128
HEAD_DIMS = (64, 128, 256)  # supported
MOST_WARPS = 12  # of a multiprocessor: with up to 168 registers a thread
# bytes of shared memory of a multiprocessor by compute capability, less what each block needs
# beside its tiles; those that are not named here have the least
SHARED = {"8.0": 163 * 1024, "8.7": 163 * 1024, "9.0": 227 * 1024, "10.0": 227 * 1024}
LEAST_SHARED = 99 * 1024


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Block shape of the attention kernel.

    rows: packed rows of a query tile, a power of two of at least 16. keys: keys of a key tile.
    warps: of a thread block. stages: key tiles that are loaded or computed at once, and one.
    blocks: thread blocks that share the work.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    blocks: int

    def shared_bytes(self, head_dim: int, itemsize: int) -> int:
        """Bytes of shared memory of a block, about: queries and weights of 16 bits, and keys and
        values of `itemsize`."""
        loaded = 2 * (self.stages - 1) * self.keys * head_dim * itemsize
        return loaded + 2 * self.rows * (head_dim + self.keys)


def tiles_for(
    capability: str = "8.0",
    cores: int = 108,
    shape: tuple[int, ...] = (1, 1, 1, 1, 128),
    dtype: Any = jnp.bfloat16,
) -> Tiles:
    """Chooses a block shape, by compiled registers and shared memory: none was measured.

    capability, cores: compute capability of the device and number of its multiprocessors, here of
    an A100. shape: of queries, [R, T, K, G, H]. dtype: of the pages.
    """
    _, T, _, G, H = shape
    dtype = jnp.dtype(dtype)
    most = MOST_ROWS if H <= 128 and dtype != FP8 else MOST_ROWS // 2
    rows = LEAST_ROWS
    while rows < min(T * G, most):
        rows *= 2
    warps = 8 if rows * H > 64 * 64 else 4
    tiles = Tiles(rows, 64 if H <= 128 else 32, warps, 3, cores)
    shared = SHARED.get(capability, LEAST_SHARED)
    if tiles.shared_bytes(H, dtype.itemsize) > shared:
        tiles = dataclasses.replace(tiles, stages=2)
    at_once = min(shared // tiles.shared_bytes(H, dtype.itemsize), MOST_WARPS // warps)
    return dataclasses.replace(tiles, blocks=cores * max(1, at_once))
