"""The meaning of every kernel, in plain jnp and f32: what the implementations are tested against.
Slow, and dense in memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.kernels.kv_pages import KVPages


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
    """Attention of rows of queries over the pages of their sequences, causal by position.

    q      [R, T, K, G, H]   queries, rotated
    q_pos  [R, T] int32      their positions; a negative position sees nothing
    pages  P of C tokens     keys and values of K heads
    table  [2, slots, W] int32   per sequence, in ascending block order: page, block (position // C)
    rows   [R] int32         which sequence of the table each row belongs to
    count  [R] int32         how many of its W entries hold

    A query sees the keys at positions p with p <= q_pos, and q_pos - p < window where there is one.
    What unused pages and entries hold does not matter, NaN included. Returns out f32 [R, T, K, G,
    H] and natural-log lse f32 [R, T, K, G]; 0 and -inf where nothing is seen.
    """
    # [R, W]
    page = table[0, rows]
    block = table[1, rows]
    size = pages.kv.shape[3]
    k_pos = block[:, :, None] * size + jnp.arange(size)  # [R, W, C]
    live = jnp.broadcast_to((jnp.arange(page.shape[1]) < count[:, None])[:, :, None], k_pos.shape)
    distance = q_pos[:, :, None, None] - k_pos[:, None]  # [R, T, W, C]
    seen = live[:, None] & (distance >= 0) & (q_pos >= 0)[:, :, None, None]
    if window is not None:
        seen &= distance < window
    used = seen.any(1)[:, :, None, :, None]  # [R, W, 1, C, 1]
    # [R, W, K, 2, C, H]
    kv = jnp.where(used[:, :, :, None], pages.take(page).wide(jnp.float32).astype(jnp.float32), 0)
    k = kv[:, :, :, 0]
    v = kv[:, :, :, 1]
    scores = jnp.einsum("rtkgh,rwkch->rtkgwc", q.astype(jnp.float32) * scale, k)
    scores = jnp.where(seen[:, :, None, None], scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, (-2, -1))
    weights = jnp.where(
        seen[:, :, None, None], jnp.exp(scores - jnp.maximum(lse, -1e30)[..., None, None]), 0
    )
    return jnp.einsum("rtkgwc,rwkch->rtkgh", weights, v), lse
