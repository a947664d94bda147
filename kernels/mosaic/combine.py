"""The merge of query tiles whose keys lie in several stretches of the line."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxserve.kernels.merge import LOWEST
from jaxserve.kernels.mosaic.config import ROW, TILE, Setting
from jaxserve.kernels.mosaic.tiles import column
from jaxserve.kernels.mosaic.work_split import Stretch, WorkSplit


def join(
    piece_g,
    piece_lse_g,
    tile_g,
    block_g,
    total_g,
    out_g,
    lse_g,
    *,
    setting: Setting,
    out: Any = None,
    lse: Any = None,
) -> None:
    """The query tile with which a block's stretch ends, where others go on with it: its pieces are
    merged and put in their place."""
    line = WorkSplit(tile_g, block_g, total_g)
    wg = lax.axis_index("of")
    across = lax.axis_index("column")
    width = column(piece_g.shape[4])
    columns = pl.ds(across * width, width)
    stretch = Stretch(setting, line, lax.axis_index("block"))

    @pl.when(stretch.number > 0)
    def _() -> None:
        part = stretch.part(stretch.number - 1)

        @pl.when((part.begin == 0) & (part.end < part.number))
        def _() -> None:
            share = block_g[0, 1] - block_g[0, 0]
            last = lax.div(part.place + part.number - 1, share)

            def piece(block: Any, which: int) -> tuple[jax.Array, jax.Array]:
                at = block, which, wg
                return setting.load(piece_g.at[(*at, slice(None), columns)], TILE), setting.load(
                    piece_lse_g.at[at], ROW
                )

            def more(block: Any, carry: Any) -> Any:
                acc, top, total = carry
                more, score = piece(block, 0)
                new = jnp.maximum(top, score)
                shrink = jnp.exp(top - new)
                weight = jnp.exp(score - new)
                acc = acc * lax.broadcast_in_dim(
                    shrink, acc.shape, [0]
                ) + more * lax.broadcast_in_dim(weight, acc.shape, [0])
                return acc, new, total * shrink + weight

            acc, score = piece(stretch.block, 1)
            top = jnp.maximum(score, LOWEST)
            acc, top, total = lax.fori_loop(
                stretch.block + 1, last + 1, more, (acc, top, jnp.exp(score - top))
            )
            safe = jnp.where(total > 0, total, 1.0)
            row, row0, head = stretch.where(part, wg)
            acc = acc * lax.broadcast_in_dim(1.0 / safe, acc.shape, [0])
            setting.store(acc, out_g.at[row, pl.ds(row0, setting.stored), head, columns], out)

            @pl.when(across == 0)
            def _() -> None:
                merged = jnp.where(total > 0, top + jnp.log(safe), -jnp.inf)
                setting.store(merged, lse_g.at[row, head, pl.ds(row0, setting.stored)], lse)
