"""The decoder of every supported model, configured by `ModelConfig`.

A pipeline stage is a `Stage`: some `Block`s, with the embedding in the first stage and the LM
`Head` beside the last. Modules of a block are chosen by the specs of its layer; parameters are
those that the specs declare, with logical axis names that `sharding.rules` maps to mesh axes.
Modules run on local arrays inside shard_map, so the shape of a weight, not the config, says how
many heads a device has. What a layer keeps of sequences, KV pages or states, is never module state:
a block takes it and returns it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.checkpoint.delta_net import DeltaNetSpec
from jaxserve.checkpoint.model import ModelConfig, declare
from jaxserve.checkpoint.page_groups import PagePlace
from jaxserve.checkpoint.rope import Rope
from jaxserve.checkpoint.specs import (
    AttentionSpec,
    Declared,
    ExpertsSpec,
    LatentAttentionSpec,
    MlpSpec,
)
from jaxserve.kernels import ops
from jaxserve.kernels.kv_pages import KVPages
from jaxserve.kernels.qkv import rms_norm
from jaxserve.kernels.quantised import Quantised
from jaxserve.models.attention import Attention
from jaxserve.models.deltanet import GatedDeltaNet, States
from jaxserve.models.experts import Experts
from jaxserve.models.latent import LatentAttention
from jaxserve.models.layers import capped, rope_cos_sin
from jaxserve.models.mlp import GatedMlp
from jaxserve.models.parameters import create, matmul
from jaxserve.sharding.mesh import TP, axis_sum
from jaxserve.sharding.page_moves import move_pages
from jaxserve.sharding.rows import Groups

# modules by spec
MIXERS = {
    AttentionSpec: Attention,
    LatentAttentionSpec: LatentAttention,
    DeltaNetSpec: GatedDeltaNet,
}
MLPS = {MlpSpec: GatedMlp, ExpertsSpec: Experts}
LayerCache = KVPages | States  # what a layer keeps of sequences


class Block(nnx.Module):
    """A layer: attention and MLP, or what its specs have in their places, each with norms and added
    to the residual."""

    attn_norm: nnx.Param
    attn_post_norm: nnx.Param
    mlp_norm: nnx.Param
    mlp_post_norm: nnx.Param

    def __init__(self, model: ModelConfig, layer: int):
        self.norms = model.norms
        self.residual = model.multipliers.residual
        create(self, model.norms.declare(model))
        self.rope = model.rope(layer)
        self.attention = MIXERS[type(model.mixer(layer))](model, layer)
        self.mlp = MLPS[type(model.mlp(layer))](model, layer)

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        cos_sin: tuple[jax.Array, jax.Array] | None,
        groups: Groups,
        cache: LayerCache,
    ) -> tuple[jax.Array, LayerCache]:
        """Hidden states [T, D] at positions [T] (-1: padding) and this layer's KV pages or states
        (leading axis of 1) -> both, updated."""
        h = x
        if self.norms.before:
            h = rms_norm(x, self.attn_norm[...], self.norms.eps)
        out, cache = self.attention(h, positions, cos_sin, groups, cache)
        out = axis_sum(out, TP)
        if self.norms.after:
            out = rms_norm(out, self.attn_post_norm[...], self.norms.eps)
        x = h = x + _scaled(out, self.residual)
        if self.norms.before:
            h = rms_norm(x, self.mlp_norm[...], self.norms.eps)
        out = axis_sum(self.mlp(h, positions), TP)
        if self.norms.after:
            out = rms_norm(out, self.mlp_post_norm[...], self.norms.eps)
        return x + _scaled(out, self.residual), cache


class Stage(nnx.Module):
    """The layers of one pipeline stage; the first stage also has the token embedding."""

    embed: nnx.Param

    def __init__(self, model: ModelConfig, layers: range, tp: int):
        self.is_first = layers.start == 0
        self.multiplier = model.multipliers.embedding
        create(self, _among(declare(model, layers, tp), ("embed",)))
        self.layers = nnx.List([Block(model, number) for number in layers])

    def embed_tokens(self, tokens: jax.Array) -> jax.Array:
        """Looks up tokens [T] -> [T, D]. The vocabulary is split over tensor-parallel ranks."""
        table = self.embed.get_value()
        count = table.outputs if isinstance(table, Quantised) else len(table)
        mine = tokens - jax.lax.axis_index(TP) * count
        is_local = (mine >= 0) & (mine < count)
        vectors = ops.rows(table, jnp.where(is_local, mine, 0))
        vectors = jnp.where(is_local[:, None], vectors, 0)
        return _scaled(axis_sum(vectors, TP), self.multiplier)


class Head(nnx.Module):
    """LM head: final norm and projection to the vocabulary.

    Tied models get a transposed copy of the embedding: it saves a transpose in every step, and with
    several stages the embedding and the head are on different devices anyway. One that stays
    quantised is the embedding itself.
    """

    norm: nnx.Param
    head: nnx.Param

    def __init__(self, model: ModelConfig, tp: int):
        self.eps = model.norms.eps
        self.multiplier = 1 / model.multipliers.logits_divisor
        self.softcap = model.multipliers.logits_softcap
        last = range(model.layers - 1, model.layers)
        create(self, _among(declare(model, last, tp), ("norm", "head")))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Hidden states x [T, D] -> this rank's slice of the logits, f32 [T, V / tp]."""
        logits = matmul(self.normed(x), self.head, 1).astype(jnp.float32)
        return capped(_scaled(logits, self.multiplier), self.softcap)

    def normed(self, x: jax.Array) -> jax.Array:
        """Normalises hidden states [T, D] for the projection to logits."""
        return rms_norm(x, self.norm[...], self.eps)


