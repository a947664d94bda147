"""Multi-head latent attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.specs import LatentAttentionSpec
from jaxserve.kernels.kv_pages import KVPages
from jaxserve.kernels.qkv import rms_norm, rotate
from jaxserve.models.parameters import create, matmul
from jaxserve.models.tokens import Tokens
from jaxserve.sharding.attend import Attend
from jaxserve.sharding.attention import attention
from jaxserve.sharding.rows import Groups

EPS = 1e-6  # of the norms of latents, whatever that of the layers is


class LatentAttention(nnx.Module):
    """Latent attention over the KV pages of a layer; parameters: see `LatentAttentionSpec`."""

    q_a: nnx.Param
    q_a_norm: nnx.Param
    q_b: nnx.Param
    kv_a: nnx.Param
    kv_a_norm: nnx.Param
    k_up: nnx.Param
    v_up: nnx.Param
    o_proj: nnx.Param

    def __init__(self, model: ModelConfig, layer: int):
        spec = model.mixer(layer)
        assert isinstance(spec, LatentAttentionSpec)
        self.spec = spec
        self.attend = Attend(spec.scale, model.window(layer), value_dim=spec.kv_rank)
        create(self, spec.declare(model))

    def __call__(
        self,
        x: jax.Array,
        tokens: Tokens,
        cos_sin: tuple[jax.Array, jax.Array],
        groups: Groups,
        pages: KVPages,
    ) -> tuple[jax.Array, KVPages]:
        """Hidden states [T, D] of tokens and this layer's KV pages (leading axis of 1) -> this
        rank's part of the output, and the pages with the new latents."""
        q = self._queries(x, tokens, cos_sin)
        kv = matmul(x, self.kv_a, 1, tokens)[:, None, None]  # [T, 1, 1, kv_rank + rotated]
        latent, key = jnp.split(kv, [self.spec.kv_rank], -1)
        latent = rms_norm(latent, self.kv_a_norm[...], EPS)
        kv = jnp.concatenate([latent, rotate(key, *cos_sin)], -1)
        out, pages = attention(q, kv, pages, groups, self.attend)  # [T, K, G, kv_rank]
        out = jnp.einsum("tkgr,kgrv->tkgv", out, self.v_up[...])
        return matmul(out.reshape(len(x), -1), self.o_proj, 3, tokens), pages

    def _queries(
        self, x: jax.Array, tokens: Tokens, cos_sin: tuple[jax.Array, jax.Array]
    ) -> jax.Array:
        """Queries [T, K, G, kv_rank + rotated], for latents and for rotated keys."""
        if self.spec.q_rank is not None:
            x = rms_norm(matmul(x, self.q_a, 1, tokens), self.q_a_norm[...], EPS)
        plain, rotated = jnp.split(matmul(x, self.q_b, 1, tokens), [self.spec.plain], -1)
        plain = jnp.einsum("tkgn,kgnr->tkgr", plain, self.k_up[...])
        return jnp.concatenate([plain, rotate(rotated, *cos_sin)], -1)
