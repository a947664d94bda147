"""The kernel that merges query tiles whose key tiles were split over several thread blocks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxserve.kernels.merge import LOWEST
from jaxserve.kernels.mosaic.config import ACC_LAYOUT, ROW_LAYOUT, KernelConfig
from jaxserve.kernels.mosaic.tiles import swizzle_columns
from jaxserve.kernels.work_split import WorkRange, WorkSplit


def combine(
    partial_g: Any,
    partial_lse_g: Any,
    tiles_g: Any,
    blocks_g: Any,
    total_g: Any,
    out_g: Any,
    lse_g: Any,
    *,
    config: KernelConfig,
    out: Any = None,
    lse: Any = None,
) -> None:
    """Kernel body: merges the partial results of the query tile that this block began and later
    blocks went on with, and writes out and lse in place.

    The grid is (block, warpgroup, swizzled column group). partial_g, partial_lse_g: partial results
    of `attention`; tiles_g, blocks_g, total_g: the arrays of `WorkSplit`. out, lse: staging buffers
    in shared memory, where `KernelConfig.store` needs them.
    """
    split = WorkSplit(tiles_g, blocks_g, total_g)
    wg = lax.axis_index("of")
    group = lax.axis_index("column")
    width = swizzle_columns(partial_g.shape[4])
    columns = pl.ds(group * width, width)
    work = WorkRange(split, lax.axis_index("block"))

    @pl.when(work.query_tiles > 0)
    def last_query_tile() -> None:
        part = work.tile(work.query_tiles - 1)

        @pl.when((part.begin == 0) & (part.end < part.key_tiles))
        def merge_parts() -> None:
            units_per_block = blocks_g[0, 1] - blocks_g[0, 0]
            last = lax.div(part.offset + part.key_tiles - 1, units_per_block)

            def load(block: Any, which: int) -> tuple[jax.Array, jax.Array]:
                at = block, which, wg
                values = config.load(partial_g.at[(*at, slice(None), columns)], ACC_LAYOUT)
                return values, config.load(partial_lse_g.at[at], ROW_LAYOUT)

            def merge(block: Any, carry: Any) -> Any:
                acc, top, total = carry
                values, score = load(block, 0)
                new = jnp.maximum(top, score)
                shrink = jnp.exp(top - new)
                weight = jnp.exp(score - new)
                scaled = acc * lax.broadcast_in_dim(shrink, acc.shape, [0])
                acc = scaled + values * lax.broadcast_in_dim(weight, acc.shape, [0])
                return acc, new, total * shrink + weight

            acc, score = load(work.block, 1)
            top = jnp.maximum(score, LOWEST)
            acc, top, total = lax.fori_loop(
                work.block + 1, last + 1, merge, (acc, top, jnp.exp(score - top))
            )
            safe = jnp.where(total > 0, total, 1.0)
            row, row0, head = config.place(split, part, wg)
            acc = acc * lax.broadcast_in_dim(1.0 / safe, acc.shape, [0])
            config.store(acc, out_g.at[(*config.rows_at(row, row0, head), columns)], out)

            @pl.when(group == 0)
            def store_lse() -> None:
                merged = jnp.where(total > 0, top + jnp.log(safe), -jnp.inf)
                config.store(merged, lse_g.at[row, head, pl.ds(row0, config.stored_rows)], lse)
