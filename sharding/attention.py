"""Where lanes meet: the KV of a step's tokens is written to pages, and its queries attend over
them.

Local rows attend over the pages of their lane. How spread rows and the blocks on other lanes meet
is chosen per program (`exchange`), for those that are settled; queries of others, decodes among
them, are gathered with their keys and values, which may belong anywhere. The bytes that cross lanes
depend on the tokens of the step only, but for blocks that are passed on where that is cheaper
(Medha 3.4).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.kernels import ops
from jaxserve.kernels.kv_pages import KVPages
from jaxserve.sharding.exchange import EXCHANGES, split
from jaxserve.sharding.mesh import KVP
from jaxserve.sharding.rows import Groups, Rows, write


def attention(
    q: jax.Array, kv: jax.Array, pages: KVPages, window: int | None, groups: Groups, scale: float
) -> tuple[jax.Array, KVPages]:
    """q [T, K, G, H], kv [T, K, 2, H] of this lane's tokens, local ones first; pages with a first
    axis of 1 -> out like q, pages."""
    attend = functools.partial(_attend, scale=scale, window=window)
    parts = _parts(groups)
    outs = []
    tokens = groups.local_tokens()
    pages = write(pages, kv[:tokens], groups.local)
    for exchange, some, mine in parts:  # all is written before anything is read, else XLA's
        if exchange != "gather":  # CPU compiler keeps a copy of the pool for readers
            pages = write(
                pages, kv[mine], tuple(rows.of(lax.axis_index(KVP)) for rows in some.spread)
            )
    for exchange, some, mine in parts:
        out, pages = EXCHANGES[exchange](q[mine], kv[mine], pages, some, attend)
        outs.append(out.astype(q.dtype))
    local = zip(groups.local, split(q[None, :tokens], groups.local, 1))
    outs = [
        attend(x, rows, pages.take(0), groups.table, dtype=q.dtype)[0] for rows, x in local
    ] + outs
    return jnp.concatenate(outs) if len(outs) > 1 else outs[0], pages


def _parts(groups: Groups) -> list[tuple[str, Groups, slice]]:
    """Spread rows by how they meet blocks on other lanes, and which of the lane's tokens theirs
    are: first those that are not settled."""
    out = []
    at = groups.local_tokens()
    for settled in (False, True):
        rows = tuple(some for some in groups.spread if some.settled == settled)
        if rows:
            stop = at + sum(some.pos.size for some in rows) // lax.axis_size(KVP)
            out.append(
                (
                    groups.exchange if settled else "gather",
                    dataclasses.replace(groups, spread=rows),
                    slice(at, stop),
                )
            )
            at = stop
    return out


def _attend(
    q: jax.Array,
    rows: Rows,
    pages: KVPages,
    table: jax.Array,
    before: Any = None,
    *,
    scale: float,
    window: int | None,
    dtype: Any = jnp.float32,
) -> tuple[jax.Array, jax.Array]:
    """q [R * T, K, G, H] -> out [R * T, K, G, H] of type `dtype`, lse [R * T, K, G] f32; merged
    with those before, if any."""
    shaped = lambda x: x.reshape(*rows.shape, *x.shape[1:])
    out, lse = ops.attend(
        shaped(q),
        rows.pos,
        pages,
        table,
        rows.slot,
        rows.held,
        scale=scale,
        window=window,
        dtype=dtype,
        before=jax.tree.map(shaped, before),
    )
    return out.reshape(q.shape), lse.reshape(q.shape[:-1])
