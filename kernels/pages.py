"""Whole pages from one pool to another: for transfers, tiers and rebalancing. The platform chooses as in `ops`."""

from __future__ import annotations

import jax

from jaxserve.kernels import ops


def gather(pages: jax.Array, ids: jax.Array) -> jax.Array:
    """pages [P, ...], ids [n] int32, all in range -> [n, ...], side by side, as a transfer wants them."""
    if ops.hopper_lacks() is None:
        from jaxserve.kernels.mosaic import copy

        return copy.gather(pages, ids)
    return pages[ids]


def scatter(pages: jax.Array, ids: jax.Array, these: jax.Array) -> jax.Array:
    """These [n, ...] go to the pages `ids` [n] int32, all different, in place where `pages` is donated; those out of range nowhere."""
    if ops.hopper_lacks() is None:
        from jaxserve.kernels.mosaic import copy

        return copy.scatter(pages, ids, these)
    return pages.at[ids].set(these, mode="drop", unique_indices=True)
