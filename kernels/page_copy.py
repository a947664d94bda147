"""Whole pages from one pool to another: for transfers, tiers and rebalancing. The platform chooses
as in `ops`."""

from __future__ import annotations

import functools

import jax

from jaxserve.kernels import ops
from jaxserve.kernels.kv_pages import KVPages


def gather(pages: KVPages, ids: jax.Array) -> KVPages:
    """ids [n] int32, all in range -> n pages side by side, as a transfer wants them."""
    return jax.tree.map(functools.partial(_gather, ids=ids), pages)


def scatter(pages: KVPages, ids: jax.Array, these: KVPages) -> KVPages:
    """These n pages go to those of `ids` [n] int32, all different, in place where `pages` is
    donated; those out of range nowhere."""
    return jax.tree.map(functools.partial(_scatter, ids=ids), pages, these)


def _gather(pool: jax.Array, ids: jax.Array) -> jax.Array:
    if ops.hopper_lacks() is None:
        from jaxserve.kernels.mosaic import page_copy as copy

        return copy.gather(pool, ids)
    return pool[ids]


def _scatter(pool: jax.Array, these: jax.Array, ids: jax.Array) -> jax.Array:
    if ops.hopper_lacks() is None:
        from jaxserve.kernels.mosaic import page_copy as copy

        return copy.scatter(pool, ids, these)
    return pool.at[ids].set(these, mode="drop", unique_indices=True)
