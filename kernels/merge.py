"""Merge of partial attention by log-sum-exp: associative, commutative, exact (context parallel
paper, appendix B, Eq. 4)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

LOWEST = -1e30  # stands for -inf where a difference with -inf would give NaN


def merge(outs: jax.Array, lses: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Partials f32 `outs` [pieces, ..., H], natural-log `lses` [pieces, ...] -> (out [..., H], lse
    [...]).

    A piece that saw no key has lse = -inf and weight 0; where no piece saw a key the result is 0
    with lse = -inf.
    """
    top = jnp.maximum(lses.max(0), LOWEST)
    weights = jnp.exp(lses - top)
    total = weights.sum(0)
    safe = jnp.where(total == 0, 1, total)
    out = (outs * weights[..., None]).sum(0) / safe[..., None]
    return out, jnp.where(total == 0, -jnp.inf, top + jnp.log(safe))
