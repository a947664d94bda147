"""The kernel that merges query tiles whose key tiles were split over several thread blocks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxserve.kernels.merge import LOWEST
from jaxserve.kernels.triton.config import KernelConfig
from jaxserve.kernels.work_split import WorkRange, WorkSplit

ROWS = 16  # of a thread block of this kernel


def combine(
    partial_g: Any,
    partial_lse_g: Any,
    tiles_g: Any,
    blocks_g: Any,
    total_g: Any,
    out_in_g: Any,
    lse_in_g: Any,
    out_g: Any,
    lse_g: Any,
    *,
    config: KernelConfig,
) -> None:
    """Kernel body: merges the partial results of the query tile that a block of `attention` began
    and later blocks went on with, and writes out and lse in place.

    The grid is (block, `ROWS` of its rows). partial_g, partial_lse_g: partial results of
    `attention`; tiles_g, blocks_g, total_g: the arrays of `WorkSplit`. out_in_g, lse_in_g: what
    out_g and lse_g were.
    """
    del out_in_g, lse_in_g  # the same memory as the results
    split = WorkSplit(tiles_g, blocks_g, total_g)
    block = pl.program_id(0)
    first = pl.program_id(1) * ROWS
    work = WorkRange(split, block)

    def merge_parts(part: Any) -> None:
        units_per_block = blocks_g[0, 1] - blocks_g[0, 0]
        last = lax.div(part.offset + part.key_tiles - 1, units_per_block)

        def load(block: Any, which: int) -> tuple[jax.Array, jax.Array]:
            rows = pl.ds(first, ROWS)
            return partial_g[block, which, rows, :], partial_lse_g[block, which, rows]

        def merge(block: Any, carry: Any) -> Any:
            acc, top, total = carry
            values, score = load(block, 0)
            new = jnp.maximum(top, score)
            shrink = jnp.exp(top - new)
            weight = jnp.exp(score - new)
            acc = acc * shrink[:, None] + values * weight[:, None]
            return acc, new, total * shrink + weight

        acc, score = load(block, 1)
        top = jnp.maximum(score, LOWEST)
        acc, top, total = lax.fori_loop(
            block + 1, last + 1, merge, (acc, top, jnp.exp(score - top))
        )
        some = total > 0
        safe = jnp.where(some, total, 1.0)
        rows = config.rows(split, part, first, ROWS)
        out = (acc / safe[:, None]).astype(out_g.dtype)
        plgpu.store(out_g.at[rows.vectors(out.shape[1])], out, mask=rows.exists[:, None])
        lse = jnp.where(some, top + jnp.log(safe), -jnp.inf)
        plgpu.store(lse_g.at[rows.scalars], lse, mask=rows.exists)

    @pl.when(work.query_tiles > 0)
    def last_query_tile() -> None:
        part = work.tile(work.query_tiles - 1)
        pl.when((part.begin == 0) & (part.end < part.key_tiles))(lambda: merge_parts(part))
