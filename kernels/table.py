"""Search in page tables, whose blocks ascend, but for those that all queries see whole."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

MAX_COMPARISONS = 2**18  # above it a binary search is cheaper than comparing with every entry


def entries_below(
    blocks: jax.Array, slot: jax.Array, entries: jax.Array, wanted: jax.Array
) -> jax.Array:
    """Counts, among the first `entries` blocks of table row `slot`, those below `wanted`, behind
    which only others lie.

    blocks [slots, W], slot [R], entries and wanted [R, n] (or entries [R, 1]) -> int32 [R, n].
    """
    width = blocks.shape[1]
    if wanted.size * width <= MAX_COMPARISONS:
        valid = jnp.arange(width) < jnp.broadcast_to(entries, wanted.shape)[..., None]
        return (valid & (blocks[slot][:, None] < wanted[..., None])).sum(-1, dtype=jnp.int32)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low + high) // 2
        right = (low < high) & (blocks[slot[:, None], middle] < wanted)
        return jnp.where(right, middle + 1, low), jnp.where(right, high, middle)

    start = jnp.zeros_like(wanted), jnp.broadcast_to(entries, wanted.shape)
    # a loop, since XLA takes minutes to compile this unrolled
    return lax.fori_loop(0, width.bit_length(), halve, start)[0]
