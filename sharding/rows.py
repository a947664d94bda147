"""The tokens of a step on one lane, in rows of equal length: positions, the pages their KV is
written to, and the page-table entries they attend over.

A *local* sequence has all its blocks on one lane and is computed there without other lanes. The
blocks of a *spread* sequence are distributed over the lanes of a group, all of which know its rows.
Everything here runs inside shard_map, on one lane and one rank. Lanes are counted in their group.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.api.batch import DEFAULT_EXCHANGE
from jaxserve.kernels import ops
from jaxserve.kernels.kv_pages import KVPages
from jaxserve.kernels.qkv import Projected
from jaxserve.kernels.table import entries_below
from jaxserve.lanes.exchange import EXCHANGES
from jaxserve.sharding.lane_groups import LaneGroups

NO_PAGE = 2**30  # a page that no pool has: writes to it are dropped


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["slot", "pos", "entries", "page", "entries_per_lane", "home"],
    meta_fields=["exchange", "settled", "apart"],
)
@dataclasses.dataclass(frozen=True)
class Rows:
    """R rows of T tokens each.

    slot [R]: row of the page table. pos [R, T]: positions; -1: padding. entries [R]: valid entries
    in this lane's page-table row. page [R, T]: page of this lane that a token's KV is written to;
    out of range: none. entries_per_lane [R, lanes]: `entries` of every lane, for spread rows.
    exchange: strategy of spread rows, a name in `sharding.exchange.EXCHANGES`. settled: the page of
    every token is on the lane that computes the token. apart: no row goes on from the one before.
    home [R]: home lane of a spread row's sequence; None: not known.
    """

    slot: jax.Array
    pos: jax.Array
    entries: jax.Array
    page: jax.Array
    entries_per_lane: jax.Array | None = None
    exchange: str = DEFAULT_EXCHANGE
    settled: bool = False
    apart: bool = False
    home: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(R, T)."""
        return self.pos.shape  # type: ignore[return-value]

    @property
    def lengths(self) -> jax.Array:
        """Tokens of each row [R]."""
        return (self.pos >= 0).sum(1)

    @property
    def offset(self) -> jax.Array:
        """Tokens [R] of a row's sequence in the rows just before it. Rows of a sequence that one
        lane computes follow each other, and all but the last are full."""
        count, width = self.shape
        number = jnp.arange(count)
        first = lax.cummax(jnp.where(self._follows, 0, number))
        return (number - first) * width

    @property
    def ends(self) -> jax.Array:
        """Marks rows [R] that are the last ones of their sequences."""
        followed = jnp.concatenate([self._follows[1:], jnp.zeros(1, bool)])
        return (self.pos[:, 0] >= 0) & ~followed

    @property
    def run_ends(self) -> jax.Array:
        """The last row [R] of those of its sequence that follow each other, for each row."""
        number = jnp.arange(len(self.slot))
        return lax.cummin(jnp.where(self.ends, number, len(number) - 1), reverse=True)

    @property
    def _follows(self) -> jax.Array:
        """Marks rows [R] that go on where the row before them ends."""
        if self.apart:
            return jnp.zeros(len(self.slot), bool)
        start = self.pos[:, 0]
        stop = start + self.lengths
        goes_on = (self.slot[1:] == self.slot[:-1]) & (start[1:] == stop[:-1])
        return jnp.concatenate([jnp.zeros(1, bool), goes_on & (start[1:] > 0)])

    def computed_by(self, lane: jax.Array) -> Rows:
        """The spread rows that `lane` computes; rows of all lanes are in order of lanes."""
        assert self.entries_per_lane is not None
        lanes = self.entries_per_lane.shape[1]
        return jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(
                x.reshape(lanes, -1, *x.shape[1:]), lane, keepdims=False
            ),
            self,
        )

    def pick(self, number: jax.Array) -> Rows:
        """Returns rows `number` [n]; numbers past the last give rows of padding."""
        count = len(self.slot)
        out = jax.tree.map(lambda x: x[jnp.minimum(number, count - 1)], self)
        pos = jnp.where((number < count)[:, None], out.pos, -1)
        entries = jnp.where(number < count, out.entries, 0)
        page = jnp.where((number < count)[:, None], out.page, NO_PAGE)
        return dataclasses.replace(out, pos=pos, entries=entries, page=page)

    def with_entries(self, entries: jax.Array) -> Rows:
        """Returns the rows over a table with other numbers of entries [R]."""
        return dataclasses.replace(self, entries=entries)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["local", "spread", "table"],
    meta_fields=["lanes", "room", "attention"],
)
@dataclasses.dataclass(frozen=True)
class Groups:
    """All rows of a step that one lane needs.

    local: rows of sequences on this lane. spread: rows of spread sequences of all lanes of this
    lane's group, in order of lanes, [lanes * R, T] each. table [2, slots, W]: this lane's page
    table. lanes: the groups of lanes that meet for spread rows. room: share of a lane's spread rows
    that may visit one other lane (`sharding.visit`). attention: a name in `ops.ATTEND`; None:
    chosen by shape.
    """

    local: tuple[Rows, ...]
    spread: tuple[Rows, ...]
    table: jax.Array
    lanes: LaneGroups
    room: float = 1.0
    attention: str | None = None

    def on_part(self, part: int, parts: int) -> Groups:
        """Returns the rows over pages that are one of `parts` equal parts of their own."""
        if parts == 1:
            return self
        on_part = lambda rows: dataclasses.replace(rows, page=rows.page * parts + part)
        return dataclasses.replace(
            self,
            local=tuple(map(on_part, self.local)),
            spread=tuple(map(on_part, self.spread)),
            table=self.table.at[0].set(self.table[0] * parts + part),
        )

    def of_this_lane(self, rows: Rows) -> Rows:
        """Returns the rows that this lane computes, of those of all lanes, or of its own."""
        return rows if rows.entries_per_lane is None else rows.computed_by(self.lanes.index())

    def local_tokens(self) -> int:
        """Number of tokens in local rows, padding included."""
        return sum(rows.pos.size for rows in self.local)


