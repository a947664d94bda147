"""Parameters of modules, created as their specs declare them, and products with them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.checkpoint.specs import Declared
from jaxserve.kernels import ops


def create(module: nnx.Module, declared: Mapping[str, Declared]) -> None:
    """Gives the module its declared parameters, each an attribute of its name."""
    for name, parameter in declared.items():
        setattr(module, name, nnx.Param(jnp.zeros(parameter.shape), axes=parameter.axes))


def matmul(
    x: jax.Array, weight: nnx.Param, inputs: int, positions: jax.Array | None = None
) -> jax.Array:
    """x [T, in] @ weight, whose first `inputs` dimensions are flattened to `in`; keeps the rest.
    positions [T]: of the rows (-1: padding); None: no row is padding."""
    w = weight[...]
    out = ops.linear(x, w.reshape(math.prod(w.shape[:inputs]), -1), positions)
    return out.reshape(len(x), *w.shape[inputs:])
