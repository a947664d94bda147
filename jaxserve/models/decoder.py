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
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.checkpoint.delta_net import DeltaNetSpec
from jaxserve.checkpoint.model import ModelConfig, declare, padded_vocab
from jaxserve.checkpoint.page_groups import PagePlace
from jaxserve.checkpoint.rope import Rope
from jaxserve.checkpoint.specs import (
    AttentionSpec,
    Declared,
    ExpertsBesideMlpSpec,
    ExpertsSpec,
    LatentAttentionSpec,
    MlpSpec,
)
from jaxserve.kernels.kv_pages import KVPages
from jaxserve.kernels.qkv import rms_norm
from jaxserve.models.attention import Attention
from jaxserve.models.deltanet import GatedDeltaNet, States
from jaxserve.models.experts import Experts, ExpertsBesideMlp
from jaxserve.models.latent import LatentAttention
from jaxserve.models.layer_input import LayerInput, LayerInputs
from jaxserve.models.layers import capped, rope_cos_sin
from jaxserve.models.mlp import GatedMlp
from jaxserve.models.parameters import create, look_up, matmul
from jaxserve.models.tokens import Tokens
from jaxserve.sharding.mesh import TP, axis_sum
from jaxserve.sharding.page_moves import move_pages
from jaxserve.sharding.rows import Groups

# modules by spec
MIXERS = {
    AttentionSpec: Attention,
    LatentAttentionSpec: LatentAttention,
    DeltaNetSpec: GatedDeltaNet,
}
MLPS = {MlpSpec: GatedMlp, ExpertsSpec: Experts, ExpertsBesideMlpSpec: ExpertsBesideMlp}
LayerCache = KVPages | States  # what a layer keeps of sequences


