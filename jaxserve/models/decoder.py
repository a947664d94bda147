"""The one decoder: Llama, Mistral, Qwen and SmolLM are rows of `zoo.MODELS` that it reads.

A replica's stage is a `Stage`: some layers, with the embedding in the first and the `Head` beside
the last. Every parameter is declared once, with logical axis names; modules run on local arrays
inside shard_map, so a weight's shape, not the config, says how many heads are here. KV pages are
never module state: pages go into a layer with the rows of the step, and come out.
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
from jaxserve.kernels.kv_pages import KVPages
from jaxserve.models.layers import rms_norm, rope_cos_sin, rotate, swiglu
from jaxserve.sharding import attention as lanes
from jaxserve.sharding.mesh import TP, axis_sum
from jaxserve.sharding.page_moves import move_pages
from jaxserve.sharding.rows import Groups


@dataclasses.dataclass(frozen=True)
class Declared:
    """A parameter before it has values: its whole shape and the logical axis of each dimension."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]


def _declare(shape: tuple[int, ...], axes: tuple[str | None, ...]) -> nnx.Param:
    return nnx.Param(jnp.zeros(shape), axes=axes)


class Layer(nnx.Module):
    """Attention and gated MLP, each behind a norm. Query heads, key and value of a kv head lie side
    by side in one projection, so that a plain split over kv heads gives each rank its own."""

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
        self.norm1 = _declare((D,), ("embed",))
        self.qkv = _declare((D, K, G + 2, H), ("embed", "kv_heads", None, None))
        if config.qkv_bias:
            self.qkv_bias = _declare((K, G + 2, H), ("kv_heads", None, None))
        if config.qk_norm:
            self.q_norm = _declare((H,), (None,))
            self.k_norm = _declare((H,), (None,))
        self.o = _declare((K, G, H, D), ("kv_heads", None, None, "embed"))
        self.norm2 = _declare((D,), ("embed",))
        self.gate_up = _declare((D, 2, F), ("embed", None, "ffn"))
        self.down = _declare((F, D), ("ffn", "embed"))

    def __call__(
        self, x: jax.Array, turns: tuple[jax.Array, jax.Array], groups: Groups, pages: KVPages
    ):
        """x [T, D], pages with a first axis of 1 -> the same."""
        q, kv = self._project(rms_norm(x, self.norm1[...], self.eps), turns)
        out, pages = lanes.attention(q, kv, pages, self.window, groups, self.scale)
        x = x + axis_sum(_matmul(out.reshape(len(x), -1), self.o, 3), TP)
        hidden = swiglu(_matmul(rms_norm(x, self.norm2[...], self.eps), self.gate_up, 1))
        return x + axis_sum(_matmul(hidden, self.down, 1), TP), pages

    def _project(
        self, x: jax.Array, turns: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """x [T, D] -> q [T, K, G, H], kv [T, K, 2, H], with queries and keys rotated."""
        qkv = _matmul(x, self.qkv, 1)
        if hasattr(self, "qkv_bias"):
            qkv = qkv + self.qkv_bias[...]
        q, k, v = jnp.split(qkv, (qkv.shape[2] - 2, qkv.shape[2] - 1), 2)
        if hasattr(self, "q_norm"):
            q = rms_norm(q, self.q_norm[...], self.eps)
            k = rms_norm(k, self.k_norm[...], self.eps)
        return rotate(q, *turns), jnp.concatenate([rotate(k, *turns), v], 2)


class Stage(nnx.Module):
    """The layers of one stage, and the embedding where they are the first."""

    def __init__(self, config: ModelConfig, layers: range, tp: int):
        if layers.start == 0:
            self.embed = _declare((padded_vocab(config, tp), config.d_model), ("vocab", "embed"))
        self.layers = nnx.List([Layer(config, number) for number in layers])

    def embed_tokens(self, tokens: jax.Array) -> jax.Array:
        """tokens [T] -> [T, D]. Each rank holds a part of the vocabulary."""
        rows = self.embed[...]
        mine = tokens - jax.lax.axis_index(TP) * len(rows)
        here = (mine >= 0) & (mine < len(rows))
        return axis_sum(jnp.where(here[:, None], rows[jnp.where(here, mine, 0)], 0), TP)


class Head(nnx.Module):
    """Final norm and projection to the vocabulary. A tied model reads it from the embedding's
    tensor; the copy saves every step a transpose, and on more than one stage there are two copies
    anyway."""

    def __init__(self, config: ModelConfig, tp: int):
        self.eps = config.norm_eps
        self.norm = _declare((config.d_model,), ("embed",))
        self.head = _declare((config.d_model, padded_vocab(config, tp)), ("embed", "vocab"))

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [T, D] -> this rank's logits f32 [T, V / tp]."""
        return _matmul(rms_norm(x, self.norm[...], self.eps), self.head, 1).astype(jnp.float32)


def padded_vocab(config: ModelConfig, tp: int) -> int:
    """Vocabulary rounded up so that ranks get equal parts."""
    return -(-config.vocab // tp) * tp


def stage_modules(config: ModelConfig, layers: range, tp: int) -> tuple[Stage, Head | None]:
    """The modules of the stage with these layers of `config` (after `with_tp`), with shapes in
    place of values."""
    last = layers.stop == config.layers
    return nnx.eval_shape(lambda: (Stage(config, layers, tp), Head(config, tp) if last else None))


def declare(config: ModelConfig, layers: range, tp: int) -> dict[str, Declared]:
    """Parameters of one stage by path ('layers.3.qkv'; layer numbers are the model's). `config` is
    after `with_tp`."""
    stage, head = stage_modules(config, layers, tp)
    modules = (stage,) if head is None else (stage, head)
    return {
        path: Declared(tuple(param.shape), param.axes)
        for module in modules
        for path, param in parameters(module, layers.start)
    }


def parameters(module: nnx.Module, first_layer: int = 0) -> Iterator[tuple[str, nnx.Param]]:
    """(path, parameter) in the order of the module's flattened state."""
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
    """x [T, D] at positions [T] through the stage's layers; pages: one pool per layer. Returns x
    and the pools.

    moves [2, lanes, m], if any: pages that change lanes first. A layer's need nothing of the layer
    before, so they may move beside its linear parts (Tetris, section 4.1).
    """
    turns = rope_cos_sin(jnp.maximum(positions, 0), config)
    pages = list(pages) if moves is None else move_pages(pages, moves)
    for i, layer in enumerate(stage.layers):
        x, pages[i] = _run_layer(*nnx.split(layer), x, turns, groups, pages[i])
    return x, pages


@functools.partial(jax.jit, static_argnums=0)
def _run_layer(
    graphdef: Any,
    state: Any,
    x: jax.Array,
    turns: tuple[jax.Array, jax.Array],
    groups: Groups,
    pages: KVPages,
):
    """One layer. A function of its own, so that layers that differ in nothing but values are traced
    once; the compiler inlines it."""
    return nnx.merge(graphdef, state)(x, turns, groups, pages)


def _matmul(x: jax.Array, weight: nnx.Param, inputs: int) -> jax.Array:
    """x [T, in] by a weight whose first `inputs` dimensions are the inputs. One plain product of
    two matrices."""
    w = weight[...]
    rows = 1
    for size in w.shape[:inputs]:
        rows *= size
    out = x @ w.reshape(rows, -1)
    return out.reshape(len(x), *w.shape[inputs:])
