"""Moves KV pages between lanes, for prompts that continue on other lanes (Tetris, section 4.1)."""

from __future__ import annotations

from typing import Any

import jax

from jaxserve.kernels.kv_pages import KVPages
from jaxserve.sharding.lane_groups import LaneGroups


def move_pages(cache: Any, pages: jax.Array, lanes: LaneGroups) -> Any:
    """Moves pages of a layer between the lanes of each group, in place, and returns them; what is
    no pages stays as it is. Inside shard_map, each rank moves its own heads.

    pages [2, size, m] int32: pages that this lane sends to each lane of its group, and where it
    puts those that each lane sends; numbers out of range are skipped. All pages are read before any
    is written.
    """
    if not isinstance(cache, KVPages):
        return cache
    targets = pages[1].reshape(-1)

    def move(pool: jax.Array) -> jax.Array:
        count = pool.shape[1]
        received = lanes.all_to_all(pool[0, pages[0].clip(0, count - 1)])  # [size, m, ...]
        return pool.at[0, targets].set(received.reshape(-1, *pool.shape[2:]), mode="drop")

    return jax.tree.map(move, cache)