class Block(nnx.Module):
    """A layer: attention and MLP, or what its specs have in their places, each with norms and added
    to the residual."""

    attn_norm: nnx.Param
    attn_post_norm: nnx.Param
    mlp_norm: nnx.Param
    mlp_post_norm: nnx.Param
    layer_scalar: nnx.Param

    def __init__(self, model: ModelConfig, layer: int):
        self.norms = model.norms
        self.residual = model.multipliers.residual
        create(self, model.norms.declare(model))
        self.rope = model.rope(layer)
        self.head_dim = model.at(layer).head_dim
        self.attention = MIXERS[type(model.mixer(layer))](model, layer)
        self.mlp = MLPS[type(model.mlp(layer))](model, layer)
        self.input: LayerInput | None = nnx.data(None)
        if model.layer_input is not None:
            self.input = LayerInput(model)

    def __call__(
        self,
        x: jax.Array,
        tokens: Tokens,
        cos_sin: tuple[jax.Array, jax.Array] | None,
        groups: Groups,
        cache: LayerCache,
        layer_input: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        """Hidden states [T, D] of tokens and this layer's KV pages or states (leading axis of 1)
        -> both, updated. layer_input: see `LayerInput`."""
        h = x
        if self.norms.before:
            h = rms_norm(x, self.attn_norm[...], self.norms.eps)
        out, cache = self.attention(h, tokens, cos_sin, groups, cache)
        out = axis_sum(out, TP)
        if self.norms.after:
            out = rms_norm(out, self.attn_post_norm[...], self.norms.eps)
        x = x + _scaled(out, self.residual)
        out = self._feed_forward(x, tokens)
        if self.norms.after:
            out = rms_norm(out, self.mlp_post_norm[...], self.norms.eps)
        x = x + _scaled(out, self.residual)
        if self.input is not None:
            assert layer_input is not None
            x = x + self.input(x, layer_input)
        if self.norms.scalar:
            x = (x * self.layer_scalar[...]).astype(x.dtype)
        return x, cache

    def _feed_forward(self, x: jax.Array, tokens: Tokens) -> jax.Array:
        """Computes the MLP or the experts of hidden states x [T, D], of all ranks."""
        h = x
        if self.norms.before:
            h = rms_norm(x, self.mlp_norm[...], self.norms.eps)
        if isinstance(self.mlp, ExpertsBesideMlp):
            return self.mlp.joined(x, h, tokens)
        return axis_sum(self.mlp(h, tokens), TP)


class Stage(nnx.Module):
    """The layers of one pipeline stage; the first stage also has the token embedding, and what
    `LayerInputs` are made of."""

    embed: nnx.Param

    def __init__(self, model: ModelConfig, layers: range, tp: int, captured: Collection[int] = ()):
        """captured: layers before which hidden states are kept for a draft head; the number of all
        layers: behind the last."""
        self.is_first = layers.start == 0
        ends = layers.stop + (layers.stop == model.layers)
        borders = range(layers.start, ends)
        self.captured = tuple(i for i, layer in enumerate(borders) if layer in captured)
        self.multiplier = model.multipliers.embedding
        self.max_len = model.max_len
        self.has_sizes = bool(model.layer_sizes)  # of layers
        create(self, _among(declare(model, layers, tp), ("embed",)))
        self.inputs: LayerInputs | None = nnx.data(None)
        if self.is_first and model.layer_input is not None:
            self.inputs = LayerInputs(model, padded_vocab(model, tp))
        self.layers = nnx.List([Block(model, number) for number in layers])

    def embed_tokens(self, tokens: jax.Array) -> jax.Array:
        """Looks up tokens [T] -> [T, D]."""
        return _scaled(look_up(self.embed, tokens), self.multiplier)


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


def stage_modules(
    model: ModelConfig, layers: range, tp: int, captured: Collection[int] = ()
) -> tuple[Stage, Head | None]:
    """Abstract modules (shapes, no values) of the stage with these layers; the head is None except
    in the last stage. model: after `with_tp`. captured: see `Stage`. Their parameters are those of
    `declare`."""
    last = layers.stop == model.layers
    return nnx.eval_shape(
        lambda: (Stage(model, layers, tp, captured), Head(model, tp) if last else None)
    )


def parameters(module: nnx.Module, first_layer: int = 0) -> Iterator[tuple[str, nnx.Param]]:
    """Yields (path, parameter) in the order of the module's flattened state. first_layer: number of
    the stage's first layer."""
    for keys, param in nnx.to_flat_state(nnx.state(module)):
        yield ".".join(str(k + first_layer) if isinstance(k, int) else str(k) for k in keys), param


def run_layers(
    stage: Stage,
    x: jax.Array,
    tokens: Tokens,
    groups: Sequence[Groups],
    caches: list[LayerCache],
    places: Sequence[PagePlace],
    moves: jax.Array | None = None,
    inputs: jax.Array | None = None,
) -> tuple[jax.Array, list[LayerCache], list[jax.Array]]:
    """Runs hidden states x [T, D] of tokens through the stage's layers.

    groups: the rows by page group. caches: pools of KV pages, and states. places: of each layer the
    page group and the number of its cache. moves [2, size, m]: pages to move between lanes before
    attention, as in `move_pages`. Those of a cache are issued beside the layer before the first
    that has it, on which they do not depend: in the order in which layers need them, and no
    earlier, so that only one cache's are under way (Tetris, section 4.1). inputs [T, layers, P]:
    see `LayerInputs`. Returns x, the caches, and the hidden states before each captured layer.
    """
    clipped = jnp.maximum(tokens.positions, 0)
    cos_sin: dict[tuple[Rope | None, int], tuple[jax.Array, jax.Array]] = {
        (rope, size): rope_cos_sin(clipped, rope, size, stage.max_len)
        for rope, size in dict.fromkeys((block.rope, block.head_dim) for block in stage.layers)
        if rope is not None
    }
    of_part = {
        place: groups[place.group].on_part(place.part, place.parts)
        for place in dict.fromkeys(places)
    }
    caches = list(caches)
    numbers = [place.pool for place in places]
    if moves is not None:
        caches[numbers[0]] = move_pages(caches[numbers[0]], moves, groups[0].lanes)
    seen = []
    for i, (block, place) in enumerate(zip(stage.layers, places)):
        if i in stage.captured:
            seen.append(x)
        following = numbers[i + 1 : i + 2]
        if moves is not None and not set(following) <= set(numbers[: i + 1]):
            x, moves = jax.lax.optimization_barrier((x, moves))  # not before x is there
            caches[following[0]] = move_pages(caches[following[0]], moves, groups[0].lanes)
        table = cos_sin.get((block.rope, block.head_dim))
        pool = caches[place.pool]
        cache = pool
        if isinstance(pool, KVPages) and stage.has_sizes:
            cache = _as_parts(pool, place.parts, block.head_dim)
        given = None if inputs is None else inputs[:, i]
        x, cache = _run_block(*nnx.split(block), x, tokens, table, of_part[place], cache, given)
        caches[place.pool] = jax.tree.map(lambda new, old: new.reshape(old.shape), cache, pool)
    if len(stage.layers) in stage.captured:
        seen.append(x)
    return x, caches, seen


def _as_parts(pool: KVPages, parts: int, head_dim: int) -> KVPages:
    """Returns a pool [1, P, K, V, C, H] as one of pages that are equal parts of its own, with heads
    of another size: [1, P * parts, ..., V, C, head_dim]. No byte moves."""
    one, pages, heads, vectors, tokens, size = pool.kv.shape
    heads = heads * size // (parts * head_dim)
    return KVPages(pool.kv.reshape(one, pages * parts, heads, vectors, tokens, head_dim))


@functools.partial(jax.jit, static_argnums=0)
def _run_block(
    graphdef: Any,
    state: Any,
    x: jax.Array,
    tokens: Tokens,
    cos_sin: tuple[jax.Array, jax.Array] | None,
    groups: Groups,
    cache: LayerCache,
    layer_input: jax.Array | None,
):
    """Runs one block. Jitted by itself so that equal blocks are traced only once; the compiler
    inlines it."""
    return nnx.merge(graphdef, state)(x, tokens, cos_sin, groups, cache, layer_input)


def _scaled(x: jax.Array, factor: float) -> jax.Array:
    if factor == 1.0:
        return x
    return x * factor


def _among(declared: Mapping[str, Declared], names: tuple[str, ...]) -> dict[str, Declared]:
    return {name: declared[name] for name in names if name in declared}
