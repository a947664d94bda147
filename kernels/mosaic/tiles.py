"""How queries become rows, and how large the tiles are."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.kernels.kv_pages import FP8, SCALE

ROWS = 64  # of a warpgroup: what one wgmma has
SHARED = 220 * 1024  # bytes of shared memory for tiles: a block has 227 KiB, and some for barriers
HEAD_DIMS = (64, 96, 128, 256)
WIDE = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)  # types that are multiplied


def column(width: int, itemsize: int = 2) -> int:
    """Columns of so wide a row that lie side by side in shared memory: 128 bytes of them, or what
    divides both."""
    return math.gcd(width * itemsize, 128) // itemsize


@dataclasses.dataclass(frozen=True)
class Tiles:
    """`keys` of a key tile, `warpgroups` that compute (1 or 2), `stages` of key tiles in flight,
    `blocks` that the device runs at once; `narrow` tiles of keys or values in flight before they
    are widened, where pages are of 8 bits."""

    keys: int
    warpgroups: int
    stages: int
    blocks: int = 132  # H100 SXM, H200
    narrow: int = 0

    def shared_bytes(self, head_dim: int) -> int:
        """Shared memory of a block, without barriers, where results are of 16 bits."""
        wide = 2 * head_dim * (self.warpgroups * ROWS + 2 * self.stages * self.keys)
        return wide + self.narrow * self.keys * (head_dim + SCALE.itemsize)


def default_tiles(rows: int, head_dim: int, dtype: Any = jnp.bfloat16, blocks: int = 132) -> Tiles:
    """For so many query rows of a kv head and pages of this type: one warpgroup where one tile
    holds them, and as many key tiles in flight as there is room for where bytes are what takes
    time. A product with 256 columns needs more registers than four warpgroups leave it."""
    narrow = jnp.dtype(dtype) == FP8
    warpgroups = 1 if rows <= ROWS or (narrow and head_dim > 128) else 2
    tiles = Tiles(
        128 if head_dim <= 128 else 64, warpgroups, stages=2, blocks=blocks, narrow=int(narrow)
    )
    field = "narrow" if narrow else "stages"
    deeper = (
        dataclasses.replace(tiles, **{field: deep})
        for deep in (6, 5, 4, 3, 2)
        if narrow or tiles.warpgroups == 1
    )
    return next((tiles for tiles in deeper if tiles.shared_bytes(head_dim) <= SHARED), tiles)


def tiles_for(kind: str, cores: int, rows: int, head_dim: int, dtype: Any) -> Tiles:
    """What was fastest on this kind of device for the nearest number of query rows, where it was
    measured (`tuned.json`, which `python -m experiments.benchmarks.h200 --keep_tiles` writes); else
    the default."""
    like = lambda row: (
        (row["head_dim"], row["dtype"], row["rows"] <= ROWS) == (head_dim, str(dtype), rows <= ROWS)
    )
    alike = list(filter(like, tuned().get(kind, ())))
    if not alike:
        return default_tiles(rows, head_dim, dtype, cores)
    row = min(alike, key=lambda row: abs(math.log2(row["rows"] / rows)))
    return Tiles(
        row["keys"], row["warpgroups"], row["stages"], row["blocks_per_core"] * cores, row["narrow"]
    )


@functools.cache
def tuned() -> dict[str, list[dict[str, Any]]]:
    """Block shapes by kind of device."""
    return json.loads(Path(__file__).with_name("tuned.json").read_text())


class Packing(NamedTuple):
    """How queries [R, T, K, G, H] become rows [R, M, heads, H]; a kv head has `group` of these
    heads. Of a block's warpgroups `side` take different heads, and the others different rows."""

    packed: bool  # the G heads of a kv head are rows, token by token
    rows: int  # M, whole tiles, or whole eights where that is less than one
    heads: int
    group: int
    side: int


def pack(T: int, K: int, G: int, warpgroups: int, thin: bool) -> Packing:
    """`thin`: less than a tile may be less than ROWS; results are of the queries' type then, and go
    through their buffer."""
    if thin and T * G <= ROWS - 8:
        return Packing(True, -(-T * G // 8) * 8, K, 1, 1)
    if T < ROWS:
        return Packing(True, -(-T * G // (ROWS * warpgroups)) * ROWS * warpgroups, K, 1, 1)
    side = math.gcd(G, warpgroups)
    step = ROWS * (warpgroups // side)
    return Packing(False, -(-T // step) * step, K * G, G, side)


def to_rows(x: jax.Array, packing: Packing, fill: float = 0, repeat: int = 1) -> jax.Array:
    """x [R, T, K, G, H] -> [R, M, heads, H]. What all heads have alike has K = G = 1, and where
    they are rows is repeated for each."""
    R, T, K, G, H = x.shape
    if packing.packed:
        x = jnp.repeat(x, repeat, 3).transpose(0, 1, 3, 2, 4).reshape(R, -1, K, H)
    else:
        x = x.reshape(R, T, K * G, H)
    lack = packing.rows - x.shape[1]
    return jnp.pad(x, ((0, 0), (0, lack), (0, 0), (0, 0)), constant_values=fill) if lack else x


def from_rows(
    out: jax.Array, lse: jax.Array, shape: tuple[int, ...], packing: Packing
) -> tuple[jax.Array, jax.Array]:
    """out [R, M, heads, H], lse [R, heads, M] -> as the queries were."""
    R, T, K, G, H = shape
    lse = lse.transpose(0, 2, 1)
    if packing.packed:
        out = out[:, : T * G].reshape(R, T, G, K, H)
        lse = lse[:, : T * G].reshape(R, T, G, K)
        return out.transpose(0, 1, 3, 2, 4), lse.transpose(0, 1, 3, 2)
    return out[:, :T].reshape(shape), lse[:, :T].reshape(shape[:-1])
