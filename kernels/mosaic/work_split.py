"""The line of key tiles, and the stretch of it that each block takes."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.kernels.mosaic.config import Setting
from jaxserve.kernels.mosaic.tiles import ROWS
from jaxserve.kernels.table import below

# of a query tile: row of the table, first key tile, key tiles, entries
SLOT, BEGIN, NUMBER, ENTRIES, SEEN, LAST, START = range(7)
# that hold, key tiles that all its rows see whole, last position, place in the line


class WorkSplit(NamedTuple):
    """The line of key tiles. Query tiles are numbered row tile by row tile for the first kv head
    (or `side` heads), then for the next."""

    tile: jax.Array  # [n, 7] by row tile: see the names above
    block: jax.Array  # [blocks, 4]: first unit, unit after the last, first query tile, query tiles
    total: jax.Array  # [1] key tiles of one kv head


def line_of(
    pos: jax.Array, table: jax.Array, rows: jax.Array, count: jax.Array, setting: Setting
) -> WorkSplit:
    """pos [R, M], -1 where there is no token; table, rows and count as of `reference.attend`."""
    size = setting.size
    window = setting.window
    per = setting.per
    parts = setting.parts
    packing = setting.packing
    blocks = setting.tiles.blocks
    pos = pos.reshape(setting.rows, setting.across, setting.height)
    last = pos.max(2)
    first = jnp.where(pos < 0, jnp.iinfo(jnp.int32).max, pos).min(2)
    # of the table that any of these rows sees
    entries = jnp.where(last < 0, 0, jnp.minimum(count[:, None], last // size + 1))
    end = -(-entries // per) * parts
    begin = jnp.zeros_like(end)
    seen = jnp.zeros_like(end)
    # key tiles wholly before a position
    before = lambda pos: below(table[1], rows, entries, jnp.maximum(pos, 0) // size) // per * parts
    if window is None:
        seen = before(jnp.minimum(first, last) + 1)
    else:
        begin = jnp.minimum(before(jnp.minimum(first, last) - window + 1), jnp.maximum(end - 1, 0))
    number = jnp.maximum(end - begin, 1)  # one without keys is written too
    start = jnp.cumsum(number.reshape(-1)) - number.reshape(-1)
    slot = jnp.broadcast_to(rows[:, None], end.shape)
    tile = jnp.stack(
        [x.reshape(-1) for x in (slot, begin, number, entries, seen, last)] + [start], 1
    ).astype(jnp.int32)
    total = number.sum(dtype=jnp.int32)
    units = total * (packing.heads // packing.side)
    share = -(-units // blocks)
    low = jnp.minimum(jnp.arange(blocks, dtype=jnp.int32) * share, units)
    high = jnp.minimum(low + share, units)
    of = lambda unit: (
        unit // total * len(tile)
        + jnp.searchsorted(start, unit % total, side="right", method="compare_all")
        - 1
    )
    first_tile = of(low)
    tiles_of = jnp.where(high > low, of(high - 1) - first_tile + 1, 0)
    return WorkSplit(
        tile, jnp.stack([low, high, first_tile, tiles_of], 1).astype(jnp.int32), total[None]
    )


class WorkPart(NamedTuple):
    """A query tile's part in a stretch: which row tile, of which heads; its place in the line and
    its key tiles; those from `begin` to before `end` belong to the stretch."""

    row_tile: Any
    heads: Any
    place: Any
    number: Any
    begin: Any
    end: Any


class Stretch:
    """The stretch of the line that block `block` takes, as the kernels see it. Units are key tiles
    of one query tile."""

    def __init__(self, setting: Setting, line: WorkSplit, block: Any):
        self.setting = setting
        self.line = line
        self.block = block
        self.low, self.high, self.first, self.number = (line.block[block, i] for i in range(4))

    def part(self, index: Any) -> WorkPart:
        """Of query tile `index` of this block."""
        setting = self.setting
        at = self.first + index
        tiles = setting.rows * setting.across
        row_tile = lax.rem(at, tiles)
        heads = lax.div(at, tiles)
        place = heads * self.line.total[0] + self.line.tile[row_tile, START]
        number = self.line.tile[row_tile, NUMBER]
        return WorkPart(
            row_tile,
            heads,
            place,
            number,
            jnp.maximum(self.low - place, 0),
            jnp.minimum(self.high - place, number),
        )

    def where(self, part: WorkPart, wg: Any) -> tuple[Any, Any, Any]:
        """Row of R, first of the M rows, and head, of a warpgroup."""
        across = self.setting.across
        side = self.setting.packing.side
        row0 = lax.rem(part.row_tile, across) * self.setting.height + lax.div(wg, side) * ROWS
        return lax.div(part.row_tile, across), row0, part.heads * side + lax.rem(wg, side)
