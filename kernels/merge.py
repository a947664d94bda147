"""Merge of partial attention by log-sum-exp: associative, commutative, exact (Context Parallelism
for Scalable Million-Token Inference, appendix B, Eq. 4)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

LOWEST = -1e30  # in place of -inf where subtracting -inf would give NaN


def merge(outs: jax.Array, lses: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Merges attention over disjoint parts of the keys.

    outs f32 [parts, ..., H], lses (natural log) f32 [parts, ...] -> out [..., H], lse [...]. A part
    that saw no key has lse -inf and weight 0; where no part saw a key, out is 0 and lse -inf.
    """
    top = jnp.maximum(lses.max(0), LOWEST)
    weights = jnp.exp(lses - top)
    total = weights.sum(0)
    safe = jnp.where(total == 0, 1, total)
    out = (outs * weights[..., None]).sum(0) / safe[..., None]
    return out, jnp.where(total == 0, -jnp.inf, top + jnp.log(safe))
