"""An EAGLE-3 draft head (Li et al., 2025), as pure functions: one layer of a decoder that sees, for
each token, its embedding and the features of the token before it.

Features are hidden states of the model at the position before, brought together by a product; of a
position that the model has not computed, the head's own output stands for them. Each sequence has a
place of fixed size: keys and values, and the features of its rows. Row r of a place is the token at
position `first + r` of the text, so keys are at row numbers: RoPE is relative.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.checkpoint.eagle import EagleConfig
from jaxserve.kernels import ops
from jaxserve.kernels.qkv import rms_norm, rotate
from jaxserve.models.layers import gated, rope_cos_sin


class EagleWeights(NamedTuple):
    """Weights of a head, or their shapes; matrices are [in, out]. ids: of the model, by those of
    the head."""

    embed: Any  # [V, D]
    fc: Any  # [3 D, D]
    embed_norm: Any  # [D]
    feature_norm: Any  # [D]
    qkv: Any  # [2 D, heads of queries, keys and values]
    o: Any
    mlp_norm: Any  # [D]
    gate_up: Any  # [D, 2 F]
    down: Any  # [F, D]
    norm: Any  # [D]
    head: Any  # [D, draft_vocab]
    ids: Any  # [draft_vocab] int32


class EaglePlaces(NamedTuple):
    """Arrays of all places, or their shapes."""

    keys: Any  # [places, capacity, K, H]
    values: Any  # as keys
    features: Any  # [places, capacity, D]


class EagleLayer:
    """The layer of a head, in a program whose attention reaches the first `reach` rows of a
    place."""

    def __init__(self, config: EagleConfig, weights: EagleWeights, reach: int):
        self._config = config
        self._weights = weights
        self._reach = reach

    def __call__(
        self,
        places: EaglePlaces,
        place: jax.Array,
        row: jax.Array,
        tokens: jax.Array,
        features: jax.Array,
    ) -> tuple[jax.Array, EaglePlaces]:
        """Computes rows: tokens [B, W] with features [B, W, D] at `row` [B, W] of a place [B]; rows
        past the capacity are padding. Returns hidden states [B, W, D] and the places with the keys
        and values of these rows."""
        config, weights = self._config, self._weights
        embedded = rms_norm(weights.embed[tokens], weights.embed_norm, config.eps)
        normed = rms_norm(features, weights.feature_norm, config.eps)
        residual = normed if config.norm_first else features
        heads = _product(jnp.concatenate([embedded, normed], -1), weights.qkv)
        q, k, v = self._heads(heads, row)
        at = place[:, None], row
        places = places._replace(
            keys=places.keys.at[at].set(k, mode="drop"),
            values=places.values.at[at].set(v, mode="drop"),
        )
        reached = (each[place, : self._reach] for each in (places.keys, places.values))
        attended = self._attend(q, row, *reached)
        x = residual + _product(attended, weights.o)
        hidden = _product(rms_norm(x, weights.mlp_norm, config.eps), weights.gate_up)
        shape = hidden.shape
        inner = gated(hidden.reshape(-1, 2, config.d_ff), "silu").reshape(*shape[:-1], -1)
        return x + _product(inner, weights.down), places

    def _heads(self, x: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Cuts x [B, W, heads] into queries [B, W, heads, H], keys and values [B, W, K, H], and
        turns queries and keys by their rows."""
        config = self._config
        x = x.reshape(-1, 1, config.heads + 2 * config.kv_heads, config.head_dim)
        turned = config.heads + config.kv_heads
        cos_sin = rope_cos_sin(row.reshape(-1), config.rope, config.head_dim, config.max_len)
        x = jnp.concatenate([rotate(x[:, :, :turned], *cos_sin), x[:, :, turned:]], 2)
        x = x.reshape(*row.shape, -1, config.head_dim)
        q, k, v = jnp.split(x, (config.heads, turned), 2)
        return q, k, v

    def _attend(
        self, q: jax.Array, row: jax.Array, keys: jax.Array, values: jax.Array
    ) -> jax.Array:
        """Attention of queries [B, W, heads, H] at `row` [B, W] to the rows up to theirs, of keys
        and values [B, reach, K, H]: [B, W, heads * H]."""
        B, W, heads, H = q.shape
        K = keys.shape[2]
        q = q.reshape(B, W, K, heads // K, H)
        scores = jnp.einsum("bwkgh,brkh->bkgwr", q, keys, preferred_element_type=jnp.float32)
        sees = jnp.arange(self._reach) <= row[:, :, None]
        scores = jnp.where(sees[:, None, None], scores * H**-0.5, -jnp.inf)
        shares = jax.nn.softmax(scores, -1).astype(values.dtype)
        return jnp.einsum("bkgwr,brkh->bwkgh", shares, values).reshape(B, W, -1)


def logits(weights: EagleWeights, x: jax.Array, eps: float) -> jax.Array:
    """Logits f32 [B, draft_vocab] behind hidden states x [B, D]."""
    return ops.linear(rms_norm(x, weights.norm, eps), weights.head).astype(jnp.float32)


def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [B, W, in] @ weight [in, out]."""
    return ops.linear(x.reshape(-1, x.shape[-1]), weight).reshape(*x.shape[:-1], -1)


def store(
    fc: jax.Array,
    places: EaglePlaces,
    captured: list[list[jax.Array]],
    place: jax.Array,
    row: jax.Array,
) -> EaglePlaces:
    """Makes features of captured hidden states, of each layer and lane [1, T, D]; writes them to
    places at `place` and `row` [lanes * T]; what is out of range is dropped."""
    x = jnp.concatenate([jnp.concatenate(lanes) for lanes in captured], -1)
    x = x.reshape(-1, x.shape[-1]).astype(fc.dtype) @ fc
    return places._replace(features=places.features.at[place, row].set(x, mode="drop"))


def slide(places: EaglePlaces, place: jax.Array, rows: jax.Array) -> EaglePlaces:
    """Moves the features of a place to the front by `rows`."""
    moved = jnp.roll(places.features[place], -rows, 0)
    return places._replace(features=places.features.at[place].set(moved))
