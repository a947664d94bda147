"""Looking things up in page tables: their blocks ascend."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

NARROW = 2**18  # comparisons


def below(blocks: jax.Array, slot: jax.Array, held: jax.Array, wanted: jax.Array) -> jax.Array:
    """How many of the first `held` blocks of table row `slot` are below `wanted`.

    blocks [slots, W], slot [R], held and wanted [R, n] (or held [R, 1]) -> [R, n]. Narrow tables
    are compared entry by entry, in one launch; in wide ones a binary search costs less.
    """
    width = blocks.shape[1]
    if wanted.size * width <= NARROW:
        mine = jnp.arange(width) < jnp.broadcast_to(held, wanted.shape)[..., None]
        return (mine & (blocks[slot][:, None] < wanted[..., None])).sum(-1, dtype=jnp.int32)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low + high) // 2
        right = (low < high) & (blocks[slot[:, None], middle] < wanted)
        return jnp.where(right, middle + 1, low), jnp.where(right, high, middle)

    start = jnp.zeros_like(wanted), jnp.broadcast_to(held, wanted.shape)
    # unrolled it would take XLA minutes to compile
    return lax.fori_loop(0, width.bit_length(), halve, start)[0]
