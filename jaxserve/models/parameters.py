"""Parameters of modules, created as their specs declare them, and products with them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.checkpoint.specs import Declared
from jaxserve.kernels import ops
from jaxserve.kernels.quantised import Joined, Quantised
from jaxserve.models.adapters import Adapted, change
from jaxserve.models.tokens import Tokens
from jaxserve.sharding.mesh import TP, axis_sum


def create(module: nnx.Module, declared: Mapping[str, Declared]) -> None:
    """Gives the module its declared parameters, each an attribute of its name."""
    for name, parameter in declared.items():
        setattr(module, name, nnx.Param(jnp.zeros(parameter.shape), axes=parameter.axes))


def matmul(x: jax.Array, weight: nnx.Param, inputs: int, tokens: Tokens | None = None) -> jax.Array:
    """x [T, in] @ weight, whose first `inputs` dimensions are flattened to `in`; keeps the rest.
    tokens: whose rows x has, and whose adapters change the weight; None: no row is padding, and
    none has an adapter."""
    value = weight.get_value()
    positions = None if tokens is None else tokens.positions
    product = functools.partial(_linear, x, positions, inputs)
    if not isinstance(value, Adapted):
        return _side_by_side(product, value)
    assert tokens is not None and tokens.adapters is not None
    return _side_by_side(product, value.weight) + change(x, value, tokens.adapters)


def look_up(table: nnx.Param, tokens: jax.Array) -> jax.Array:
    """Looks up tokens [T] in a table [vocabulary, N], which is split over tensor-parallel ranks by
    its rows: [T, N]."""
    rows = table.get_value()
    count = rows.outputs if isinstance(rows, Quantised) else len(rows)
    mine = tokens - jax.lax.axis_index(TP) * count
    is_local = (mine >= 0) & (mine < count)
    found = ops.rows(rows, jnp.where(is_local, mine, 0))
    return axis_sum(jnp.where(is_local[:, None], found, 0), TP)


def grouped(x: jax.Array, weight: nnx.Param, counts: jax.Array) -> jax.Array:
    """Rows of x [T, in], sorted by expert, @ the matrix of their expert, as of `ops.grouped`:
    weight [experts, in, ...] -> [T, ...]."""
    return _side_by_side(functools.partial(_grouped, x, counts), weight.get_value())


def _linear(
    x: jax.Array, positions: jax.Array | None, inputs: int, w: jax.Array | Quantised
) -> jax.Array:
    if isinstance(w, Quantised):
        return ops.linear(x, w, positions).reshape(len(x), *w.leading, w.outputs)
    out = ops.linear(x, w.reshape(math.prod(w.shape[:inputs]), -1), positions)
    return out.reshape(len(x), *w.shape[inputs:])


def _grouped(x: jax.Array, counts: jax.Array, w: jax.Array | Quantised) -> jax.Array:
    if isinstance(w, Quantised):
        return ops.grouped(x, w, counts).reshape(len(x), *w.leading[1:], w.outputs)
    out = ops.grouped(x, w.reshape(*w.shape[:2], -1), counts)
    return out.reshape(len(x), *w.shape[2:])


def _side_by_side(product: Callable[[Any], jax.Array], weight: Any) -> jax.Array:
    """Computes the product with a weight, or with each of those that are joined."""
    if not isinstance(weight, Joined):
        return product(weight)
    return jnp.concatenate([product(part) for part in weight.parts], weight.axis)
