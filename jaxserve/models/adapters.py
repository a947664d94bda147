"""Products with weights that low-rank adapters change (LoRA, Hu et al., 2021): each token of a step
has the change of its own adapter, or none."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.kernels import ops


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
    """A weight, and the factors of what the adapter in each of P places adds to it.

    weight   [*inputs, *outputs], or quantised
    down     [P, *inputs, R]; the inputs may be those of this rank alone, as the sum over ranks that
             the weight needs sums the parts of the change too
    up       [P, R, *outputs]; with the adapter's factor
    """

    weight: Any
    down: Any
    up: Any


Pools = tuple[Any, Any]  # down and up of a parameter, of all places, or of one adapter


def set_adapter(pools: list[Pools], factors: list[Pools], place: jax.Array) -> list[Pools]:
    """Returns pools of parameters with the factors of an adapter in a place."""
    return jax.tree.map(lambda pool, factor: pool.at[place].set(factor), pools, factors)


def change(x: jax.Array, weight: Adapted, adapters: jax.Array) -> jax.Array:
    """Computes what adapters add to the product of x [T, in] and a weight: [T, *outputs]. adapters
    [T] int32: the place of each row's adapter; -1: none, whose rows are 0. A step without adapters
    computes nothing."""
    places, rank, *outputs = weight.up.shape
    down = weight.down.reshape(places, -1, rank)
    up = weight.up.reshape(places, rank, -1)
    order, counts = by_place(adapters, places)

    def compute() -> jax.Array:
        inner = ops.grouped(x[order], down, counts)
        out = ops.grouped(inner, up, counts)
        return jnp.zeros_like(out).at[order].set(out, unique_indices=True)

    nothing = jnp.zeros((len(x), math.prod(outputs)), x.dtype)
    out = jax.lax.cond(counts.sum() > 0, compute, lambda: nothing)
    return out.reshape(len(x), *outputs)


def by_place(adapters: jax.Array, places: int) -> tuple[jax.Array, jax.Array]:
    """Returns the numbers of rows by the place of their adapter [T], those without one last, and
    how many rows each place has [places] int32."""
    last = jnp.where(adapters < 0, places, adapters)
    counts = jnp.bincount(last, length=places + 1)[:places].astype(jnp.int32)
    return jnp.argsort(last, stable=True), counts
