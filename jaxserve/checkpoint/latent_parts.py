"""Fields of config.json of DeepSeek's models: latent attention and experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.config_parts import ConfigPart
from jaxserve.checkpoint.expert_parts import (
    experts_of,
    grouped_sigmoid,
    with_shared_experts,
    write_shared_experts,
)
from jaxserve.checkpoint.fields import Fields
from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.model_paths import CheckpointError
from jaxserve.checkpoint.rope import Rope, yarn_magnitude
from jaxserve.checkpoint.specs import LatentAttentionSpec, RouterSpec

_GROUPED = "group_limited_greedy"  # `topk_method` of DeepSeek V2


def _read_latent(fields: Fields, model: ModelConfig) -> ModelConfig:
    """Reads latent attention. A head's dimensions are those that are rotated; there is one kv head,
    the latent. YaRN has a factor on the logits besides that on cos and sin."""
    q_rank = None
    if fields.fields.get("q_lora_rank") is not None:
        q_rank = fields.count("q_lora_rank")
    plain = fields.count("qk_nope_head_dim")
    rotated = fields.count("qk_rope_head_dim")
    latent = LatentAttentionSpec(
        q_rank,
        fields.count("kv_lora_rank"),
        plain,
        fields.count("v_head_dim"),
        (plain + rotated) ** -0.5 * _magnitude(model.ropes[0]) ** 2,
    )
    return replace(model, mixers=(latent,), kv_heads=1, head_dim=rotated)


def _magnitude(rope: Rope | None) -> float:
    """Growth of the logits with YaRN's factor, as DeepSeek's `mscale_all_dim` says."""
    if rope is None or rope.scaling is None or not rope.scaling.mscale_all_dim:
        return 1.0
    return yarn_magnitude(rope.scaling.factor, rope.scaling.mscale_all_dim)


def _write_latent(model: ModelConfig) -> dict[str, Any]:
    latent = model.mixer(0)
    assert isinstance(latent, LatentAttentionSpec)
    return {
        "num_key_value_heads": model.heads,
        "head_dim": model.head_dim,
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.plain,
        "qk_rope_head_dim": model.head_dim,
        "v_head_dim": latent.value,
    }


def _read_v2(fields: Fields, model: ModelConfig) -> ModelConfig:
    method = fields.fields.get("topk_method") or "greedy"
    if method not in ("greedy", _GROUPED):
        raise CheckpointError(f"topk_method: {method!r} is not one of greedy, {_GROUPED}")
    for key, value in (("norm_topk_prob", False), ("scoring_func", "softmax")):
        if fields.fields.get(key) not in (value, None):
            raise CheckpointError(f"{key}: {fields.fields[key]!r} is not supported, only {value!r}")
    router = RouterSpec(
        normalised=False, scale=fields.number("routed_scaling_factor", 1.0), group_scores=1
    )
    if method == _GROUPED:
        groups = fields.count("n_group")
        router = replace(router, groups=groups, best_groups=fields.count("topk_group"))
    return with_shared_experts(fields, model, router, dense=0)


def _read_v3(fields: Fields, model: ModelConfig) -> ModelConfig:
    return with_shared_experts(fields, model, grouped_sigmoid(fields), dense=0)


def _write_v2(model: ModelConfig) -> dict[str, Any]:
    grouped = experts_of(model).router.groups > 1
    return write_shared_experts(model) | {"topk_method": _GROUPED if grouped else "greedy"}


LATENT = ConfigPart(_read_latent, _write_latent)
V2_EXPERTS = ConfigPart(_read_v2, _write_v2)
V3_EXPERTS = ConfigPart(_read_v3, write_shared_experts)
