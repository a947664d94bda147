"""The gated MLP."""

from __future__ import annotations

import jax
from flax import nnx

from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.specs import MlpSpec
from jaxserve.models.layers import gated
from jaxserve.models.parameters import create, matmul
from jaxserve.sharding.mesh import over_lanes


class GatedMlp(nnx.Module):
    """Gated MLP; parameters: see `MlpSpec`."""

    gate_up: nnx.Param
    down: nnx.Param

    def __init__(self, model: ModelConfig, layer: int):
        spec = model.mlp(layer)
        assert isinstance(spec, MlpSpec)
        self.activation = spec.activation
        self.lanes = spec.lanes
        create(self, spec.declare(model))

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Hidden states [T, D] at positions [T] (-1: padding) -> this rank's part of the output."""
        return over_lanes(self._compute, self.lanes, x, positions)

    def _compute(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        hidden = gated(matmul(x, self.gate_up, 1, positions), self.activation)
        return matmul(hidden, self.down, 1, positions)
