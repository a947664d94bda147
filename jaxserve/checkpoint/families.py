"""`FAMILIES`: a row for each supported architecture, with what its models have in common: specs of
a block's parts, fields of its config.json, names of its tensors.

A new architecture whose parts exist is a row here. A new kind of attention or MLP is a spec in
`checkpoint.specs` besides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jaxserve.checkpoint.fields import Fields
from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.model_paths import CheckpointError
from jaxserve.checkpoint.specs import AttentionSpec, Multipliers, NormSpec

# Stored tensor -> the parts of `weights.names` that are stacked in its rows. {layers}: number of
# the layer.
Tensors = Mapping[str, tuple[str, ...]]

_LAYER = "model.layers.{layers}."
_ATTENTION = _LAYER + "self_attn."
_MLP = _LAYER + "mlp."
_SHARED: Tensors = {
    "model.embed_tokens.weight": ("embed",),
    _ATTENTION + "o_proj.weight": ("o",),
    _ATTENTION + "q_norm.weight": ("q_norm",),
    _ATTENTION + "k_norm.weight": ("k_norm",),
    _MLP + "down_proj.weight": ("down",),
    "model.norm.weight": ("norm",),
    "lm_head.weight": ("head",),
}
_NORMS_BEFORE: Tensors = {
    _LAYER + "input_layernorm.weight": ("attn_norm",),
    _LAYER + "post_attention_layernorm.weight": ("mlp_norm",),
}
_NORMS_AFTER: Tensors = {
    _LAYER + "post_attention_layernorm.weight": ("attn_post_norm",),
    _LAYER + "post_feedforward_layernorm.weight": ("mlp_post_norm",),
}
_SPLIT: Tensors = {
    _ATTENTION + "q_proj.weight": ("q",),
    _ATTENTION + "k_proj.weight": ("k",),
    _ATTENTION + "v_proj.weight": ("v",),
    _ATTENTION + "q_proj.bias": ("q_bias",),
    _ATTENTION + "k_proj.bias": ("k_bias",),
    _ATTENTION + "v_proj.bias": ("v_bias",),
    _MLP + "gate_proj.weight": ("gate",),
    _MLP + "up_proj.weight": ("up",),
}
_FUSED: Tensors = {
    _ATTENTION + "qkv_proj.weight": ("q", "k", "v"),
    _MLP + "gate_up_proj.weight": ("gate", "up"),
}
LLAMA_TENSORS: Tensors = {**_SHARED, **_NORMS_BEFORE, **_SPLIT}


@dataclass(frozen=True)
class ConfigPart:
    """Fields of config.json that some families have, both ways: `read` adds them to a config,
    `write` gives them back."""

    read: Callable[[Fields, ModelConfig], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]


@dataclass(frozen=True)
class Family:
    """Models of one architecture.

    architecture: its name in config.json. gguf: its name in GGUF files, '' where these are not
    read. specs: fields of `ModelConfig` that all its models have. parts: fields of config.json
    beyond those of every family. allowed: fields that other families must leave at their default.
    max_len, rope_theta, norm_eps, kv_heads (None: the heads), head_dim (None: d_model / heads):
    values for configs that do not state them.
    """

    architecture: str
    gguf: str = ""
    specs: dict[str, Any] = field(default_factory=dict)
    parts: tuple[ConfigPart, ...] = ()
    tensors: Tensors = field(default_factory=lambda: LLAMA_TENSORS)
    allowed: frozenset[str] = frozenset()
    max_len: int = 32768
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    kv_heads: int | None = None
    head_dim: int | None = None

    @property
    def model_type(self) -> str:
        return self.architecture.removesuffix("ForCausalLM").lower()


def _read_mistral_windows(fields: Fields, model: ModelConfig) -> ModelConfig:
    """Reads a window for all layers or those that `layer_types` names; 4096 without the field."""
    if fields.fields.get("sliding_window", 4096) is None:
        return model
    return _with_windows(fields, model, fields.count("sliding_window", 4096), first=0)


def _read_qwen_windows(fields: Fields, model: ModelConfig) -> ModelConfig:
    """Reads a window that applies only with `use_sliding_window`, from `max_window_layers` on."""
    if not fields.fields.get("use_sliding_window", False):
        return model
    if fields.fields.get("sliding_window", 4096) is None:
        return model
    first = fields.count("max_window_layers", 28, low=0)
    return _with_windows(fields, model, fields.count("sliding_window", 4096), first)


def _with_windows(fields: Fields, model: ModelConfig, window: int, first: int) -> ModelConfig:
    """Adds a window in the layers of `layer_types`; without these, from `first` on."""
    types = fields.fields.get("layer_types")
    if types is None:
        marks = [layer >= first for layer in range(model.layers)]
    elif (
        isinstance(types, list)
        and len(types) == model.layers
        and set(types) <= {"sliding_attention", "full_attention"}
    ):
        marks = [kind == "sliding_attention" for kind in types]
    else:
        raise CheckpointError(
            "layer_types: must be sliding_attention or full_attention for each of "
            f"{model.layers} layers"
        )
    windows = tuple(window if mark else None for mark in marks)
    if len(set(windows)) == 1:
        windows = windows[:1]
    return replace(model, windows=windows)


def _write_windows(model: ModelConfig) -> dict[str, Any]:
    windows = [model.window(layer) for layer in range(model.layers)]
    return {
        "sliding_window": next((window for window in windows if window), None),
        "use_sliding_window": model.has_windows,
        "layer_types": ["sliding_attention" if w else "full_attention" for w in windows],
    }


def _read_phi_window(fields: Fields, model: ModelConfig) -> ModelConfig:
    """Reads a window for all layers; one that no sequence is longer than is none."""
    if fields.fields.get("sliding_window") is None:
        return model
    window = fields.count("sliding_window")
    return replace(model, windows=(window,)) if window < model.max_len else model


def _write_phi_window(model: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": model.window(0)}


def _read_multipliers(fields: Fields, model: ModelConfig) -> ModelConfig:
    return replace(
        model,
        mixers=(AttentionSpec(scale=fields.number("attention_multiplier", 1.0)),),
        multipliers=Multipliers(
            embedding=fields.number("embedding_multiplier", 1.0),
            residual=fields.number("residual_multiplier", 1.0),
            logits_divisor=fields.number("logits_scaling", 1.0),
        ),
    )


def _write_multipliers(model: ModelConfig) -> dict[str, Any]:
    return {
        "attention_multiplier": model.mixer(0).scale,
        "embedding_multiplier": model.multipliers.embedding,
        "residual_multiplier": model.multipliers.residual,
        "logits_scaling": model.multipliers.logits_divisor,
    }


_MISTRAL_WINDOWS = ConfigPart(_read_mistral_windows, _write_windows)
_QWEN_WINDOWS = ConfigPart(_read_qwen_windows, _write_windows)
_PHI_WINDOW = ConfigPart(_read_phi_window, _write_phi_window)
_MULTIPLIERS = ConfigPart(_read_multipliers, _write_multipliers)

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", gguf="llama", max_len=2048),
    "mistral": Family("MistralForCausalLM", parts=(_MISTRAL_WINDOWS,), max_len=131072, kv_heads=8),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        gguf="qwen2",
        specs=dict(mixers=(AttentionSpec(qkv_bias=True),), norms=NormSpec(eps=1e-6)),
        parts=(_QWEN_WINDOWS,),
        allowed=frozenset({"attention_bias"}),
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        gguf="qwen3",
        specs=dict(mixers=(AttentionSpec(qk_norm="head"),), norms=NormSpec(eps=1e-6)),
        parts=(_QWEN_WINDOWS,),
        head_dim=128,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        parts=(_PHI_WINDOW,),
        tensors={**_SHARED, **_NORMS_BEFORE, **_FUSED},
        allowed=frozenset({"partial_rotary_factor"}),
        max_len=4096,
        norm_eps=1e-5,
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        specs=dict(
            mixers=(AttentionSpec(qk_norm="all"),), norms=NormSpec(before=False, after=True)
        ),
        tensors={**_SHARED, **_NORMS_AFTER, **_SPLIT},
        max_len=2048,
        norm_eps=1e-5,
    ),
    "granite": Family(
        "GraniteForCausalLM",
        specs=dict(mixers=(AttentionSpec(scale=1.0),)),
        parts=(_MULTIPLIERS,),
        max_len=2048,
    ),
}
