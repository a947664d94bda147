"""Attention with grouped queries."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.specs import AttentionSpec
from jaxserve.kernels.kv_pages import KVPages
from jaxserve.kernels.qkv import Projected, rms_norm
from jaxserve.models.parameters import create, matmul
from jaxserve.models.tokens import Tokens
from jaxserve.sharding.attend import Attend
from jaxserve.sharding.attention import attention
from jaxserve.sharding.mesh import TP, axis_sum
from jaxserve.sharding.rows import Groups, write_qkv


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
        sizes = model.at(layer)
        scale = spec.scale or sizes.head_dim**-0.5
        self.attend = Attend(scale, model.window(layer), spec.softcap)
        self.sizes = (sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim)
        create(self, spec.declare(sizes))

    def __call__(
        self,
        x: jax.Array,
        tokens: Tokens,
        cos_sin: tuple[jax.Array, jax.Array] | None,
        groups: Groups,
        pages: KVPages,
    ) -> tuple[jax.Array, KVPages]:
        """Hidden states [T, D] of tokens and this layer's KV pages (leading axis of 1) -> this
        rank's part of the output, and the pages with the new keys and values. cos_sin: None for a
        layer without positions."""
        qkv, gate = self._project(x, tokens, cos_sin)
        kv = None
        if self.spec.projected == "q":  # keys and values are on the pages of another layer
            q, _ = qkv.prepared()
        elif groups.spread:
            q, kv = qkv.prepared()
        else:
            q, pages = write_qkv(pages, qkv, groups)
        sinks = None
        if self.spec.sinks:
            sinks = self.sinks[...]
        out, pages = attention(q, kv, pages, groups, self.attend, sinks)
        if gate is not None:
            out = out * jax.nn.sigmoid(gate)
        out = matmul(out.reshape(len(x), -1), self.o_proj, 3, tokens)
        if self.spec.o_bias:
            out = out + jnp.where(jax.lax.axis_index(TP) == 0, self.o_bias[...], 0)
        return out, pages

    def _project(
        self,
        x: jax.Array,
        tokens: Tokens,
        cos_sin: tuple[jax.Array, jax.Array] | None,
    ) -> tuple[Projected, jax.Array | None]:
        """Projects x [T, D] to queries, keys and values, and the gate [T, K, G, H] of the queries,
        if there is one."""
        heads = matmul(x, self.qkv, 1, tokens)
        if self.spec.qkv_bias:
            heads = heads + self.qkv_bias[...]
        heads = self._with_keys_and_values(heads)
        group = heads.shape[2] - 2
        gate = None
        if self.spec.gate:
            group //= 2
            gate = heads[:, :, group:-2]
        norms = None
        if self.spec.qk_norm == "head":
            k_norm = self.k_norm if "k" in self.spec.projected else self.q_norm
            norms = self.q_norm[...], k_norm[...]
        elif self.spec.qk_norm == "all":
            heads = self._norm_over_heads(heads, group)
        return Projected(heads, group, norms, self.eps, cos_sin), gate

    def _with_keys_and_values(self, heads: jax.Array) -> jax.Array:
        """Returns heads [T, K, rows, H] of which the last two are keys and values, in any case."""
        missing = 3 - len(self.spec.projected)
        if missing:
            heads = jnp.concatenate([heads, *[heads[:, :, -1:]] * missing], 2)
        if not self.spec.value_norm:
            return heads
        values = rms_norm(heads[:, :, -1:], jnp.float32(1), self.eps)
        return jnp.concatenate([heads[:, :, :-1], values], 2)

    def _norm_over_heads(self, heads: jax.Array, group: int) -> jax.Array:
        """RMSNorm of the queries and of the keys in heads [T, K, G + 2, H] over all heads of all
        ranks together."""
        q, k, v = jnp.split(heads, (group, group + 1), 2)
        both = [x.astype(jnp.float32) for x in (q, k)]
        squares = axis_sum(jnp.stack([(x * x).sum((1, 2, 3)) for x in both]), TP)  # [2, T]
        factors = jax.lax.rsqrt(squares / jnp.array(self.sizes)[:, None] + self.eps)
        weights = (self.q_norm[...], self.k_norm[...])
        q, k = (
            (x * factor[:, None, None, None] * weight).astype(q.dtype)
            for x, factor, weight in zip(both, factors, weights)
        )
        return jnp.concatenate([q, k, v], 2)
