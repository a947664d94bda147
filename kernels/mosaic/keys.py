"""Finds the pages and positions of a query tile's keys in the page table, and masks keys."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.kernels.mosaic.config import KernelConfig
from jaxserve.kernels.work_split import (
    ENTRIES,
    FIRST_KEY_TILE,
    FIRST_POSITION,
    LAST_POSITION,
    SLOT,
    WorkSplit,
)

NEVER = 2**31 - 512  # a position after all queries, for keys that do not exist


class Keys:
    """Pages and positions of the keys of one query tile. split: how the
    kernel's work is split; place: of the query tile in `WorkSplit.tiles`."""

    def __init__(self, config: KernelConfig, table: Any, split: WorkSplit, place: Any):
        self.config = config
        self.table = table
        self.slot, self.first, self.entries, self.last = (
            split.tiles[place, i] for i in (SLOT, FIRST_KEY_TILE, ENTRIES, LAST_POSITION)
        )
        # the first position that any query sees
        self.since: Any = 0
        if config.window is not None:
            self.since = split.tiles[place, FIRST_POSITION] - (config.window - 1)

    def entry(self, tile: Any, copy: int) -> tuple[Any, Any]:
        """Index of the page-table entry that copy number `copy` of a key tile reads, and the first
        token of that page that it reads."""
        tile = self.first + tile
        config = self.config
        if config.work.tiles_per_page > 1:
            return lax.div(tile, config.work.tiles_per_page), lax.rem(
                tile, config.work.tiles_per_page
            ) * config.tiles.keys
        return tile * config.work.copies_per_tile + copy, 0

    def lookup(self, which: int, entry: Any) -> Any:
        """Page (0) or block (1) of a page-table entry; indices past the table give the last one."""
        return self.table[which, self.slot, jnp.minimum(entry, self.table.shape[2] - 1)]

    def pages(self, tile: Any, count: int) -> tuple[Any, ...]:
        """Pages that the copies of a key tile read, clipped to 0..count - 1: invalid entries give
        some page too."""
        found = [
            self.lookup(0, self.entry(tile, copy)[0])
            for copy in range(self.config.work.copies_per_tile)
        ]
        return tuple(jnp.clip(page, 0, count - 1) for page in found)

    def origins(self, tile: Any) -> list[Any]:
        """Per copy of a key tile: the position that column 0 of the tile would have if the tile
        were all of that copy; NEVER for invalid entries."""
        out = []
        for copy in range(self.config.work.copies_per_tile):
            entry, inside = self.entry(tile, copy)
            size = self.config.page_size
            origin = self.lookup(1, entry) * size + inside - copy * size
            out.append(jnp.where(entry < self.entries, origin, NEVER))
        return out

    def positions(self, columns: jax.Array, origins: list[Any]) -> jax.Array:
        """Positions of the keys in these columns of a key tile."""
        out = columns + origins[0]
        for copy, origin in enumerate(origins[1:], 1):
            out = jnp.where(columns >= copy * self.config.page_size, columns + origin, out)
        return out

    def visible(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """Marks the keys that queries see, by positions: causal, within the window."""
        window = self.config.window
        if window is None:
            return key <= query
        return (key <= query) & (query - key < window)
