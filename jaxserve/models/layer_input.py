"""Inputs of layers besides the hidden states, which are made of tokens (Gemma 3n, Gemma 4)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.checkpoint.model import ModelConfig
from jaxserve.kernels.qkv import rms_norm
from jaxserve.models.layers import gated
from jaxserve.models.parameters import create, look_up, matmul


class LayerInputs(nnx.Module):
    """Makes the inputs of all layers; parameters: see `LayerInputSpec.declare`."""

    embed: nnx.Param
    proj: nnx.Param
    norm: nnx.Param

    def __init__(self, model: ModelConfig, vocab: int):
        """vocab: rows of the table."""
        assert model.layer_input is not None
        self.eps = model.norms.eps
        create(self, model.layer_input.declare(model, vocab))

    def __call__(self, tokens: jax.Array, x: jax.Array) -> jax.Array:
        """Tokens [T] and their embeddings [T, D] -> inputs [T, layers, P]."""
        projected = matmul(x, self.proj, 1) * x.shape[1] ** -0.5
        projected = rms_norm(projected, self.norm[...], self.eps)
        own = look_up(self.embed, tokens).reshape(projected.shape)
        return ((projected + own * projected.shape[-1] ** 0.5) * 2**-0.5).astype(x.dtype)


class LayerInput(nnx.Module):
    """Makes of a layer's input what its block adds to the hidden states; parameters: see
    `LayerInputSpec.declare_block`."""

    gate: nnx.Param
    proj: nnx.Param
    norm: nnx.Param

    def __init__(self, model: ModelConfig):
        assert model.layer_input is not None
        self.activation = model.layer_input.activation
        self.eps = model.norms.eps
        create(self, model.layer_input.declare_block(model))

    def __call__(self, x: jax.Array, given: jax.Array) -> jax.Array:
        """Hidden states x [T, D] and the layer's input [T, P] -> what is added to x."""
        gate = matmul(x, self.gate, 1)
        chosen = gated(jnp.stack([gate, given], 1), self.activation)
        return rms_norm(matmul(chosen, self.proj, 1), self.norm[...], self.eps)
