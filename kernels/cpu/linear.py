"""Matrix products by the C++ kernel for CPUs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.kernels.cpu import library


def unsupported(x: Any, w: Any) -> str | None:
    """Returns why the kernel cannot multiply these (arrays, or anything with a dtype); None if it
    can."""
    if reason := library.unsupported():
        return reason
    if x.dtype != w.dtype or x.dtype not in library.FLOATS:
        return f"it has no product of {x.dtype} and {w.dtype}"
    return None


def linear(x: jax.Array, w: jax.Array, positions: jax.Array | None = None) -> jax.Array:
    """x [T, K] @ w [K, N], summed in f32, in the dtype of both. positions [T] int32: rows with a
    negative one are padding, on which no work is spent where that can be; their results mean
    nothing. Errors: NotImplementedError, with the reason, for types that the kernel does not have.
    """
    if reason := unsupported(x, w):
        raise NotImplementedError(reason)
    result = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
    return jax.ffi.ffi_call("jaxserve_linear", result)(
        x, w, jnp.zeros(0, jnp.int32) if positions is None else positions
    )


def grouped(x: jax.Array, w: jax.Array, counts: jax.Array) -> jax.Array:
    """Rows of x [T, K] @ the matrix of their group in w [E, K, N], as of `ops.grouped`. Errors:
    NotImplementedError, with the reason, for types that the kernel does not have."""
    if reason := unsupported(x, w):
        raise NotImplementedError(reason)
    result = jax.ShapeDtypeStruct((x.shape[0], w.shape[2]), x.dtype)
    return jax.ffi.ffi_call("jaxserve_grouped", result)(x, w, counts)