def stage_modules(model: ModelConfig, layers: range, tp: int) -> tuple[Stage, Head | None]:
    """Abstract modules (shapes, no values) of the stage with these layers; the head is None except
    in the last stage. model: after `with_tp`. Their parameters are those of `declare`."""
    last = layers.stop == model.layers
    return nnx.eval_shape(lambda: (Stage(model, layers, tp), Head(model, tp) if last else None))


def parameters(module: nnx.Module, first_layer: int = 0) -> Iterator[tuple[str, nnx.Param]]:
    """Yields (path, parameter) in the order of the module's flattened state. first_layer: number of
    the stage's first layer."""
    for keys, param in nnx.to_flat_state(nnx.state(module)):
        yield ".".join(str(k + first_layer) if isinstance(k, int) else str(k) for k in keys), param


def run_layers(
    stage: Stage,
    model: ModelConfig,
    x: jax.Array,
    positions: jax.Array,
    groups: Sequence[Groups],
    caches: list[LayerCache],
    places: Sequence[PagePlace],
    moves: jax.Array | None = None,
):
    """Runs hidden states x [T, D] at positions [T] (-1: padding) through the stage's layers.

    groups: the rows by page group. caches: pools of KV pages, and states. places: of each layer the
    page group and the number of its cache. moves [2, size, m]: pages to move between lanes before
    attention, as in `move_pages`. Those of a cache are issued beside the layer before the first
    that has it, on which they do not depend: in the order in which layers need them, and no
    earlier, so that only one cache's are under way (Tetris, section 4.1). Returns x and the caches.
    """
    clipped = jnp.maximum(positions, 0)
    cos_sin: dict[Rope | None, tuple[jax.Array, jax.Array]] = {
        rope: rope_cos_sin(clipped, rope, model.head_dim, model.max_len)
        for rope in dict.fromkeys(block.rope for block in stage.layers)
        if rope is not None
    }
    caches = list(caches)
    numbers = [place.pool for place in places]
    if moves is not None:
        caches[numbers[0]] = move_pages(caches[numbers[0]], moves, groups[0].lanes)
    for i, (block, (group, number)) in enumerate(zip(stage.layers, places)):
        following = numbers[i + 1 : i + 2]
        if moves is not None and not set(following) <= set(numbers[: i + 1]):
            x, moves = jax.lax.optimization_barrier((x, moves))  # not before x is there
            caches[following[0]] = move_pages(caches[following[0]], moves, groups[0].lanes)
        table = cos_sin.get(block.rope)
        x, caches[number] = _run_block(
            *nnx.split(block), x, positions, table, groups[group], caches[number]
        )
    return x, caches


@functools.partial(jax.jit, static_argnums=0)
def _run_block(
    graphdef: Any,
    state: Any,
    x: jax.Array,
    positions: jax.Array,
    cos_sin: tuple[jax.Array, jax.Array] | None,
    groups: Groups,
    cache: LayerCache,
):
    """Runs one block. Jitted by itself so that equal blocks are traced only once; the compiler
    inlines it."""
    return nnx.merge(graphdef, state)(x, positions, cos_sin, groups, cache)


def _scaled(x: jax.Array, factor: float) -> jax.Array:
    if factor == 1.0:
        return x
    return x * factor


def _among(declared: Mapping[str, Declared], names: tuple[str, ...]) -> dict[str, Declared]:
    return {name: declared[name] for name in names if name in declared}
