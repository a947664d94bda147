"""Attention over pages in plain XLA, shaped for CPUs: tiles of keys that stay in the cache, one
loop over what a row can see.

Rows of one token (decode) go through the loop together. Long rows are cut into query tiles, each
with its own loop bound, so that causal work that is masked whole is never done. Compiled programs
do not depend on how long the contexts are.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.kernels.kv_pages import KVPages
from jaxserve.kernels.merge import LOWEST
from jaxserve.kernels.table import below

QUERY_TILE = 256  # query tokens of one tile
KEY_TILE = 256  # keys of one tile, per row (at least one page)
TILE_KEYS = 2048  # keys of one tile, all rows together


def attend(
    q: jax.Array,
    q_pos: jax.Array,
    pages: KVPages,
    table: jax.Array,
    rows: jax.Array,
    count: jax.Array,
    *,
    scale: float,
    window: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """As `reference.attend`."""
    R, T, K, G, H = q.shape
    one_tile = functools.partial(_loop, pages=pages, table=table, scale=scale, window=window)
    if T == 1:
        return one_tile(q, q_pos, rows, count)
    tiles = -(-T // QUERY_TILE)
    if T % tiles:
        raise NotImplementedError(
            f"rows of {T} tokens do not split into {tiles} equal query tiles of at most {QUERY_TILE}"
        )
    split = lambda x: x.reshape(R * tiles, 1, T // tiles, *x.shape[2:])
    repeat = lambda x: jnp.repeat(x, tiles)[:, None]
    out, lse = _map(lambda x: one_tile(*x), (split(q), split(q_pos), repeat(rows), repeat(count)))
    return out.reshape(q.shape), lse.reshape(R, T, K, G)


def _map(f, xs):
    """lax.map, without the loop where there is one element."""
    if len(xs[0]) == 1:
        return jax.tree.map(lambda y: y[None], f(jax.tree.map(lambda x: x[0], xs)))
    return lax.map(f, xs)


def _loop(q, q_pos, rows, count, *, pages, table, scale, window):
    """Online softmax over the tiles of keys that any of these rows can see."""
    R, T, K, G, H = q.shape
    size = pages.kv.shape[3]
    span = max(1, min(KEY_TILE, TILE_KEYS // R) // size)
    last = q_pos.max(1)  # [R]
    count = jnp.where(last < 0, 0, jnp.minimum(count, last // size + 1))
    q = (q.transpose(0, 2, 3, 1, 4) if T > 1 else q.transpose(0, 2, 1, 3, 4)).reshape(
        R, K, G * T, H
    ) * scale
    # [R, 1, G*T or 1, 1]
    limit = jnp.tile(q_pos, (1, G))[:, None, :, None] if T > 1 else q_pos[:, None, :, None]

    def tile(i, carry):
        out, top, total = carry
        k, v, k_pos = _keys(pages, q.dtype, table, rows, count, last, i * span + jnp.arange(span))
        scores = jnp.einsum("rkmh,rksh->rkms", q, k, preferred_element_type=jnp.float32)
        seen = k_pos <= limit
        if window is not None:
            seen &= limit - k_pos < window
        scores = jnp.where(seen, scores, -jnp.inf)
        new = jnp.maximum(top, scores.max(-1))
        weights = jnp.exp(scores - new[..., None])
        shrink = jnp.exp(top - new)
        piece = jnp.einsum(
            "rkms,rksh->rkmh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
        )
        return out * shrink[..., None] + piece, new, total * shrink + weights.sum(-1)

    zero = q[..., 0].astype(jnp.float32) * 0  # typed as q: varies over the mesh as q does
    first = 0 if window is None else _first_tile(table, rows, count, q_pos, size, span, window)
    init = (q.astype(jnp.float32) * 0, zero + LOWEST, zero)
    out, top, total = lax.fori_loop(first, (count.max() + span - 1) // span, tile, init)
    safe = jnp.where(total == 0, 1, total)
    return _back(out / safe[..., None], T), _back(
        jnp.where(total == 0, -jnp.inf, top + jnp.log(safe)), T
    )


def _keys(pages, dtype, table, rows, count, last, at):
    """Keys and values [R, K, S, H] of table entries `at`, and their positions [R, 1, 1, S]; values
    that no row may use are zero."""
    R, (_, K, _, size, H) = len(rows), pages.kv.shape
    # [R, span]
    page = table[0][rows[:, None], at]
    block = table[1][rows[:, None], at]
    live = (at < count[:, None])[..., None]
    k_pos = jnp.where(live, block[..., None] * size + jnp.arange(size), jnp.iinfo(jnp.int32).max)
    heads = jnp.arange(K)[None, :, None]
    k, v = (pages.take((page[:, None], heads, j)).wide(dtype).reshape(R, K, -1, H) for j in (0, 1))
    k_pos = k_pos.reshape(R, 1, 1, -1)
    v = jnp.where((k_pos <= last[:, None, None, None]).reshape(R, 1, -1, 1), v, 0)  # 0 * NaN is NaN
    return k, v, k_pos


def _first_tile(table, rows, count, q_pos, size, span, window):
    """The first tile in which a key lies within the window of any query. Queries at negative
    positions do not count."""
    first = jnp.where(q_pos < 0, jnp.iinfo(jnp.int32).max, q_pos).min(1)
    block = jnp.maximum(first - window + 1, 0) // size  # [R]
    before = below(table[1], rows, count[:, None], block[:, None])[:, 0]
    return jnp.where(count > 0, before, count.max()).min() // span


def _back(x, T):
    """[R, K, G*T, ...] -> [R, T, K, G, ...]."""
    R, K, M = x.shape[:3]
    x = x.reshape(R, K, M // T, T, *x.shape[3:])
    return jnp.moveaxis(x, 3, 1)
