"""Packing of queries into rows for the tensor cores, and block shapes: defaults and those tuned
by measurement."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.kernels.kv_pages import FP8, SCALE_DTYPE

ROWS = 64  # rows of queries of a warpgroup: M of the wgmma instruction
SHARED_BYTES = 220 * 1024  # shared memory for tiles: a block has 227 KiB, and barriers need some
HEAD_DIMS = (64, 96, 128, 256)  # supported


def swizzle_columns(width: int, itemsize: int = 2) -> int:
    """Columns of a swizzled tile in shared memory, for rows of `width` numbers: 128 bytes, or the
    largest divisor of both."""
    return math.gcd(width * itemsize, 128) // itemsize


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Block shape of the attention kernel.

    keys: keys of a key tile. warpgroups: that compute (1 or 2). stages: key tiles in flight.
    blocks: thread blocks that the device runs at once (132 on H100 SXM and H200). narrow: tiles of
    8-bit keys or values in flight before dequantisation; 0 unless pages are of 8 bits.
    """

    keys: int
    warpgroups: int
    stages: int
    blocks: int = 132
    narrow: int = 0

    def shared_bytes(self, head_dim: int) -> int:
        """Bytes of shared memory of a block, without barriers, with 16-bit results."""
        wide = 2 * head_dim * (self.warpgroups * ROWS + 2 * self.stages * self.keys)
        return wide + self.narrow * self.keys * (head_dim + SCALE_DTYPE.itemsize)


def default_tiles(rows: int, head_dim: int, dtype: Any = jnp.bfloat16, blocks: int = 132) -> Tiles:
    """Block shape where none was measured.

    rows: query rows per kv head (T * G). dtype: of the pages. blocks: thread blocks at once. One
    warpgroup is used where it holds all rows; then loading limits the speed, and as many key tiles
    are in flight as fit. With 8-bit pages and a head dim of 256, two computing warpgroups would
    lack registers.
    """
    narrow = jnp.dtype(dtype) == FP8
    warpgroups = 1 if rows <= ROWS or (narrow and head_dim > 128) else 2
    tiles = Tiles(
        128 if head_dim <= 128 else 64, warpgroups, stages=2, blocks=blocks, narrow=int(narrow)
    )
    field = "narrow" if narrow else "stages"
    deeper = (
        dataclasses.replace(tiles, **{field: depth})
        for depth in (6, 5, 4, 3, 2)
        if narrow or tiles.warpgroups == 1
    )
    return next((tiles for tiles in deeper if tiles.shared_bytes(head_dim) <= SHARED_BYTES), tiles)


def tiles_for(kind: str, cores: int, rows: int, head_dim: int, dtype: Any) -> Tiles:
    """Block shape measured as fastest for the nearest number of query rows on this kind of device
    (`tuned.json`, written by `python -m experiments.benchmarks.h200 --keep_tiles`), else the
    default.

    kind, cores: the device's name and number of multiprocessors. rows, head_dim, dtype: as of
    `default_tiles`.
    """
    similar = [
        entry
        for entry in tuned().get(kind, ())
        if entry["head_dim"] == head_dim
        and entry["dtype"] == str(dtype)
        and (entry["rows"] <= ROWS) == (rows <= ROWS)
    ]
    if not similar:
        return default_tiles(rows, head_dim, dtype, cores)
    best = min(similar, key=lambda entry: abs(math.log2(entry["rows"] / rows)))
    return Tiles(
        best["keys"],
        best["warpgroups"],
        best["stages"],
        best["blocks_per_core"] * cores,
        best["narrow"],
    )


@functools.cache
def tuned() -> dict[str, list[dict[str, Any]]]:
    """Measured block shapes by device kind, from tuned.json."""
    return json.loads(Path(__file__).with_name("tuned.json").read_text())


class Packing(NamedTuple):
    """Packing of queries [R, T, K, G, H] into rows [R, M, heads, H].

    packed: the G query heads of a kv head are rows, token by token (as grouped-query decode needs).
    rows: M, a multiple of the tile's rows, or of 8 if less than one tile. heads: of the result; a
    kv head has `group` of them. side: computing warpgroups of a block that take different heads;
    the others take different rows. by_head: T is 1, and queries stay [R, heads, G, H] as they lie,
    though `rows` is a multiple of 8: the copy engine leaves out rows that do not exist.
    """

    packed: bool
    rows: int
    heads: int
    group: int
    side: int
    by_head: bool = False


def pack(T: int, K: int, G: int, warpgroups: int, partial: bool) -> Packing:
    """Chooses a packing. partial: fewer rows than ROWS may be stored; this needs results of the
    queries' type, which go through the queries' buffer."""
    if partial and T * G <= ROWS - 8:
        return Packing(True, -(-T * G // 8) * 8, K, 1, 1, by_head=T == 1)
    if T < ROWS:
        return Packing(True, -(-T * G // (ROWS * warpgroups)) * ROWS * warpgroups, K, 1, 1)
    side = math.gcd(G, warpgroups)
    step = ROWS * (warpgroups // side)
    return Packing(False, -(-T // step) * step, K * G, G, side)


def to_rows(x: jax.Array, packing: Packing, fill: float = 0, repeat: int = 1) -> jax.Array:
    """Packs x [R, T, K, G, H] into rows [R, M, heads, H], padded with `fill`. Values that all heads
    share have K = G = 1; `repeat` is how often packed rows repeat them."""
    R, T, K, G, H = x.shape
    if packing.by_head:
        return x.reshape(R, K, G, H)
    if packing.packed:
        x = jnp.repeat(x, repeat, 3).transpose(0, 1, 3, 2, 4).reshape(R, -1, K, H)
    else:
        x = x.reshape(R, T, K * G, H)
    padding = packing.rows - x.shape[1]
    if padding:
        x = jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0)), constant_values=fill)
    return x


def from_rows(
    out: jax.Array, lse: jax.Array, shape: tuple[int, ...], packing: Packing
) -> tuple[jax.Array, jax.Array]:
    """Unpacks out [R, M, heads, H] and lse [R, heads, M] to the queries' shape [R, T, K, G, H]."""
    R, T, K, G, H = shape
    if packing.by_head:
        return out.reshape(shape), lse[:, None, :, :G]
    lse = lse.transpose(0, 2, 1)
    if packing.packed:
        out = out[:, : T * G].reshape(R, T, G, K, H)
        lse = lse[:, : T * G].reshape(R, T, G, K)
        return out.transpose(0, 1, 3, 2, 4), lse.transpose(0, 1, 3, 2)
    return out[:, :T].reshape(shape), lse[:, :T].reshape(shape[:-1])
