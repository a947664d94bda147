"""Attention over pages in plain XLA, tuned for CPUs: flash attention, a loop over tiles of keys
that stay in the processor's cache.

Rows of one token (decode) share one loop. Long rows are cut into query tiles, each with a loop
bound of its own, so that key tiles that causality masks are skipped. The compiled program does not
depend on how long the contexts are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.kernels.kv_pages import KVPages
from jaxserve.kernels.merge import LOWEST
from jaxserve.kernels.table import entries_below

QUERY_TILE = 256  # most query tokens of a tile
KEY_TILE = 256  # most keys of a tile per row; at least one page
KEY_TILE_ALL_ROWS = 2048  # most keys of a tile over all rows


def attend(
    q: jax.Array,
    q_pos: jax.Array,
    pages: KVPages,
    table: jax.Array,
    slot: jax.Array,
    entries: jax.Array,
    *,
    scale: float,
    softcap: float = 0,
    window: int | None = None,
    value_dim: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Arguments and results of `reference.attend`. Errors: NotImplementedError for rows that do not
    split into equal query tiles."""
    R, T, K, G, H = q.shape
    one_tile = functools.partial(
        _loop,
        pages=pages,
        table=table,
        scale=scale,
        softcap=softcap,
        window=window,
        value_dim=value_dim or H,
    )
    if T == 1:
        return one_tile(q, q_pos, slot, entries)
    tiles = -(-T // QUERY_TILE)
    if T % tiles:
        raise NotImplementedError(
            f"rows of {T} tokens do not split into {tiles} equal query tiles "
            f"of at most {QUERY_TILE}"
        )
    split = lambda x: x.reshape(R * tiles, 1, T // tiles, *x.shape[2:])
    repeat = lambda x: jnp.repeat(x, tiles)[:, None]
    out, lse = _map(lambda x: one_tile(*x), (split(q), split(q_pos), repeat(slot), repeat(entries)))
    return out.reshape(R, T, K, G, -1), lse.reshape(R, T, K, G)


def _map(
    f: Callable[[Any], tuple[jax.Array, jax.Array]], xs: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    """lax.map, without a loop for a single element."""
    if len(xs[0]) == 1:
        return jax.tree.map(lambda y: y[None], f(jax.tree.map(lambda x: x[0], xs)))
    return lax.map(f, xs)


def _loop(
    q: jax.Array,
    q_pos: jax.Array,
    slot: jax.Array,
    entries: jax.Array,
    *,
    pages: KVPages,
    table: jax.Array,
    scale: float,
    softcap: float,
    window: int | None,
    value_dim: int,
) -> tuple[jax.Array, jax.Array]:
    """Online softmax over the key tiles that any of these rows sees; all rows advance together."""
    R, T, K, G, H = q.shape
    size = pages.kv.shape[3]
    span = max(1, min(KEY_TILE, KEY_TILE_ALL_ROWS // R) // size)
    last = q_pos.max(1)  # [R]
    entries = jnp.where(last < 0, 0, jnp.minimum(entries, last // size + 1))
    q = (q.transpose(0, 2, 3, 1, 4) if T > 1 else q.transpose(0, 2, 1, 3, 4)).reshape(
        R, K, G * T, H
    ) * scale
    # [R, 1, G*T or 1, 1]
    limit = jnp.tile(q_pos, (1, G))[:, None, :, None] if T > 1 else q_pos[:, None, :, None]

    def tile(
        i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        out, top, total = carry
        at = i * span + jnp.arange(span)
        k, v, k_pos = _keys(pages, q.dtype, table, slot, entries, since, last, at)
        v = v[..., :value_dim]
        scores = jnp.einsum("rkmh,rksh->rkms", q, k, preferred_element_type=jnp.float32)
        if softcap:
            scores = softcap * jnp.tanh(scores / softcap)
        seen = k_pos <= limit
        if window is not None:
            seen &= limit - k_pos < window
        scores = jnp.where(seen, scores, -jnp.inf)
        new = jnp.maximum(top, scores.max(-1))
        weights = jnp.exp(scores - new[..., None])
        shrink = jnp.exp(top - new)
        part = jnp.einsum(
            "rkms,rksh->rkmh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
        )
        return out * shrink[..., None] + part, new, total * shrink + weights.sum(-1)

    # made from q, so that shard_map gives it the same varying axes
    zero = q[..., 0].astype(jnp.float32) * 0
    first: int | jax.Array = 0
    since = jnp.zeros_like(last)
    if window is not None:
        since = jnp.where(q_pos < 0, jnp.iinfo(jnp.int32).max, q_pos).min(1) - (window - 1)
        first = _first_tile(table, slot, entries, since, size, span)
    init = (q[..., :value_dim].astype(jnp.float32) * 0, zero + LOWEST, zero)
    out, top, total = lax.fori_loop(first, (entries.max() + span - 1) // span, tile, init)
    safe = jnp.where(total == 0, 1, total)
    lse = jnp.where(total == 0, -jnp.inf, top + jnp.log(safe))
    return _by_token(out / safe[..., None], T), _by_token(lse, T)


def _keys(
    pages: KVPages,
    dtype: Any,
    table: jax.Array,
    slot: jax.Array,
    entries: jax.Array,
    since: jax.Array,
    last: jax.Array,
    at: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys and values [R, K, S, H] of table entries `at`, and their positions [R, 1, 1, S]. Values
    before position `since` [R] and after `last` [R] are zero."""
    R = len(slot)
    _, K, vectors, size, H = pages.kv.shape
    # [R, span]
    page = table[0][slot[:, None], at]
    block = table[1][slot[:, None], at]
    valid = (at < entries[:, None])[..., None]
    k_pos = jnp.where(valid, block[..., None] * size + jnp.arange(size), jnp.iinfo(jnp.int32).max)
    heads = jnp.arange(K)[None, :, None]
    k, *values = (
        pages.take((page[:, None], heads, j)).dequantize(dtype).reshape(R, K, -1, H)
        for j in range(vectors)
    )
    v = values[0] if values else k
    k_pos = k_pos.reshape(R, 1, 1, -1)
    since, last = (position[:, None, None, None] for position in (since, last))
    used = (since <= k_pos) & (k_pos <= last)
    v = jnp.where(used.reshape(R, 1, -1, 1), v, 0)  # 0 * NaN is NaN
    return k, v, k_pos


def _first_tile(
    table: jax.Array,
    slot: jax.Array,
    entries: jax.Array,
    since: jax.Array,
    size: int,
    span: int,
) -> jax.Array:
    """The first tile with a key at or after the position `since` [R] of any row."""
    block = jnp.maximum(since, 0) // size  # [R]
    before = entries_below(table[1], slot, entries[:, None], block[:, None])[:, 0]
    return jnp.where(entries > 0, before, entries.max()).min() // span


def _by_token(x: jax.Array, T: int) -> jax.Array:
    """[R, K, G * T, ...] -> [R, T, K, G, ...]."""
    R, K, M = x.shape[:3]
    x = x.reshape(R, K, M // T, T, *x.shape[3:])
    return jnp.moveaxis(x, 3, 1)
