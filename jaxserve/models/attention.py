"""Attention with grouped queries."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.specs import AttentionSpec
from jaxserve.kernels.kv_pages import KVPages
from jaxserve.models.layers import rms_norm, rotate
from jaxserve.models.parameters import create, matmul
from jaxserve.sharding.attend import Attend
from jaxserve.sharding.attention import attention
from jaxserve.sharding.mesh import TP, axis_sum
from jaxserve.sharding.rows import Groups


class Attention(nnx.Module):
    """Attention with grouped queries over the KV pages of a layer; parameters: see
    `AttentionSpec`."""

    qkv: nnx.Param
    qkv_bias: nnx.Param
    q_norm: nnx.Param
    k_norm: nnx.Param
    sinks: nnx.Param
    o_proj: nnx.Param
    o_bias: nnx.Param

    def __init__(self, model: ModelConfig, layer: int):
        spec = model.mixer(layer)
        assert isinstance(spec, AttentionSpec)
        self.spec = spec
        self.eps = model.norms.eps
        scale = spec.scale or model.head_dim**-0.5
        self.attend = Attend(scale, model.window(layer), spec.softcap)
        self.sizes = (model.heads * model.head_dim, model.kv_heads * model.head_dim)
        create(self, spec.declare(model))

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        cos_sin: tuple[jax.Array, jax.Array] | None,
        groups: Groups,
        pages: KVPages,
    ) -> tuple[jax.Array, KVPages]:
        """Hidden states [T, D] at positions [T] (-1: padding) and this layer's KV pages (leading
        axis of 1) -> this rank's part of the output, and the pages with the new keys and values.
        cos_sin: None for a layer without positions."""
        q, gate, kv = self._project(x, positions, cos_sin)
        sinks = None
        if self.spec.sinks:
            sinks = self.sinks[...]
        out, pages = attention(q, kv, pages, groups, self.attend, sinks)
        if gate is not None:
            out = out * jax.nn.sigmoid(gate)
        out = matmul(out.reshape(len(x), -1), self.o_proj, 3, positions)
        if self.spec.o_bias:
            out = out + jnp.where(jax.lax.axis_index(TP) == 0, self.o_bias[...], 0)
        return out, pages

    def _project(
        self,
        x: jax.Array,
        positions: jax.Array,
        cos_sin: tuple[jax.Array, jax.Array] | None,
    ) -> tuple[jax.Array, jax.Array | None, jax.Array]:
        """Projects x [T, D] to q [T, K, G, H], its gate, if there is one, and kv [T, K, 2, H], with
        norms and RoPE on queries and keys."""
        qkv = matmul(x, self.qkv, 1, positions)
        if self.spec.qkv_bias:
            qkv = qkv + self.qkv_bias[...]
        q, k, v = jnp.split(qkv, (qkv.shape[2] - 2, qkv.shape[2] - 1), 2)
        gate = None
        if self.spec.gate:
            q, gate = jnp.split(q, 2, 2)
        if self.spec.qk_norm == "head":
            q = rms_norm(q, self.q_norm[...], self.eps)
            k = rms_norm(k, self.k_norm[...], self.eps)
        elif self.spec.qk_norm == "all":
            q, k = self._norm_over_heads(q, k)
        if cos_sin is not None:
            q = rotate(q, *cos_sin)
            k = rotate(k, *cos_sin)
        return q, gate, jnp.concatenate([k, v], 2)

    def _norm_over_heads(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """RMSNorm of q [T, K, G, H] and k [T, K, 1, H] over the heads of all ranks together."""
        both = [x.astype(jnp.float32) for x in (q, k)]
        squares = axis_sum(jnp.stack([(x * x).sum((1, 2, 3)) for x in both]), TP)  # [2, T]
        factors = jax.lax.rsqrt(squares / jnp.array(self.sizes)[:, None] + self.eps)
        weights = (self.q_norm[...], self.k_norm[...])
        q, k = (
            (x * factor[:, None, None, None] * weight).astype(q.dtype)
            for x, factor, weight in zip(both, factors, weights)
        )
        return q, k