def local_rows(
    rows: jax.Array, width: int, table: jax.Array, pages: int, size: int, apart: bool = False
) -> Rows:
    """Rows of `width` tokens of local sequences, whose page-table entry i is block i.

    rows [R, 3]: row of the page table, first position, and number of tokens. pages: number of pages
    in the pool. size: tokens per page. apart: see `Rows`.
    """
    slot, start, length = rows.T
    pos = _positions(start, length, width)
    block = jnp.maximum(pos, 0) // size
    page = jnp.where(pos < 0, pages, table[0][slot[:, None], block])
    return Rows(slot, pos, (start + length - 1) // size + 1, page, apart=apart)


def spread_rows(
    rows: jax.Array,
    lane: jax.Array,
    width: int,
    table: jax.Array,
    pages: int,
    size: int,
    exchange: str = DEFAULT_EXCHANGE,
    apart: bool = False,
) -> Rows:
    """Rows of `width` tokens of spread sequences, of whose blocks lane `lane` (this one) of the
    group has some.

    rows [R, 3 + lanes]: as of `local_rows`, then blocks that each lane has. exchange: see `Rows`;
    with one of settled chunks, all rows but those of decodes, which are `apart`, are settled. The
    other arguments are those of `local_rows`.
    """
    slot, start, length = rows[:, :3].T
    entries_per_lane = rows[:, 3:]
    pos = _positions(start, length, width)
    entries = entries_per_lane[:, lane]
    block = jnp.maximum(pos, 0) // size
    index = entries_below(table[1], slot, entries[:, None], block)
    valid = (index < entries[:, None]) & (table[1][slot[:, None], index] == block) & (pos >= 0)
    page = jnp.where(valid, table[0][slot[:, None], index], pages)
    settled = EXCHANGES[exchange].settled and not apart
    return Rows(slot, pos, entries, page, entries_per_lane, exchange, settled, apart)


def write_kv(pages: KVPages, kv: jax.Array, groups: tuple[Rows, ...]) -> KVPages:
    """Writes kv [T, K, 2, H] of the tokens of these rows to their pages, in place; quantises it if
    the pages are FP8."""
    if not groups:
        return pages
    return ops.write_kv(pages, *_places(pages, groups), kv)


def write_qkv(pages: KVPages, qkv: Projected, groups: Groups) -> tuple[jax.Array, KVPages]:
    """Returns queries [T, K, G, H] of the tokens of local rows, and the pages with their keys and
    values."""
    places = _places(pages, groups.local)
    return ops.write_qkv(qkv, pages, *places, implementation=groups.attention)


def _places(pages: KVPages, groups: tuple[Rows, ...]) -> tuple[jax.Array, jax.Array]:
    """Pages [T] of the tokens of these rows, and where in them [T] they are."""
    page = jnp.concatenate([rows.page.reshape(-1) for rows in groups])
    offset = jnp.concatenate([rows.pos.reshape(-1) % pages.kv.shape[4] for rows in groups])
    return page, offset


def split(x: jax.Array, groups: Sequence[Rows], lanes: int) -> list[jax.Array]:
    """Splits tokens x [n, T, ...] of n lanes by group of rows -> per group [n * R * T, ...]. lanes:
    how many lanes' rows each group has."""
    out = []
    at = 0
    for rows in groups:
        count = rows.pos.size // lanes
        out.append(x[:, at : at + count].reshape(len(x) * count, *x.shape[2:]))
        at += count
    return out


def _positions(start: jax.Array, length: jax.Array, width: int) -> jax.Array:
    step = jnp.arange(width, dtype=jnp.int32)
    return jnp.where(step < length[:, None], start[:, None] + step, -1)
