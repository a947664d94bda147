"""The tokens of a step as one lane sees them: rows of equal length, where their KV goes, and what
they may look at.

A *local* sequence has all its blocks on its home lane and needs no other. Of a *spread* one each
lane holds some; its rows are known to all lanes. Everything here runs inside shard_map, on one lane
and one rank.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.kernels.kv_pages import KVPages, quantize
from jaxserve.kernels.table import entries_below
from jaxserve.sharding.mesh import KVP


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["slot", "pos", "held", "page", "everywhere"],
    meta_fields=["settled"],
)
@dataclasses.dataclass(frozen=True)
class Rows:
    """A group of R rows of T tokens each. A position of -1 marks a token that is not there."""

    slot: jax.Array  # [R] row of the page table
    pos: jax.Array  # [R, T]
    held: jax.Array  # [R] entries of this lane's table row that hold
    page: jax.Array  # [R, T] page of this lane that a token's KV goes to; out of range: not here
    everywhere: jax.Array | None = None  # [R, lanes] `held` of every lane, for spread rows
    settled: bool = False  # all tokens' pages are on the lane that computes them

    @property
    def shape(self) -> tuple[int, int]:
        return self.pos.shape  # type: ignore[return-value]

    def of(self, lane: jax.Array) -> Rows:
        """The rows that this lane computes, out of those of all."""
        lanes = self.everywhere.shape[1]  # type: ignore[union-attr]
        return jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(
                x.reshape(lanes, -1, *x.shape[1:]), lane, keepdims=False
            ),
            self,
        )

    def holding(self, held: jax.Array) -> Rows:
        return dataclasses.replace(self, held=held)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["local", "spread", "table"],
    meta_fields=["exchange"],
)
@dataclasses.dataclass(frozen=True)
class Groups:
    """The rows of a step as one lane sees them: its own local ones, and the spread ones of all
    lanes, lane by lane."""

    local: tuple[Rows, ...]
    spread: tuple[Rows, ...]  # [lanes * R, T] each
    table: jax.Array  # [2, slots, W]
    exchange: str = "gather"  # how spread rows and blocks on other lanes meet: see `exchange`

    def local_tokens(self) -> int:
        return sum(rows.pos.size for rows in self.local)


def local_rows(
    slot: jax.Array,
    start: jax.Array,
    length: jax.Array,
    width: int,
    table: jax.Array,
    pages: int,
    size: int,
) -> Rows:
    """Rows of sequences whose entry i of the table is block i. start, length [R]; pages: how many
    there are; size: tokens of a page."""
    pos = _positions(start, length, width)
    block = jnp.maximum(pos, 0) // size
    page = jnp.where(pos < 0, pages, table[0][slot[:, None], block])
    return Rows(slot, pos, (start + length - 1) // size + 1, page)


def spread_rows(
    slot: jax.Array,
    start: jax.Array,
    length: jax.Array,
    everywhere: jax.Array,
    lane: jax.Array,
    width: int,
    table: jax.Array,
    pages: int,
    size: int,
    settled: bool = False,
) -> Rows:
    """Rows of sequences of which lanes hold some blocks, ascending: as many as `everywhere` [R,
    lanes] says; `lane` is this one."""
    pos = _positions(start, length, width)
    held = everywhere[:, lane]
    block = jnp.maximum(pos, 0) // size
    index = entries_below(table[1], slot, held[:, None], block)
    here = (index < held[:, None]) & (table[1][slot[:, None], index] == block) & (pos >= 0)
    return Rows(
        slot, pos, held, jnp.where(here, table[0][slot[:, None], index], pages), everywhere, settled
    )


def gather_rows(x: jax.Array) -> jax.Array:
    """[R, ...] of each lane -> [lanes * R, ...], on every lane."""
    return lax.all_gather(x, KVP, tiled=True)


def write(pages: KVPages, kv: jax.Array, groups: tuple[Rows, ...]) -> KVPages:
    """kv [T, K, 2, H] to its pages, in place.

    A scatter of one token would become a dynamic-update-slice, which XLA's CPU compiler fuses with
    its readers at the price of copies of the pool; so a lone token is joined by one that goes
    nowhere.
    """
    if not groups:
        return pages
    count = pages.kv.shape[1]
    size = pages.kv.shape[4]
    page = jnp.concatenate([rows.page.reshape(-1) for rows in groups])
    offset = jnp.concatenate([rows.pos.reshape(-1) % size for rows in groups])
    if len(page) == 1:
        page = jnp.append(page, count)
        offset = jnp.append(offset, 0)
        kv = jnp.concatenate([kv, kv])
    stored = KVPages(kv) if pages.scales is None else quantize(kv)
    return jax.tree.map(
        lambda pool, x: pool.at[0, page, :, :, offset].set(x, mode="drop"), pages, stored
    )


def _positions(start: jax.Array, length: jax.Array, width: int) -> jax.Array:
    step = jnp.arange(width, dtype=jnp.int32)
    return jnp.where(step < length[:, None], start[:, None] + step, -1)
