"""Queries, keys and values of attention, from the product they come from to where attention finds
them: norms, RoPE and the write of keys and values to their pages."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Projected:
    """Heads as a projection leaves them.

    heads [T, K, rows, H]: of each kv head, `group` query heads G first, key and value last; what is
    between is not looked at. norms: weights [H] of the norms of queries and keys, with epsilon
    `eps`; None: there are none. cos_sin: those of RoPE, f32 [T, 1, 1, rotated dimensions / 2];
    None: there is none.
    """

    heads: jax.Array
    group: int
    norms: tuple[jax.Array, jax.Array] | None = None
    eps: float = 0.0
    cos_sin: tuple[jax.Array, jax.Array] | None = None

    @property
    def half(self) -> int:
        """Half of the rotated dimensions; of all dimensions where none is."""
        return self.cos_sin[0].shape[-1] if self.cos_sin else self.heads.shape[-1] // 2

    def prepared(self) -> tuple[jax.Array, jax.Array]:
        """Returns queries [T, K, G, H], and keys and values [T, K, 2, H]."""
        q = self.heads[:, :, : self.group]
        k = self.heads[:, :, -2:-1]
        v = self.heads[:, :, -1:]
        if self.norms:
            q, k = (rms_norm(x, weight, self.eps) for x, weight in zip((q, k), self.norms))
        if self.cos_sin:
            q, k = (rotate(x, *self.cos_sin) for x in (q, k))
        return q, jnp.concatenate([k, v], 2)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Normalises x [..., D] by its root mean square (Zhang and Sennrich, 2019), in f32; the result
    has the dtype of x."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + eps)
    return (normed * weight).astype(x.dtype)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Applies RoPE to the first R dimensions of each head of x [T, K, heads, H], where cos and sin
    have R / 2; dimension i is paired with i + R / 2, as in Hugging Face checkpoints."""
    half = cos.shape[-1]
    a = x[..., :half]
    b = x[..., half : 2 * half]
    parts = [a * cos - b * sin, b * cos + a * sin]
    if 2 * half < x.shape[-1]:
        parts.append(x[..., 2 * half :])
    return jnp.concatenate(parts, -1).astype(x.dtype)
