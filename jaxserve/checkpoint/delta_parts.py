"""Fields of config.json of Gated DeltaNet layers: how they are read to a `ModelConfig`, and given
back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.config_parts import ConfigPart
from jaxserve.checkpoint.delta_net import DeltaNetSpec
from jaxserve.checkpoint.fields import FULL, HYBRID_TYPES, LINEAR, Fields
from jaxserve.checkpoint.model import MixerSpec, ModelConfig
from jaxserve.checkpoint.model_paths import CheckpointError
from jaxserve.checkpoint.specs import AttentionSpec

_MOST_TAPS = 64


def _read_delta_net(fields: Fields, model: ModelConfig) -> ModelConfig:
    """Reads which layers are Gated DeltaNet ones, and their sizes; the others attend."""
    if fields.fields.get("attn_output_gate", True) is not True:
        raise CheckpointError("attn_output_gate: false is not supported: attention has a gate")
    key_heads = fields.count("linear_num_key_heads")
    value_heads = fields.count("linear_num_value_heads")
    if value_heads % key_heads:
        raise CheckpointError(
            f"linear_num_value_heads: {value_heads} is no multiple of {key_heads} key heads"
        )
    delta = DeltaNetSpec(
        key_heads,
        value_heads,
        fields.count("linear_key_head_dim"),
        fields.count("linear_value_head_dim"),
        fields.count("linear_conv_kernel_dim", low=2, high=_MOST_TAPS),
    )
    attention = AttentionSpec(qk_norm="head", gate=True)
    types = fields.layer_types(model.layers, HYBRID_TYPES)
    if types is None or FULL not in types:
        raise CheckpointError(f"layer_types: must have a layer with {FULL}")
    mixers: dict[str, MixerSpec] = {LINEAR: delta, FULL: attention}
    return replace(model, mixers=tuple(mixers[kind] for kind in types))


def _write_delta_net(model: ModelConfig) -> dict[str, Any]:
    mixers = [model.mixer(layer) for layer in range(model.layers)]
    written: dict[str, Any] = {
        "layer_types": [FULL if spec.has_pages else LINEAR for spec in mixers]
    }
    for spec in mixers:
        if isinstance(spec, DeltaNetSpec):
            written |= {
                "linear_num_key_heads": spec.key_heads,
                "linear_num_value_heads": spec.value_heads,
                "linear_key_head_dim": spec.key,
                "linear_value_head_dim": spec.value,
                "linear_conv_kernel_dim": spec.taps,
            }
    return written


DELTA_NET = ConfigPart(_read_delta_net, _write_delta_net)
