"""Entry point of the Triton kernels: checks what they support, splits the work and launches
them."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxserve.kernels.kv_pages import COMPUTE_DTYPES, FP8, KVPages, check_pages
from jaxserve.kernels.merge import merge
from jaxserve.kernels.triton.attention import LOG2E, attention
from jaxserve.kernels.triton.combine import ROWS, combine
from jaxserve.kernels.triton.config import KernelConfig
from jaxserve.kernels.triton.tiles import HEAD_DIMS, Tiles, tiles_for
from jaxserve.kernels.work_split import split_work


def attend(
    q: jax.Array,
    q_pos: jax.Array,
    pages: KVPages,
    table: jax.Array,
    slot: jax.Array,
    entries: jax.Array,
    *,
    scale: float,
    softcap: float = 0,
    window: int | None = None,
    value_dim: int | None = None,
    dtype: Any = jnp.float32,
    before: tuple[jax.Array, jax.Array] | None = None,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention over pages. Arguments and results are those of `ops.attend`, and:

    tiles: block shape; None: that for an A100. interpret: run in the Pallas interpreter. Errors:
    NotImplementedError, with the reason, for what is unsupported.
    """
    R, T, K, G, H = q.shape
    tiles = tiles or tiles_for(shape=q.shape, dtype=pages.kv.dtype)
    check(pages.kv, value_dim, tiles)
    computed = pages.kv.dtype
    if computed == FP8:
        computed = q.dtype if q.dtype in COMPUTE_DTYPES else COMPUTE_DTYPES[0]
    config = KernelConfig(
        (softcap or scale) * LOG2E,
        scale / softcap if softcap else 0,
        window,
        q.shape,
        pages.kv.shape[3],
        tiles,
    )
    padding = config.row_tiles * tiles.rows - T * G
    pos = jnp.pad(jnp.repeat(q_pos, G, 1), ((0, 0), (0, padding)), constant_values=-1)
    split = split_work(pos, table, slot, entries, config.work)
    blocks = tiles.blocks
    array = jax.ShapeDtypeStruct
    out_shape = (
        array(q.shape, dtype if before is None else jnp.float32),
        array(q.shape[:-1], jnp.float32),
        array((blocks, 2, tiles.rows, H), jnp.float32),
        array((blocks, 2, tiles.rows), jnp.float32),
    )
    out, lse, *partial = pl.pallas_call(
        functools.partial(attention, config=config),
        out_shape,
        grid=(blocks,),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="attention",
    )(q.astype(computed), q_pos, table, *split, *jax.tree.leaves(pages))
    out, lse = pl.pallas_call(
        functools.partial(combine, config=config),
        out_shape[:2],
        grid=(blocks, tiles.rows // ROWS),
        input_output_aliases={5: 0, 6: 1},
        compiler_params=plgpu.CompilerParams(num_warps=4),
        interpret=interpret,
        name="combine",
    )(*partial, *split, out, lse)
    if before is None:
        return out, lse
    out, lse = merge(*(jnp.stack(both) for both in zip(before, (out, lse))))
    return out.astype(dtype), lse


def check(
    kv: jax.Array | jax.ShapeDtypeStruct, value_dim: int | None = None, tiles: Tiles | None = None
) -> None:
    """Checks that the kernels support pages of this dtype and shape [..., C, H] and values of this
    dim, with these tiles or the default ones. Errors: NotImplementedError, with the reason."""
    check_pages(kv, value_dim, HEAD_DIMS)
    size = kv.shape[3]
    tiles = tiles or tiles_for(shape=(1, 1, 1, 1, kv.shape[4]), dtype=kv.dtype)
    if tiles.keys % size and size % tiles.keys:
        raise NotImplementedError(
            f"pages of {size} tokens; the size must divide key tiles of {tiles.keys} keys or be a "
            "multiple of them"
        )
    # Pallas counts in 32 bits up to 4 GiB
    if kv.dtype == FP8 and math.prod(kv.shape) in range(2**31 + 1, 2**32 + 1):
        raise NotImplementedError(f"pages of {kv.dtype} of 2 to 4 GiB a layer")
