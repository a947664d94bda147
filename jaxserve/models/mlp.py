"""The gated MLP."""

from __future__ import annotations

import jax
from flax import nnx

from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.specs import MlpSpec
from jaxserve.models.layers import gated
from jaxserve.models.parameters import create, matmul
from jaxserve.models.tokens import Tokens
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
        create(self, spec.declare(model.at(layer)))

    def __call__(self, x: jax.Array, tokens: Tokens) -> jax.Array:
        """Hidden states [T, D] of tokens -> this rank's part of the output."""
        return over_lanes(self._compute, self.lanes, x, tokens)

    def _compute(self, x: jax.Array, tokens: Tokens) -> jax.Array:
        return gated_mlp(x, tokens, self.gate_up, self.down, self.activation)


def gated_mlp(
    x: jax.Array, tokens: Tokens, gate_up: nnx.Param, down: nnx.Param, activation: str
) -> jax.Array:
    """Computes a gated MLP of x [T, D] of tokens with weights [D, 2, F] and [F, D]."""
    hidden = gated(matmul(x, gate_up, 1, tokens), activation)
    return matmul(hidden, down, 1, tokens)
