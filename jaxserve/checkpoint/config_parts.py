"""Fields of config.json that some families have beyond those of all: how they are read to a
`ModelConfig`, and given back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jaxserve.checkpoint.fields import FULL, SLIDING, Fields
from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.model_paths import CheckpointError
from jaxserve.checkpoint.specs import AttentionSpec, Multipliers


@dataclass(frozen=True)
class ConfigPart:
    """Fields of config.json that some families have, both ways: `read` adds them to a config,
    `write` gives them back."""

    read: Callable[[Fields, ModelConfig], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]


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
    types = fields.layer_types(model.layers)
    if types is None:
        marks = [layer >= first for layer in range(model.layers)]
    else:
        marks = [kind == SLIDING for kind in types]
    windows = tuple(window if mark else None for mark in marks)
    if len(set(windows)) == 1:
        windows = windows[:1]
    return replace(model, windows=windows)


def _write_windows(model: ModelConfig) -> dict[str, Any]:
    windows = [model.window(layer) for layer in range(model.layers)]
    return {
        "sliding_window": next((window for window in windows if window), None),
        "use_sliding_window": model.has_windows,
        "layer_types": [SLIDING if w else FULL for w in windows],
    }


def _read_phi_window(fields: Fields, model: ModelConfig) -> ModelConfig:
    """Reads a window for all layers; one that no sequence is longer than is none."""
    if fields.fields.get("sliding_window") is None:
        return model
    window = fields.count("sliding_window")
    return replace(model, windows=(window,)) if window < model.max_len else model


def _write_phi_window(model: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": model.window(0)}


def _read_typed_windows(fields: Fields, model: ModelConfig) -> ModelConfig:
    """Reads a window in the layers that `layer_types` names, if there are any."""
    if fields.fields.get("sliding_window") is None:
        return model
    return _with_windows(fields, model, fields.count("sliding_window"), first=model.layers)


def _read_smollm_windows(fields: Fields, model: ModelConfig) -> ModelConfig:
    """Reads a window that applies only with `use_sliding_window`: in the layers that `layer_types`
    names, or else in those without positions."""
    if not fields.fields.get("use_sliding_window"):
        return model
    if fields.fields.get("layer_types") is None and fields.fields.get("sliding_window"):
        window = fields.count("sliding_window")
        ropes = [model.rope(layer) for layer in range(model.layers)]
        return replace(model, windows=tuple(None if rope else window for rope in ropes))
    return _read_typed_windows(fields, model)


def _read_positions(fields: Fields, model: ModelConfig) -> ModelConfig:
    """Reads which layers have RoPE: `no_rope_layers` has a 0 for those without, of which there is
    one in `no_rope_layer_interval` where the list is missing."""
    marks = fields.fields.get("no_rope_layers")
    if not marks:
        every = fields.count("no_rope_layer_interval", 4)
        marks = [int((layer + 1) % every != 0) for layer in range(model.layers)]
    if (
        not isinstance(marks, list)
        or len(marks) != model.layers
        or not all(mark in (0, 1) for mark in marks)
    ):
        raise CheckpointError(f"no_rope_layers: must be 0 or 1 for each of {model.layers} layers")
    if all(marks):
        return model
    ropes = tuple(model.rope(layer) if mark else None for layer, mark in enumerate(marks))
    return replace(model, ropes=ropes)


def _write_positions(model: ModelConfig) -> dict[str, Any]:
    return {"no_rope_layers": [int(model.rope(i) is not None) for i in range(model.layers)]}


def _read_gemma(fields: Fields, model: ModelConfig) -> ModelConfig:
    """Reads the scale of attention and both soft caps; embeddings are scaled by sqrt(d_model)."""
    softcap = fields.optional("attn_logit_softcapping") or 0.0
    return replace(
        with_mixers(model, scale=fields.number("query_pre_attn_scalar") ** -0.5, softcap=softcap),
        multipliers=gemma_multipliers(fields, model),
    )


def gemma_multipliers(fields: Fields, model: ModelConfig) -> Multipliers:
    """Reads the soft cap of the logits; embeddings are scaled by sqrt(d_model)."""
    softcap = fields.optional("final_logit_softcapping") or 0.0
    return Multipliers(embedding=model.d_model**0.5, logits_softcap=softcap)


def _write_gemma(model: ModelConfig) -> dict[str, Any]:
    attention = attention_of(model)
    assert attention.scale is not None
    return {
        "hidden_activation": model.mlp(0).activation,
        "query_pre_attn_scalar": round(attention.scale**-2, 6),
        "attn_logit_softcapping": attention.softcap or None,
        "final_logit_softcapping": model.multipliers.logits_softcap or None,
    }


def _read_bias(fields: Fields, model: ModelConfig) -> ModelConfig:
    """Reads `attention_bias`: of queries, keys and values."""
    return with_mixers(model, qkv_bias=bool(fields.fields.get("attention_bias")))


def _write_bias(model: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": attention_of(model).qkv_bias}


def _read_multipliers(fields: Fields, model: ModelConfig) -> ModelConfig:
    return replace(
        with_mixers(model, scale=fields.number("attention_multiplier", 1.0)),
        multipliers=Multipliers(
            embedding=fields.number("embedding_multiplier", 1.0),
            residual=fields.number("residual_multiplier", 1.0),
            logits_divisor=fields.number("logits_scaling", 1.0),
        ),
    )


def _write_multipliers(model: ModelConfig) -> dict[str, Any]:
    return {
        "attention_multiplier": attention_of(model).scale,
        "embedding_multiplier": model.multipliers.embedding,
        "residual_multiplier": model.multipliers.residual,
        "logits_scaling": model.multipliers.logits_divisor,
    }


def with_mixers(model: ModelConfig, **changes: Any) -> ModelConfig:
    """Returns the model with other fields of all its mixers."""
    return replace(model, mixers=tuple(replace(spec, **changes) for spec in model.mixers))


def attention_of(model: ModelConfig) -> AttentionSpec:
    """Returns the spec of the model's attention, which is one for all its layers with attention."""
    return next(spec for spec in model.mixers if isinstance(spec, AttentionSpec))


MISTRAL_WINDOWS = ConfigPart(_read_mistral_windows, _write_windows)
QWEN_WINDOWS = ConfigPart(_read_qwen_windows, _write_windows)
PHI_WINDOW = ConfigPart(_read_phi_window, _write_phi_window)
TYPED_WINDOWS = ConfigPart(_read_typed_windows, _write_windows)
SMOLLM_WINDOWS = ConfigPart(_read_smollm_windows, _write_windows)
POSITIONS = ConfigPart(_read_positions, _write_positions)
MULTIPLIERS = ConfigPart(_read_multipliers, _write_multipliers)
GEMMA = ConfigPart(_read_gemma, _write_gemma)
BIAS = ConfigPart(_read_bias, _write_bias)
