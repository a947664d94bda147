"""Pages that move from lane to lane: the history of a prompt that goes on over other lanes (Tetris,
section 4.1).

Everything here runs inside shard_map, on one lane and one rank: each rank moves its own heads.
"""

from __future__ import annotations

import jax
from jax import lax

from jaxserve.kernels.kv_pages import KVPages
from jaxserve.sharding.mesh import KVP


def move_pages(pools: list[KVPages], pages: jax.Array) -> list[KVPages]:
    """Each layer's pages, in place. pages [2, lanes, m]: what this lane sends to each lane, and
    where it puts what each lane sends; out of range: nothing. All are read before any is
    written."""
    send = pages[0].reshape(-1)
    put = pages[1].reshape(-1)

    def one(pool: jax.Array) -> jax.Array:
        count = pool.shape[1]
        there = lax.all_to_all(pool[0, send.clip(0, count - 1)], KVP, 0, 0, tiled=True)
        return pool.at[0, put].set(there, mode="drop")

    return jax.tree.map(one, pools)
