"""What a pool of KV holds: keys and values, and, where these are stored in 8 bits, what they are to
be multiplied by."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

FP8 = jnp.dtype(jnp.float8_e4m3fn)
LARGEST = 448.0  # of its numbers
SCALE = jnp.dtype(jnp.bfloat16)


class KVPages(NamedTuple):
    """A layer's pages. Each vector of H numbers of 8 bits has a scale, a power of two, so that what
    it says is exact in bfloat16."""

    kv: Any  # [..., P, K, 2, C, H]
    scales: Any = None  # [..., P, K, 2, C], or None: kv is not of 8 bits

    def take(self, index: Any) -> KVPages:
        """Those at an index into the leading dimensions that both arrays have."""
        return KVPages(self.kv[index], None if self.scales is None else self.scales[index])

    def wide(self, dtype: Any) -> jax.Array:
        """What kv says: of `dtype` where it is of 8 bits, else of its own type."""
        return (
            self.kv
            if self.scales is None
            else self.kv.astype(dtype) * self.scales.astype(dtype)[..., None]
        )


def pool_shapes(shape: tuple[int, ...], dtype: Any) -> KVPages:
    """Of a pool with kv of this shape and type."""
    scales = jax.ShapeDtypeStruct(shape[:-1], SCALE) if jnp.dtype(dtype) == FP8 else None
    return KVPages(jax.ShapeDtypeStruct(shape, dtype), scales)


def narrow(kv: jax.Array) -> KVPages:
    """kv [..., H] in 8 bits: relative errors of at most 1/16, but for numbers under about 2^-14 of
    their vector's greatest.

    The scale is the least power of two that leaves room for all of the vector; a vector of zeros
    has 1.
    """
    wide = kv.astype(jnp.float32)
    most = jnp.abs(wide).max(-1)
    _, exponent = jnp.frexp(most / LARGEST)
    scales = jnp.where(
        jnp.isfinite(most), jnp.ldexp(jnp.float32(1), jnp.clip(exponent, -120, 120)), most
    )
    return KVPages((wide / scales[..., None]).astype(FP8), scales.astype(SCALE))
