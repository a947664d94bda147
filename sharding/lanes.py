"""Where lanes meet: the KV of a step's tokens is written to pages, and its queries attend over them.

The tokens of a lane are rows of equal length, in groups: `Rows` holds one group. A *local* sequence has all its blocks on its home lane and
needs no other. The queries, keys and values of a *spread* sequence are gathered to every lane; each lane keeps what belongs on its pages,
attends over its own blocks, and sends the partials home, where they are merged (Medha 3.4). The bytes that cross lanes depend on the
tokens of the step only, never on context length. Everything here runs inside shard_map, on one lane and one rank.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.kernels import ops
from jaxserve.kernels.merge import merge
from jaxserve.kernels.pool import Pool, narrow
from jaxserve.kernels.table import below
from jaxserve.sharding.mesh import KVP


@functools.partial(jax.tree_util.register_dataclass, data_fields=["slot", "pos", "held", "page"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Rows:
    """A group of R rows of T tokens each. A position of -1 marks a token that is not there."""

    slot: jax.Array                                  # [R] row of the page table
    pos: jax.Array                                   # [R, T]
    held: jax.Array                                  # [R] entries of this lane's table row that hold
    page: jax.Array                                  # [R, T] page of this lane that a token's KV goes to; out of range: not here

    @property
    def shape(self) -> tuple[int, int]:
        return self.pos.shape                        # type: ignore[return-value]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["local", "spread", "table"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Groups:
    """The rows of a step as one lane sees them: its own local ones, and the spread ones of all lanes, lane by lane."""

    local: tuple[Rows, ...]
    spread: tuple[Rows, ...]                         # [lanes * R, T] each
    table: jax.Array                                 # [2, slots, W]

    def local_tokens(self) -> int:
        return sum(rows.pos.size for rows in self.local)


def local_rows(slot: jax.Array, start: jax.Array, length: jax.Array, width: int, table: jax.Array, pages: int, size: int) -> Rows:
    """Rows of sequences whose entry i of the table is block i. start, length [R]; pages: how many there are; size: tokens of a page."""
    pos = _positions(start, length, width)
    block = jnp.maximum(pos, 0) // size
    page = jnp.where(pos < 0, pages, table[0][slot[:, None], block])
    return Rows(slot, pos, (start + length - 1) // size + 1, page)


def spread_rows(
    slot: jax.Array, start: jax.Array, length: jax.Array, held: jax.Array, width: int, table: jax.Array, pages: int, size: int
) -> Rows:
    """Rows of sequences of which this lane holds some blocks: `held` [R] of them, ascending."""
    pos = _positions(start, length, width)
    block = jnp.maximum(pos, 0) // size
    index = below(table[1], slot, held[:, None], block)
    here = (index < held[:, None]) & (table[1][slot[:, None], index] == block) & (pos >= 0)
    return Rows(slot, pos, held, jnp.where(here, table[0][slot[:, None], index], pages))


def gather_rows(x: jax.Array) -> jax.Array:
    """[R, ...] of each lane -> [lanes * R, ...], on every lane."""
    return lax.all_gather(x, KVP, tiled=True)


def attention(
    q: jax.Array, kv: jax.Array, pages: Pool, window: int | None, groups: Groups, scale: float
) -> tuple[jax.Array, Pool]:
    """q [T, K, G, H], kv [T, K, 2, H] of this lane's tokens, local ones first; pages with a first axis of 1 -> out like q, pages."""
    attend = functools.partial(_attend, table=groups.table, scale=scale, window=window)
    tokens, lanes = groups.local_tokens(), lax.axis_size(KVP)
    pages = _write(pages, kv[:tokens], groups.local)
    if groups.spread:
        far = gather_rows(jnp.concatenate([q[tokens:], kv[tokens:]], 2)[None])       # [lanes, T, K, G + 2, H]
        far_groups = _split(far, groups.spread, lanes)
        for rows, x in zip(groups.spread, far_groups):
            pages = _write(pages, x[:, :, -2:], (rows,))
    outs = [attend(x, rows, pages, dtype=q.dtype)[0] for rows, x in zip(groups.local, _split(q[None, :tokens], groups.local, 1))]
    if groups.spread:
        far_outs = [attend(x[:, :, :-2], rows, pages) for rows, x in zip(groups.spread, far_groups)]
        outs.append(_meet(far_outs).astype(q.dtype))
    return jnp.concatenate(outs) if len(outs) > 1 else outs[0], pages


def _positions(start: jax.Array, length: jax.Array, width: int) -> jax.Array:
    step = jnp.arange(width, dtype=jnp.int32)
    return jnp.where(step < length[:, None], start[:, None] + step, -1)


def _split(x: jax.Array, groups: tuple[Rows, ...], lanes: int) -> list[jax.Array]:
    """[lanes, T, ...] -> per group [lanes * R * T, ...]."""
    out, at = [], 0
    for rows in groups:
        count = rows.pos.size // lanes
        out.append(x[:, at : at + count].reshape(lanes * count, *x.shape[2:]))
        at += count
    return out


def _write(pages: Pool, kv: jax.Array, groups: tuple[Rows, ...]) -> Pool:
    """kv [T, K, 2, H] to its pages, in place.

    A scatter of one token would become a dynamic-update-slice, which XLA's CPU compiler fuses with its readers at the price of copies of
    the pool; so a lone token is joined by one that goes nowhere.
    """
    if not groups:
        return pages
    count, size = pages.kv.shape[1], pages.kv.shape[4]
    page = jnp.concatenate([rows.page.reshape(-1) for rows in groups])
    offset = jnp.concatenate([rows.pos.reshape(-1) % size for rows in groups])
    if len(page) == 1:
        page, offset, kv = jnp.append(page, count), jnp.append(offset, 0), jnp.concatenate([kv, kv])
    stored = Pool(kv) if pages.scales is None else narrow(kv)
    return jax.tree.map(lambda pool, x: pool.at[0, page, :, :, offset].set(x, mode="drop"), pages, stored)


def _attend(
    q: jax.Array, rows: Rows, pages: Pool, *, table: jax.Array, scale: float, window: int | None, dtype: Any = jnp.float32
) -> tuple[jax.Array, jax.Array]:
    """q [R * T, K, G, H] -> out [R * T, K, G, H] of type `dtype`, lse [R * T, K, G] f32."""
    q_rows = q.reshape(*rows.shape, *q.shape[1:])
    out, lse = ops.attend(q_rows, rows.pos, pages.take(0), table, rows.slot, rows.held, scale=scale, window=window, dtype=dtype)
    return out.reshape(q.shape), lse.reshape(q.shape[:-1])


def _meet(partials: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
    """Partials of all lanes' spread tokens over this lane's blocks -> merged out [T, K, G, H] of this lane's tokens."""
    lanes = lax.axis_size(KVP)
    mine = [jnp.concatenate([out, lse[..., None]], -1).reshape(lanes, -1, *out.shape[1:-1], out.shape[-1] + 1) for out, lse in partials]
    pieces = lax.all_to_all(jnp.concatenate(mine, 1), KVP, 0, 0)
    return merge(pieces[..., :-1], pieces[..., -1])[0]
