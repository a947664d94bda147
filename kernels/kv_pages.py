"""Storage of the KV cache: pages of keys and values, optionally in 8-bit floating point with a
scale per vector."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

FP8 = jnp.dtype(jnp.float8_e4m3fn)
FP8_MAX = 448.0
SCALE_DTYPE = jnp.dtype(jnp.bfloat16)
COMPUTE_DTYPES = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)  # of tensor cores' operands


class KVPages(NamedTuple):
    """KV pages of one layer.

    kv [..., P, K, 2, C, H]: keys (0) and values (1); or [..., P, K, 1, C, H]: keys, whose first
    numbers are the values. scales [..., P, K, 2 or 1, C]: factor of each vector of H numbers, a
    power of two, so that dequantised numbers are exact in bfloat16; None unless kv is FP8. Fields
    are arrays, or anything with the same structure (shapes, Pallas refs).
    """

    kv: Any
    scales: Any = None

    def take(self, index: Any) -> KVPages:
        """Indexes the leading dimensions that kv and scales share."""
        return KVPages(self.kv[index], None if self.scales is None else self.scales[index])

    def dequantize(self, dtype: Any) -> jax.Array:
        """kv times its scales in `dtype`; kv itself if it is not quantised."""
        if self.scales is None:
            return self.kv
        return self.kv.astype(dtype) * self.scales.astype(dtype)[..., None]


def check_pages(
    kv: jax.Array | jax.ShapeDtypeStruct, value_dim: int | None, head_dims: tuple[int, ...]
) -> None:
    """Checks that tensor cores can attend over pages of this dtype and shape [..., K, 2, C, H] and
    to values of this dim (None: H). head_dims: those that a kernel supports. Errors:
    NotImplementedError, with the reason."""
    H = kv.shape[4]
    if kv.shape[2] != 2:
        raise NotImplementedError("pages have one vector per token")
    if value_dim not in (None, H):
        raise NotImplementedError(f"a value dim of {value_dim} beside a head dim of {H}")
    if kv.dtype not in (*COMPUTE_DTYPES, FP8):
        raise NotImplementedError(
            f"pages of {kv.dtype}; supported are {', '.join(map(str, (*COMPUTE_DTYPES, FP8)))}"
        )
    if H not in head_dims:
        raise NotImplementedError(
            f"a head dim of {H}; supported are {', '.join(map(str, head_dims))}"
        )


def pool_shapes(shape: tuple[int, ...], dtype: Any) -> KVPages:
    """Shapes and dtypes of a pool whose kv has this shape and dtype; FP8 pools have scales."""
    scales = jax.ShapeDtypeStruct(shape[:-1], SCALE_DTYPE) if jnp.dtype(dtype) == FP8 else None
    return KVPages(jax.ShapeDtypeStruct(shape, dtype), scales)


def quantize(kv: jax.Array) -> KVPages:
    """Quantises kv [..., H] to FP8 with a scale per vector.

    The scale is the smallest power of two with which the whole vector fits FP8 (1 for zeros). The
    relative error is at most 1/16, except for numbers below about 2^-14 of their vector's largest.
    Vectors with NaN or infinity stay so.
    """
    wide = kv.astype(jnp.float32)
    largest = jnp.abs(wide).max(-1)
    _, exponent = jnp.frexp(largest / FP8_MAX)
    scales = jnp.where(
        jnp.isfinite(largest), jnp.ldexp(jnp.float32(1), jnp.clip(exponent, -120, 120)), largest
    )
    return KVPages((wide / scales[..., None]).astype(FP8), scales.astype(SCALE_DTYPE))
