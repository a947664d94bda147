"""Fields of a Gemma 4 config.json: layers that see all tokens have heads of another size than those
with a window, the last layers may read the pages of others, and each may get a part of its input
by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.config_parts import ConfigPart, gemma_multipliers
from jaxserve.checkpoint.fields import FULL, SLIDING, Fields
from jaxserve.checkpoint.model import LayerSizes, ModelConfig
from jaxserve.checkpoint.model_paths import CheckpointError
from jaxserve.checkpoint.specs import (
    AttentionSpec,
    ExpertsBesideMlpSpec,
    LayerInputSpec,
    MlpSpec,
    RouterSpec,
)

ACTIVATION = "gelu_pytorch_tanh"
ATTENTION = AttentionSpec(qk_norm="head", scale=1.0, value_norm=True)
_MLP = MlpSpec(ACTIVATION)
_FULL_HEAD_DIM = 512


def _read(fields: Fields, model: ModelConfig) -> ModelConfig:
    given = fields.fields
    if given.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise CheckpointError(
            f"use_bidirectional_attention: {given['use_bidirectional_attention']!r} is not "
            "supported, only null and 'vision', with which tokens of text see those before them"
        )
    types = fields.layer_types(model.layers) or [FULL] * model.layers
    if types[-1] != FULL:
        raise CheckpointError(f"layer_types: the last one must be {FULL}")
    window = fields.count("sliding_window")
    shared = fields.count("num_kv_shared_layers", 0, low=0, high=model.layers - 1)
    first = model.layers - shared
    if not set(types[first:]) <= set(types[:first]):
        raise CheckpointError(
            f"num_kv_shared_layers: {shared} leave no layer of each kind that stores keys"
        )
    same = bool(given.get("attention_k_eq_v"))
    return replace(
        model,
        mixers=tuple(
            replace(ATTENTION, projected=_projected(layer >= first, same and kind == FULL))
            for layer, kind in enumerate(types)
        ),
        mlps=(_read_mlp(fields),),
        windows=tuple(window if kind == SLIDING else None for kind in types),
        layer_sizes=_read_sizes(fields, model, types, first),
        layer_input=_read_layer_input(fields, model),
        multipliers=gemma_multipliers(fields, model),
    )


def _projected(reads_others: bool, values_are_keys: bool) -> str:
    if reads_others:
        return "q"
    return "qk" if values_are_keys else "qkv"


def _read_sizes(
    fields: Fields, model: ModelConfig, types: Sequence[str], first: int
) -> tuple[LayerSizes, ...]:
    """Reads the sizes of each layer, from `per_layer_config` (transformers 5) or from the fields of
    layers that see all tokens (hubs). first: of the layers that read the pages of others."""
    by_layer = fields.fields.get("per_layer_config")
    if by_layer is not None and not isinstance(by_layer, dict):
        raise CheckpointError("per_layer_config: must be an object")
    full = LayerSizes(model.kv_heads, fields.count("global_head_dim", _FULL_HEAD_DIM), model.d_ff)
    if fields.fields.get("attention_k_eq_v"):
        kv_heads = fields.count("num_global_key_value_heads", model.kv_heads)
        full = replace(full, kv_heads=kv_heads)
    sliding = LayerSizes(model.kv_heads, model.head_dim, model.d_ff)
    wide = 1 + bool(fields.fields.get("use_double_wide_mlp"))
    found = []
    for layer, kind in enumerate(types):
        sizes = full if kind == FULL else sliding
        if by_layer is not None:
            sizes = _of_layer(by_layer.get(str(layer), {}), sliding, layer)
        if layer >= first:
            sizes = replace(sizes, d_ff=wide * sizes.d_ff)
        found.append(sizes)
    for sizes in found:
        if model.heads % sizes.kv_heads or sizes.head_dim % 2:
            raise CheckpointError(
                f"global_head_dim, num_global_key_value_heads: {model.heads} heads do not share "
                f"{sizes.kv_heads} of size {sizes.head_dim}"
            )
    return tuple(found)


def _of_layer(given: Any, sizes: LayerSizes, layer: int) -> LayerSizes:
    if not isinstance(given, dict):
        raise CheckpointError(f"per_layer_config: that of layer {layer} must be an object")
    fields = Fields(given)
    return replace(
        sizes,
        kv_heads=fields.count("num_key_value_heads", sizes.kv_heads),
        head_dim=fields.count("head_dim", sizes.head_dim),
    )


def _read_mlp(fields: Fields) -> MlpSpec | ExpertsBesideMlpSpec:
    if not fields.fields.get("enable_moe_block"):
        return _MLP
    count = fields.count("num_experts")
    active = fields.count("top_k_experts", high=count)
    size = fields.count("moe_intermediate_size")
    return ExpertsBesideMlpSpec(count, active, size, RouterSpec(), ACTIVATION, mlp=_MLP)


def _read_layer_input(fields: Fields, model: ModelConfig) -> LayerInputSpec | None:
    size = fields.count("hidden_size_per_layer_input", 256, low=0)
    if not size:
        return None
    vocab = fields.count("vocab_size_per_layer_input", model.vocab)
    if vocab != model.vocab:
        raise CheckpointError(
            f"vocab_size_per_layer_input: {vocab} is not supported, only vocab_size, {model.vocab}"
        )
    return LayerInputSpec(size, ACTIVATION)


def _write(model: ModelConfig) -> dict[str, Any]:
    types = [SLIDING if model.window(layer) else FULL for layer in range(model.layers)]
    full = model.layer_sizes[types.index(FULL)]
    mlp = model.mlp(0)
    written = {
        "hidden_activation": ACTIVATION,
        "layer_types": types,
        "sliding_window": next(filter(None, model.windows), 512),
        "global_head_dim": full.head_dim,
        "num_global_key_value_heads": full.kv_heads,
        "attention_k_eq_v": any(spec.projected == "qk" for spec in _attentions(model)),
        "num_kv_shared_layers": sum(spec.projected == "q" for spec in _attentions(model)),
        "use_double_wide_mlp": any(sizes.d_ff != model.d_ff for sizes in model.layer_sizes),
        "hidden_size_per_layer_input": model.layer_input.size if model.layer_input else 0,
        "vocab_size_per_layer_input": model.vocab,
        "final_logit_softcapping": model.multipliers.logits_softcap or None,
    }
    if isinstance(mlp, ExpertsBesideMlpSpec):
        written |= {
            "enable_moe_block": True,
            "num_experts": mlp.count,
            "top_k_experts": mlp.active,
            "moe_intermediate_size": mlp.d_ff,
        }
    return written


def _attentions(model: ModelConfig) -> list[AttentionSpec]:
    return [spec for spec in model.mixers if isinstance(spec, AttentionSpec)]


GEMMA4 = ConfigPart(_read, _write)
