"""A plain Llama model over whole padded sequences, and the parts of its layers, for the training of
an EAGLE head. Weights have the names and the layout of Hugging Face, behind a prefix."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Weights = dict[str, Any]


class Sizes(NamedTuple):
    """Sizes of a model that do not follow from the shapes of its weights."""

    layers: int
    head_dim: int
    epsilon: float
    theta: float

    @classmethod
    def of(cls, config: dict[str, Any]) -> Sizes:
        """Takes them from a config.json."""
        names = ("num_hidden_layers", "head_dim", "rms_norm_eps", "rope_theta")
        return cls(*(config[name] for name in names))

    @property
    def captured(self) -> tuple[int, ...]:
        """Layers before which hidden states are features."""
        return 2, self.layers // 2, self.layers - 3


def norm(x: Any, weight: Any, sizes: Sizes) -> Any:
    """Computes the RMS norm."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + sizes.epsilon) * weight


def projected(
    x: Any, weights: Weights, prefix: str, positions: Any, sizes: Sizes
) -> tuple[Any, Any, Any]:
    """Returns queries, keys and values [sequences, length, heads, head_dim], the first two turned
    by RoPE. positions: of the rows, for each sequence or for all."""
    queries, keys, values = (
        (x @ weights[f"{prefix}self_attn.{name}_proj.weight"].T).reshape(
            *x.shape[:2], -1, sizes.head_dim
        )
        for name in "qkv"
    )
    half = sizes.head_dim // 2
    speeds = sizes.theta ** (-jnp.arange(half) / half)
    angles = positions[..., None, None] * speeds
    return _turned(queries, angles), _turned(keys, angles), values


def _turned(x: Any, angles: Any) -> Any:
    """Turns the halves of each head against each other."""
    low, high = jnp.split(x, 2, axis=-1)
    cos = jnp.cos(angles)
    sin = jnp.sin(angles)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


def attend(queries: Any, rows: Any, kept: Sequence[Sequence[Any]]) -> Any:
    """Computes attention over the first of the kept keys and values, of rows up to a query's own,
    and over the later ones of that row alone. rows [sequences or 1, queries]: of the queries."""
    (keys, values), *later = kept
    sequences, length, groups, width = keys.shape
    queries = queries.reshape(*queries.shape[:2], groups, -1, width) * width**-0.5
    scores = jnp.einsum("btgrd,bsgd->bgrts", queries, keys)
    seen = rows[:, None, None, :, None] >= jnp.arange(length)
    scores = jnp.where(seen, scores, -jnp.inf)
    own = [jnp.einsum("btgrd,btgd->bgrt", queries, each)[..., None] for each, _ in later]
    shares = jax.nn.softmax(jnp.concatenate([scores, *own], -1))
    out = jnp.einsum("bgrts,bsgd->btgrd", shares[..., :length], values)
    for place, (_, each) in enumerate(later, length):
        out += jnp.einsum("bgrt,btgd->btgrd", shares[..., place], each)
    return out.reshape(sequences, queries.shape[1], -1)


def window(x: Any, rows: Any) -> Any:
    """Takes some rows [sequences, rows] of each sequence."""
    return jnp.take_along_axis(x, jnp.expand_dims(rows, tuple(range(2, x.ndim))), 1)


def ahead(x: Any, rows: int) -> Any:
    """Returns for each row what is `rows` rows further on in its sequence, 0 behind the end."""
    return jnp.concatenate([x[:, rows:], jnp.zeros_like(x[:, :rows])], 1)


def mlp(x: Any, weights: Weights, prefix: str, sizes: Sizes) -> Any:
    """Computes the norm and the gated MLP behind it."""
    gate, up, down = (weights[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    x = norm(x, weights[f"{prefix}post_attention_layernorm.weight"], sizes)
    return (jax.nn.silu(x @ gate.T) * (x @ up.T)) @ down.T


def stacked(tensors: Weights, sizes: Sizes) -> Weights:
    """Returns the model's weights, with those of all layers in one array [layers, ...] by name."""
    first = "model.layers.0."
    names = [name.removeprefix(first) for name in tensors if name.startswith(first)]
    return {
        "embedding": jnp.asarray(tensors["model.embed_tokens.weight"]),
        "norm": jnp.asarray(tensors["model.norm.weight"]),
        "layers": {
            name: jnp.stack([tensors[f"model.layers.{at}.{name}"] for at in range(sizes.layers)])
            for name in names
        },
    }


@functools.partial(jax.jit, static_argnames="sizes")
def read(model: Weights, ids: Any, rows: Any, sizes: Sizes) -> tuple[Any, Any, Any]:
    """Runs the model over sequences; returns the features of all tokens, and of some rows what the
    LM head gets, and the likeliest next tokens."""
    places = jnp.arange(ids.shape[1])

    def layer(x: Any, weights: Weights) -> tuple[Any, Any]:
        inner = norm(x, weights["input_layernorm.weight"], sizes)
        queries, *kept = projected(inner, weights, "", places, sizes)
        mixed = attend(queries, places[None], [kept]) @ weights["self_attn.o_proj.weight"].T
        return x + mixed + mlp(x + mixed, weights, "", sizes), x

    x, inputs = jax.lax.scan(layer, model["embedding"][ids], model["layers"])
    features = [inputs[at] for at in sizes.captured]
    hidden = norm(window(x, rows), model["norm"], sizes)
    best = jnp.argmax(hidden @ model["embedding"].T, -1)
    return jnp.concatenate(features, -1), hidden, best
