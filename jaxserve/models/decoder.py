"""The decoder of every supported model (Llama, Mistral, Qwen, SmolLM), configured by `ModelConfig`.

A pipeline stage is a `Stage`: some layers, with the embedding in the first stage and the LM `Head`
beside the last. Every parameter is declared once, with logical axis names that `sharding.rules`
maps to mesh axes. Modules run on local arrays inside shard_map, so the shape of a weight, not the
config, says how many heads a device has. KV pages are never module state: a layer takes the pages
of its KV cache and returns them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.checkpoint.zoo import ModelConfig
from jaxserve.kernels import ops
from jaxserve.kernels.kv_pages import KVPages
from jaxserve.models.layers import rms_norm, rope_cos_sin, rotate, swiglu
from jaxserve.sharding.attention import attention
from jaxserve.sharding.mesh import TP, axis_sum
from jaxserve.sharding.page_moves import move_pages
from jaxserve.sharding.rows import Groups


@dataclasses.dataclass(frozen=True)
class Declared:
    """A parameter without values: its global shape and the logical axis name of each dimension
    (None: replicated)."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]


def _declare(shape: tuple[int, ...], axes: tuple[str | None, ...]) -> nnx.Param:
    return nnx.Param(jnp.zeros(shape), axes=axes)


class Layer(nnx.Module):
    """A transformer layer: pre-norm attention and gated MLP.

    `qkv` is one projection with the G query heads, key and value of each kv head side by side, so
    that splitting the kv heads over tensor-parallel ranks splits all three.
    """

    def __init__(self, config: ModelConfig, number: int):
        D = config.d_model
        K = config.kv_heads
        G = config.heads // config.kv_heads
        H = config.head_dim
        F = config.d_ff
        self.eps = config.norm_eps
        self.scale = H**-0.5
        self.window = (
            config.sliding_window
            if config.sliding_layers is None or config.sliding_layers[number]
            else None
        )
        self.attn_norm = _declare((D,), ("embed",))
        self.qkv = _declare((D, K, G + 2, H), ("embed", "kv_heads", None, None))
        if config.qkv_bias:
            self.qkv_bias = _declare((K, G + 2, H), ("kv_heads", None, None))
        if config.qk_norm:
            self.q_norm = _declare((H,), (None,))
            self.k_norm = _declare((H,), (None,))
        self.o_proj = _declare((K, G, H, D), ("kv_heads", None, None, "embed"))
        self.mlp_norm = _declare((D,), ("embed",))
        self.gate_up = _declare((D, 2, F), ("embed", None, "ffn"))
        self.down = _declare((F, D), ("ffn", "embed"))

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        cos_sin: tuple[jax.Array, jax.Array],
        groups: Groups,
        pages: KVPages,
    ):
        """Hidden states [T, D] at positions [T] (-1: padding) and this layer's KV pages (leading
        axis of 1) -> both, updated."""
        matmul = functools.partial(_matmul, positions=positions)
        q, kv = self._project(rms_norm(x, self.attn_norm[...], self.eps), positions, cos_sin)
        out, pages = attention(q, kv, pages, self.window, groups, self.scale)
        x = x + axis_sum(matmul(out.reshape(len(x), -1), self.o_proj, 3), TP)
        hidden = swiglu(matmul(rms_norm(x, self.mlp_norm[...], self.eps), self.gate_up, 1))
        return x + axis_sum(matmul(hidden, self.down, 1), TP), pages

    def _project(
        self, x: jax.Array, positions: jax.Array, cos_sin: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """Projects x [T, D] to q [T, K, G, H] and kv [T, K, 2, H], with RoPE on queries and
        keys."""
        qkv = _matmul(x, self.qkv, 1, positions)
        if hasattr(self, "qkv_bias"):
            qkv = qkv + self.qkv_bias[...]
        q, k, v = jnp.split(qkv, (qkv.shape[2] - 2, qkv.shape[2] - 1), 2)
        if hasattr(self, "q_norm"):
            q = rms_norm(q, self.q_norm[...], self.eps)
            k = rms_norm(k, self.k_norm[...], self.eps)
        return rotate(q, *cos_sin), jnp.concatenate([rotate(k, *cos_sin), v], 2)


class Stage(nnx.Module):
    """The layers of one pipeline stage; the first stage also has the token embedding."""

    def __init__(self, config: ModelConfig, layers: range, tp: int):
        if layers.start == 0:
            self.embed = _declare((padded_vocab(config, tp), config.d_model), ("vocab", "embed"))
        self.layers = nnx.List([Layer(config, number) for number in layers])

    def embed_tokens(self, tokens: jax.Array) -> jax.Array:
        """Looks up tokens [T] -> [T, D]. The vocabulary is split over tensor-parallel ranks."""
        rows = self.embed[...]
        mine = tokens - jax.lax.axis_index(TP) * len(rows)
        here = (mine >= 0) & (mine < len(rows))
        return axis_sum(jnp.where(here[:, None], rows[jnp.where(here, mine, 0)], 0), TP)


class Head(nnx.Module):
    """LM head: final norm and projection to the vocabulary.

    Tied models get a transposed copy of the embedding: it saves a transpose in every step, and with
    several stages the embedding and the head are on different devices anyway.
    """

    def __init__(self, config: ModelConfig, tp: int):
        self.eps = config.norm_eps
        self.norm = _declare((config.d_model,), ("embed",))
        self.head = _declare((config.d_model, padded_vocab(config, tp)), ("embed", "vocab"))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Hidden states x [T, D] -> this rank's slice of the logits, f32 [T, V / tp]."""
        return _matmul(self.normed(x), self.head, 1).astype(jnp.float32)

    def normed(self, x: jax.Array) -> jax.Array:
        """Hidden states [T, D] after the final norm, of which logits are made."""
        return rms_norm(x, self.norm[...], self.eps)


def padded_vocab(config: ModelConfig, tp: int) -> int:
    """Vocabulary size, rounded up to a multiple of `tp`."""
    return -(-config.vocab // tp) * tp


def stage_modules(config: ModelConfig, layers: range, tp: int) -> tuple[Stage, Head | None]:
    """Abstract modules (shapes, no values) of the stage with these layers; the head is None except
    in the last stage. `config` is after `with_tp`."""
    last = layers.stop == config.layers
    return nnx.eval_shape(lambda: (Stage(config, layers, tp), Head(config, tp) if last else None))


def declare(config: ModelConfig, layers: range, tp: int) -> dict[str, Declared]:
    """Declares the parameters of one stage by path, such as 'layers.3.qkv' (layers are numbered
    over the whole model). `config` is after `with_tp`."""
    stage, head = stage_modules(config, layers, tp)
    modules = (stage,) if head is None else (stage, head)
    return {
        path: Declared(tuple(param.shape), param.axes)
        for module in modules
        for path, param in parameters(module, layers.start)
    }


def parameters(module: nnx.Module, first_layer: int = 0) -> Iterator[tuple[str, nnx.Param]]:
    """Yields (path, parameter) in the order of the module's flattened state. first_layer: number of
    the stage's first layer."""
    for keys, param in nnx.to_flat_state(nnx.state(module)):
        yield ".".join(str(k + first_layer) if isinstance(k, int) else str(k) for k in keys), param


def run_layers(
    stage: Stage,
    config: ModelConfig,
    x: jax.Array,
    positions: jax.Array,
    groups: Groups,
    pages: list[KVPages],
    moves: jax.Array | None = None,
):
    """Runs hidden states x [T, D] at positions [T] (-1: padding) through the stage's layers.

    pages: KV pages, one pool per layer. moves [2, size, m]: pages to move between lanes before
    attention, as in `move_pages`; they do not depend on the hidden states, so the compiler may
    overlap them with the layers' matrix products (Tetris, section 4.1). Returns x and the pools.
    """
    cos_sin = rope_cos_sin(jnp.maximum(positions, 0), config)
    pages = list(pages) if moves is None else move_pages(pages, moves, groups.lanes)
    for i, layer in enumerate(stage.layers):
        x, pages[i] = _run_layer(*nnx.split(layer), x, positions, cos_sin, groups, pages[i])
    return x, pages


@functools.partial(jax.jit, static_argnums=0)
def _run_layer(
    graphdef: Any,
    state: Any,
    x: jax.Array,
    positions: jax.Array,
    cos_sin: tuple[jax.Array, jax.Array],
    groups: Groups,
    pages: KVPages,
):
    """Runs one layer. Jitted by itself so that layers with equal shapes are traced only once; the
    compiler inlines it."""
    return nnx.merge(graphdef, state)(x, positions, cos_sin, groups, pages)


def _matmul(
    x: jax.Array, weight: nnx.Param, inputs: int, positions: jax.Array | None = None
) -> jax.Array:
    """x [T, in] @ weight, whose first `inputs` dimensions are flattened to `in`; keeps the rest.
    positions [T]: of the rows (-1: padding); None: no row is padding."""
    w = weight[...]
    rows = 1
    for size in w.shape[:inputs]:
        rows *= size
    out = ops.linear(x, w.reshape(rows, -1), positions)
    return out.reshape(len(x), *w.shape[inputs:])
