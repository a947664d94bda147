"""Splits the key tiles of all query tiles evenly over thread blocks (stream-K; Osama et al., 2023).

Units of work are key tiles, numbered through all query tiles; each block takes a range of units.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.kernels.table import entries_below

# Columns of WorkSplit.tiles: row of the page table, first key tile, number of key tiles, page-table
# entries that any of its rows sees, key tiles that none of its rows masks, first and last position,
# number of the row tile, units before this one.
(
    SLOT,
    FIRST_KEY_TILE,
    KEY_TILES,
    ENTRIES,
    UNMASKED,
    FIRST_POSITION,
    LAST_POSITION,
    ROW_TILE,
    OFFSET,
) = range(9)


@dataclasses.dataclass(frozen=True)
class WorkShape:
    """Sizes that work is split by. rows: R. row_tiles: query tiles that cover the packed rows of
    one of the R. tile_rows: packed rows of a query tile. heads: numbers of query tiles of one row
    tile. keys: of a key tile. page_size: C. window: sliding window in tokens. blocks: thread blocks
    that share the work."""

    rows: int
    row_tiles: int
    tile_rows: int
    heads: int
    keys: int
    page_size: int
    window: int | None
    blocks: int

    @property
    def copies_per_tile(self) -> int:
        """Pages of a key tile; 1 where a page has several tiles."""
        return max(1, self.keys // self.page_size)

    @property
    def tiles_per_page(self) -> int:
        """Key tiles in a page; 1 where a key tile is a page or several."""
        return max(1, self.page_size // self.keys)


class WorkSplit(NamedTuple):
    """Arrays that the kernels read to find their work. A *row tile* is a query tile within one kv
    head, or within several. Those of padding alone are no work, and nothing is written for them;
    the others are counted for the first head, then for the next.

    tiles: [n, 9] int32 by row tile, with the columns above, padding last. blocks: [blocks, 4]
    int32: first unit, unit after the last, first query tile, number of query tiles. total: [2]
    int32: units and row tiles of one kv head.
    """

    tiles: jax.Array
    blocks: jax.Array
    total: jax.Array


def split_work(
    pos: jax.Array, table: jax.Array, slot: jax.Array, entries: jax.Array, shape: WorkShape
) -> WorkSplit:
    """Splits attention of packed rows at positions pos [R, M] (-1: padding); table, slot and
    entries are those of `reference.attend`."""
    size = shape.page_size
    window = shape.window
    blocks = shape.blocks
    pos = pos.reshape(shape.rows, shape.row_tiles, shape.tile_rows)
    last = pos.max(2)
    first = jnp.where(pos < 0, jnp.iinfo(jnp.int32).max, pos).min(2)
    # page-table entries that any row of a tile sees
    seen = jnp.where(last < 0, 0, jnp.minimum(entries[:, None], last // size + 1))
    end = -(-seen // shape.copies_per_tile) * shape.tiles_per_page
    begin = jnp.zeros_like(end)
    unmasked = jnp.zeros_like(end)

    def key_tiles_before(pos: jax.Array) -> jax.Array:
        below = entries_below(table[1], slot, seen, jnp.maximum(pos, 0) // size)
        return below // shape.copies_per_tile * shape.tiles_per_page

    if window is None:
        unmasked = key_tiles_before(jnp.minimum(first, last) + 1)
    else:
        in_window = key_tiles_before(jnp.minimum(first, last) - window + 1)
        begin = jnp.minimum(in_window, jnp.maximum(end - 1, 0))
    # a query tile without keys is written too
    number = jnp.where(last < 0, 0, jnp.maximum(end - begin, 1))
    slots = jnp.broadcast_to(slot[:, None], end.shape)
    row_tiles = jnp.arange(end.size, dtype=jnp.int32)
    columns = [
        x.reshape(-1) for x in (slots, begin, number, seen, unmasked, first, last, row_tiles)
    ]
    tiles = jnp.stack(columns, 1)[jnp.argsort(last.reshape(-1) < 0, stable=True)]
    offset = jnp.cumsum(tiles[:, KEY_TILES]) - tiles[:, KEY_TILES]
    tiles = jnp.concatenate([tiles, offset[:, None]], 1).astype(jnp.int32)
    count = (last >= 0).sum(dtype=jnp.int32)
    total = jnp.maximum(number.sum(dtype=jnp.int32), 1)
    units = jnp.where(count > 0, total * shape.heads, 0)
    share = -(-units // blocks)
    low = jnp.minimum(jnp.arange(blocks, dtype=jnp.int32) * share, units)
    high = jnp.minimum(low + share, units)

    def query_tile(unit: jax.Array) -> jax.Array:
        first = unit // total * count
        within = jnp.searchsorted(offset, unit % total, side="right", method="compare_all")
        return first + within - 1

    first_tile = query_tile(low)
    tiles_of_block = jnp.where(high > low, query_tile(high - 1) - first_tile + 1, 0)
    ranges = jnp.stack([low, high, first_tile, tiles_of_block], 1).astype(jnp.int32)
    return WorkSplit(tiles, ranges, jnp.stack([total, count]))


class TileSlice(NamedTuple):
    """The part of a query tile that a block computes.

    place: in `WorkSplit.tiles`. heads: which kv head (or several heads). offset: its first unit.
    key_tiles: all its key tiles, of which the block has those from `begin` to before `end`.
    """

    place: Any
    heads: Any
    offset: Any
    key_tiles: Any
    begin: Any
    end: Any


class WorkRange:
    """The units that thread block `block` computes: `low` to before `high`, in `query_tiles` query
    tiles."""

    def __init__(self, split: WorkSplit, block: Any):
        self.split = split
        self.block = block
        self.low, self.high, self.first, self.query_tiles = (
            split.blocks[block, i] for i in range(4)
        )

    def tile(self, index: Any) -> TileSlice:
        """This block's part of its query tile number `index`."""
        at = self.first + index
        count = self.split.total[1]
        place = lax.rem(at, count)
        heads = lax.div(at, count)
        offset = heads * self.split.total[0] + self.split.tiles[place, OFFSET]
        key_tiles = self.split.tiles[place, KEY_TILES]
        return TileSlice(
            place,
            heads,
            offset,
            key_tiles,
            jnp.maximum(self.low - offset, 0),
            jnp.minimum(self.high - offset, key_tiles),
        )
