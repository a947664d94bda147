"""Attention over pages by the C++ kernel for CPUs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.kernels.cpu import library
from jaxserve.kernels.kv_pages import FP8, SCALE_DTYPE, KVPages

HEAD_DIMS = 16  # head and value dims are multiples of it: the numbers of the widest vector


def unsupported(q: Any, kv: Any, value_dim: int | None = None) -> str | None:
    """Returns why the kernel cannot be used for these queries and pages (arrays, or anything with
    shape and dtype) and this value dim (None: the head dim); None if it can."""
    if reason := library.unsupported():
        return reason
    if q.shape[4] % HEAD_DIMS:
        return f"head dim {q.shape[4]} is no multiple of {HEAD_DIMS}"
    if value_dim is not None and value_dim % HEAD_DIMS:
        return f"value dim {value_dim} is no multiple of {HEAD_DIMS}"
    if q.dtype not in library.FLOATS or kv.dtype not in (*library.FLOATS, FP8):
        return f"it has no queries of {q.dtype} over pages of {kv.dtype}"
    return None


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
    dtype: Any = jnp.float32,
) -> tuple[jax.Array, jax.Array]:
    """Arguments and results of `reference.attend`; `out` is of type `dtype`. Errors:
    NotImplementedError, with the reason, for shapes and types that the kernel does not have."""
    if reason := unsupported(q, pages.kv, value_dim):
        raise NotImplementedError(reason)
    scales = jnp.zeros(0, SCALE_DTYPE) if pages.scales is None else pages.scales
    results = (
        jax.ShapeDtypeStruct((*q.shape[:-1], value_dim or q.shape[-1]), dtype),
        jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32),
    )
    call = jax.ffi.ffi_call("jaxserve_attention", results)
    out, lse = call(
        q,
        q_pos,
        pages.kv,
        scales,
        table,
        slot,
        entries,
        scale=np.float32(scale),
        softcap=np.float32(softcap),
        window=np.int64(window or 0),
    )
    return out, lse
