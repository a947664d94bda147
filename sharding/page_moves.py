"""Moves KV pages between lanes, for prompts that continue on other lanes (Tetris, section 4.1)."""

from __future__ import annotations

import jax
from jax import lax

from jaxserve.kernels.kv_pages import KVPages
from jaxserve.sharding.mesh import KVP


def move_pages(pools: list[KVPages], pages: jax.Array) -> list[KVPages]:
    """Moves pages of every layer between lanes, in place; inside shard_map, each rank moves its own
    heads.

    pages [2, lanes, m] int32: pages that this lane sends to each lane, and where it puts those that
    each lane sends; numbers out of range are skipped. All pages are read before any is written.
    """
    sent = pages[0].reshape(-1)
    targets = pages[1].reshape(-1)

    def move(pool: jax.Array) -> jax.Array:
        count = pool.shape[1]
        received = lax.all_to_all(pool[0, sent.clip(0, count - 1)], KVP, 0, 0, tiled=True)
        return pool.at[0, targets].set(received, mode="drop")

    return jax.tree.map(move, pools)
