"""Finds the keys and values of a key tile in the page table, and loads them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from jaxserve.kernels.triton.config import KernelConfig, vectors
from jaxserve.kernels.work_split import (
    ENTRIES,
    FIRST_KEY_TILE,
    FIRST_POSITION,
    LAST_POSITION,
    SLOT,
    TileSlice,
    WorkSplit,
)

NEVER = 2**31 - 1  # a position after all queries, of keys that do not exist


class Keys:
    """Keys and values of a query tile. table, pools: refs of the page table and of the KV pages.
    dtype: that they are computed in."""

    def __init__(
        self,
        config: KernelConfig,
        table: Any,
        split: WorkSplit,
        part: TileSlice,
        pools: list[Any],
        dtype: Any,
    ):
        self.config = config
        self.table = table
        self.head = part.heads
        self.kv, *self.scales = pools
        self.dtype = dtype
        self.slot, self.first, self.entries, self.since, self.last = (
            split.tiles[part.place, i]
            for i in (SLOT, FIRST_KEY_TILE, ENTRIES, FIRST_POSITION, LAST_POSITION)
        )

    def _entry(self, tile: Any) -> Any:
        """Page-table entries of a key tile: one, or one for each key."""
        work = self.config.work
        tile = self.first + tile
        if work.copies_per_tile == 1:
            return lax.div(tile, work.tiles_per_page)
        key = lax.iota(jnp.int32, work.keys)
        return tile * work.copies_per_tile + lax.div(key, work.page_size)

    def _lookup(self, which: int, entry: Any) -> Any:
        """Pages (0) or blocks (1) of page-table entries; 0 for those that are not valid."""
        return plgpu.load(
            self.table.at[jnp.int32(which), self.slot, entry],
            mask=entry < self.entries,
            other=0,
        )

    def pages(self, tile: Any) -> Any:
        """Pages of a key tile: one, or one for each key."""
        return self._lookup(0, self._entry(tile))

    def _inside(self, tile: Any) -> jax.Array:
        """Tokens of the keys of a tile within their pages [keys]."""
        work = self.config.work
        key = lax.iota(jnp.int32, work.keys)
        if work.copies_per_tile > 1:
            return lax.rem(key, work.page_size)
        return lax.rem(self.first + tile, work.tiles_per_page) * work.keys + key

    def positions(self, tile: Any) -> jax.Array:
        """Positions of the keys of a tile [keys]; `NEVER` where there are none."""
        entry = self._entry(tile)
        first = self._lookup(1, entry) * self.config.page_size
        return jnp.where(entry < self.entries, first + self._inside(tile), NEVER)

    def used(self, positions: jax.Array) -> jax.Array:
        """Marks keys that a query may see, by their positions. Others may be NaN, or those of
        another sequence."""
        window = self.config.window
        used = positions <= self.last
        if window is None:
            return used
        return used & (positions > self.since - window)

    def load(self, pages: Any, tile: Any, which: int, used: jax.Array | None) -> jax.Array:
        """Loads keys (0) or values (1) [keys, H] from the pages of a tile; zeros where they are not
        used. used [keys]: None: all are."""
        at = pages, self.head, jnp.int32(which), self._inside(tile)
        kv = self.kv.at[vectors(at, self.kv.shape[4])]
        if self.scales:
            (scales,) = self.scales
            numbers = widen(plgpu.load(kv), plgpu.load(scales.at[at]), self.dtype)
            return numbers if used is None else jnp.where(used[:, None], numbers, 0)
        if used is None:
            return plgpu.load(kv)
        return plgpu.load(kv, mask=used[:, None], other=0)


def widen(numbers: jax.Array, scales: jax.Array, dtype: Any) -> jax.Array:
    """Multiplies numbers [n, H] of FP8 (e4m3) by scales [n]. They are converted by their bits, for
    Ampere has no instruction for it: as those of float16 they stand for 1/256 of their value."""
    bits = lax.bitcast_convert_type(numbers, jnp.uint8).astype(jnp.uint16)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    wide = lax.bitcast_convert_type(half, jnp.float16).astype(jnp.float32)
    return (wide * (scales.astype(jnp.float32) * 256)[:, None]).astype(dtype)
