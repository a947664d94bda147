"""Copies whole KV pages out of a pool and into one, for the tiers below the devices
(`engine.page_io`). The platform decides, as in `ops`, whether XLA or a Hopper kernel
copies."""

from __future__ import annotations

import functools

import jax

from jaxserve.kernels import ops
from jaxserve.kernels.kv_pages import KVPages


def read_pages(pages: KVPages, ids: jax.Array) -> KVPages:
    """Copies pages `ids` [n] int32 (all in range) into n contiguous pages."""
    return jax.tree.map(functools.partial(_read, ids=ids), pages)


def write_pages(pages: KVPages, ids: jax.Array, values: KVPages) -> KVPages:
    """Writes n pages `values` to pages `ids` [n] int32, in place if `pages` is donated. ids must
    differ; those out of range are skipped."""
    return jax.tree.map(functools.partial(_write, ids=ids), pages, values)


def _read(pool: jax.Array, ids: jax.Array) -> jax.Array:
    if ops.hopper_unsupported() is None:
        from jaxserve.kernels.mosaic import page_copy

        return page_copy.read_pages(pool, ids)
    return pool[ids]


def _write(pool: jax.Array, values: jax.Array, ids: jax.Array) -> jax.Array:
    if ops.hopper_unsupported() is None:
        from jaxserve.kernels.mosaic import page_copy

        return page_copy.write_pages(pool, ids, values)
    return pool.at[ids].set(values, mode="drop", unique_indices=True)
