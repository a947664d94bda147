"""The attention kernel: online softmax over the key tiles of a thread block's range of work."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxserve.kernels.merge import LOWEST
from jaxserve.kernels.triton.config import KernelConfig
from jaxserve.kernels.triton.keys import Keys
from jaxserve.kernels.work_split import UNMASKED, WorkRange, WorkSplit

LOG2E = math.log2(math.e)


def attention(
    q_g: Any,
    pos_g: Any,
    table_g: Any,
    tiles_g: Any,
    blocks_g: Any,
    total_g: Any,
    *rest: Any,
    config: KernelConfig,
) -> None:
    """Kernel body of one thread block.

    Arguments are refs to device memory: queries and their positions, the page table, and the arrays
    of `WorkSplit`. rest: arrays of the KV pages, and results (out, lse, partial out, partial lse).
    """
    *pools_g, out_g, lse_g, partial_g, partial_lse_g = rest
    H = q_g.shape[-1]
    split = WorkSplit(tiles_g, blocks_g, total_g)
    block = pl.program_id(0)
    work = WorkRange(split, block)

    def query_tile(index: Any, _: Any) -> tuple:
        part = work.tile(index)
        rows = config.rows(split, part, 0, config.tiles.rows)
        keys = Keys(config, table_g, split, part, pools_g, q_g.dtype)
        q = plgpu.load(q_g.at[rows.vectors(H)], mask=rows.exists[:, None], other=0)
        pos = plgpu.load(pos_g.at[rows.row, rows.token], mask=rows.exists, other=-1)
        whole = jnp.clip(tiles_g[part.place, UNMASKED], part.begin, part.end)
        step = functools.partial(_softmax, config, keys, q, pos)
        carry = (
            jnp.zeros(q.shape, jnp.float32),
            jnp.full(pos.shape, LOWEST, jnp.float32),
            jnp.zeros(pos.shape, jnp.float32),
            keys.pages(part.begin),
        )
        carry = lax.fori_loop(part.begin, whole, functools.partial(step, masked=False), carry)
        acc, top, total, _ = lax.fori_loop(
            whole, part.end, functools.partial(step, masked=True), carry
        )
        some = (pos >= 0) & (total > 0)
        safe = jnp.where(some, total, 1.0)
        out = acc * jnp.where(some, 1.0 / safe, 0.0)[:, None]
        lse = jnp.where(some, top * (1 / LOG2E) + jnp.log(safe), -jnp.inf)
        complete = (part.begin == 0) & (part.end == part.key_tiles)

        @pl.when(complete)
        def store_result() -> None:
            result = out.astype(out_g.dtype)
            plgpu.store(out_g.at[rows.vectors(H)], result, mask=rows.exists[:, None])
            plgpu.store(lse_g.at[rows.scalars], lse, mask=rows.exists)

        @pl.when(jnp.logical_not(complete))
        def store_partial() -> None:
            # 0: a tile that an earlier block began; 1: one that a later block ends
            place = block, jnp.where(part.begin > 0, 0, 1)
            partial_g[*place, :, :] = out
            partial_lse_g[*place, :] = lse

        return ()

    lax.fori_loop(0, work.query_tiles, query_tile, ())


def _softmax(
    config: KernelConfig,
    keys: Keys,
    q: jax.Array,
    pos: jax.Array,
    tile: Any,
    carry: Any,
    masked: bool,
) -> Any:
    """Adds a key tile to the accumulator [rows, H], the maximum score (times log2 e) [rows] and the
    sum of weights [rows]; `carry` has them and the pages of the tile."""
    acc, top, total, pages = carry
    following = keys.pages(tile + 1)  # before they are needed, so that loads of keys do not wait
    used = None
    if masked:
        key_pos = keys.positions(tile)
        used = keys.used(key_pos)
    k = keys.load(pages, tile, 0, used)
    s = plgpu.dot(q, k, trans_b=True)
    if config.inner:
        s = _tanh(s * config.inner)
    if masked:
        distance = pos[:, None] - key_pos[None, :]
        visible = distance >= 0
        if config.window is not None:
            visible &= distance < config.window
        s = jnp.where(visible, s, -jnp.inf)
    new = jnp.maximum(top, s.max(axis=1) * config.scale)
    shrink = jnp.exp2(top - new)
    p = jnp.exp2(s * config.scale - new[:, None])
    v = keys.load(pages, tile, 1, used)
    acc = acc * shrink[:, None] + plgpu.dot(p.astype(v.dtype), v)
    return acc, new, total * shrink + p.sum(axis=1), following


def _tanh(x: jax.Array) -> jax.Array:
    """Computes tanh by the exponential: the device's own keeps 11 bits."""
    return 1 - 2 / (1 + jnp.exp2(x * (2 * LOG2E)))
