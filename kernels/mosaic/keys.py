"""Which keys a query tile sees: what the page table says of each key tile."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.kernels.mosaic.config import Setting
from jaxserve.kernels.mosaic.work_split import BEGIN, ENTRIES, LAST, SLOT, WorkSplit

NEVER = 2**31 - 512  # a position after all others


class Keys:
    """Where the keys of a query tile are."""

    def __init__(self, setting: Setting, table: Any, line: WorkSplit, row_tile: Any):
        self.setting = setting
        self.table = table
        self.slot, self.first, self.entries, self.last = (
            line.tile[row_tile, i] for i in (SLOT, BEGIN, ENTRIES, LAST)
        )

    def entry(self, tile: Any, copy: int) -> tuple[Any, Any]:
        """Index of the table entry that a copy of a key tile reads, and the token of its page at
        which it begins."""
        tile = self.first + tile
        setting = self.setting
        if setting.parts > 1:
            return lax.div(tile, setting.parts), lax.rem(tile, setting.parts) * setting.tiles.keys
        return tile * setting.per + copy, 0

    def held(self, which: int, entry: Any) -> Any:
        """Page (0) or block (1) of an entry; of the last one where it is beyond the table."""
        return self.table[which, self.slot, jnp.minimum(entry, self.table.shape[2] - 1)]

    def pages(self, tile: Any, count: int) -> tuple[Any, ...]:
        """Per copy of a key tile: its page, out of `count`; entries that do not hold have one
        too."""
        held = [self.held(0, self.entry(tile, copy)[0]) for copy in range(self.setting.per)]
        return tuple(jnp.clip(page, 0, count - 1) for page in held)

    def origins(self, tile: Any) -> list[Any]:
        """Per copy of a key tile: the position that column 0 would have; beyond all others where
        the entry does not hold."""
        out = []
        for copy in range(self.setting.per):
            entry, inside = self.entry(tile, copy)
            origin = self.held(1, entry) * self.setting.size + inside - copy * self.setting.size
            out.append(jnp.where(entry < self.entries, origin, NEVER))
        return out

    def positions(self, columns: jax.Array, origins: list[Any]) -> jax.Array:
        """Of the keys in these columns."""
        out = columns + origins[0]
        for copy, origin in enumerate(origins[1:], 1):
            out = jnp.where(columns >= copy * self.setting.size, columns + origin, out)
        return out

    def sees(self, query: jax.Array, key: jax.Array) -> jax.Array:
        window = self.setting.window
        return (key <= query) if window is None else (key <= query) & (query - key < window)
