"""Reference attention over pages in plain jnp and f32, which the other implementations are tested
against. Slow, and its memory grows with queries times keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.kernels.kv_pages import KVPages


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
    """Causal attention of rows of queries over the KV pages of their sequences.

    q        [R, T, K, G, H]     queries, with RoPE applied
    q_pos    [R, T] int32        their positions; negative: padding, which sees nothing
    pages    P pages of C tokens
    table    [2, slots, W] int32 page table: page and block (position // C) of each entry, by
                                 sequence, in ascending order of blocks; those before the block of
                                 a row's first query in any order, if there is no window
    slot     [R] int32           row of the page table of each row of queries
    entries  [R] int32           valid entries in that row of the page table
    scale                        factor on q k
    softcap                      bound c of the logits, c tanh(q k scale / c); 0: none
    window                       sliding window in tokens; None: no limit
    value_dim                    numbers of a value: the first of a token's second vector, or of
                                 its only one, which is the key too; None: H

    A query sees the keys at positions p with p <= q_pos, and q_pos - p < window if there is one.
    Unused pages and entries may hold anything, NaN included. Returns out f32 [R, T, K, G,
    value_dim] and lse (natural log) f32 [R, T, K, G]; 0 and -inf for queries that see nothing.
    """
    # [R, W]
    page = table[0, slot]
    block = table[1, slot]
    size = pages.kv.shape[3]
    k_pos = block[:, :, None] * size + jnp.arange(size)  # [R, W, C]
    valid = jnp.broadcast_to(
        (jnp.arange(page.shape[1]) < entries[:, None])[:, :, None], k_pos.shape
    )
    distance = q_pos[:, :, None, None] - k_pos[:, None]  # [R, T, W, C]
    seen = valid[:, None] & (distance >= 0) & (q_pos >= 0)[:, :, None, None]
    if window is not None:
        seen &= distance < window
    used = seen.any(1)[:, :, None, :, None]  # [R, W, 1, C, 1]
    # [R, W, K, 2, C, H]
    kv = jnp.where(
        used[:, :, :, None], pages.take(page).dequantize(jnp.float32).astype(jnp.float32), 0
    )
    k = kv[:, :, :, 0]
    v = kv[:, :, :, -1, :, :value_dim]
    scores = jnp.einsum("rtkgh,rwkch->rtkgwc", q.astype(jnp.float32) * scale, k)
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(seen[:, :, None, None], scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, (-2, -1))
    weights = jnp.where(
        seen[:, :, None, None], jnp.exp(scores - jnp.maximum(lse, -1e30)[..., None, None]), 0
    )
    return jnp.einsum("rtkgwc,rwkch->rtkgh", weights, v), lse
