"""Copies whole KV pages out of a pool and into one, for the tiers below the devices
(`engine.page_io`). The platform decides, as in `ops`, whether XLA or a Hopper kernel
copies."""

from __future__ import annotations

import functools

import jax

from jaxserve.kernels import ops
from jaxserve.kernels.cpu import write as cpu_write
from jaxserve.kernels.kv_pages import KVPages


def read_pages(pages: KVPages, ids: jax.Array) -> KVPages:
    """Copies pages `ids` [n] int32 (all in range) of pools [1, P, ...] into n contiguous pages."""
    return jax.tree.map(functools.partial(_read, ids=ids), pages)


def write_pages(pages: KVPages, ids: jax.Array, values: KVPages) -> KVPages:
    """Writes n pages `values` [n, ...], which may be the `bits` of numbers, to pages `ids` [n]
    int32 of pools [1, P, ...], in place if `pages` is donated. ids must differ; those out of range
    are skipped."""
    return jax.tree.map(functools.partial(_write, ids=ids), pages, values)


def bits(x: jax.Array) -> jax.Array:
    """The bits of numbers, as unsigned integers of their size."""
    return x.view(f"uint{8 * x.dtype.itemsize}")


def _read(pool: jax.Array, ids: jax.Array) -> jax.Array:
    if ops.hopper_unsupported() is None:
        from jaxserve.kernels.mosaic import page_copy

        return page_copy.read_pages(pool[0], ids)
    # as bits: XLA's CPU compiler computes with bfloat16 as f32, which has other NaNs
    return bits(pool)[0, ids].view(pool.dtype)


def _write(pool: jax.Array, values: jax.Array, ids: jax.Array) -> jax.Array:
    if cpu_write.unsupported_pages(pool) is None:
        return cpu_write.write_pages(pool, ids, values)
    values = values.view(pool.dtype)
    if ops.hopper_unsupported() is None:
        from jaxserve.kernels.mosaic import page_copy

        return page_copy.write_pages(pool[0], ids, values)[None]
    return pool.at[0, ids].set(values, mode="drop", unique_indices=True)
