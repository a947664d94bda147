"""Fields of config.json of DeepSeek's models: latent attention and experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.config_parts import ConfigPart
from jaxserve.checkpoint.expert_parts import experts_of, read_experts, with_experts
from jaxserve.checkpoint.fields import Fields
from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.model_paths import CheckpointError
from jaxserve.checkpoint.rope import Rope, yarn_magnitude
from jaxserve.checkpoint.specs import LatentAttentionSpec, MlpSpec, RouterSpec

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
    return _with_shared(fields, model, router)


def _read_v3(fields: Fields, model: ModelConfig) -> ModelConfig:
    router = RouterSpec(
        "sigmoid",
        normalised=bool(fields.fields.get("norm_topk_prob", True)),
        scale=fields.number("routed_scaling_factor", 1.0),
        correction=True,
        groups=fields.count("n_group", 1),
        best_groups=fields.count("topk_group", 1),
    )
    return _with_shared(fields, model, router)


def _with_shared(fields: Fields, model: ModelConfig, router: RouterSpec) -> ModelConfig:
    """Reads experts of all layers but the first, and the MLP that computes every token."""
    size = fields.count("moe_intermediate_size")
    shared = fields.count("n_shared_experts", 1, low=0) * size
    experts = replace(read_experts(fields, size, router), shared=shared)
    first = fields.count("first_k_dense_replace", 0, low=0)
    return with_experts(model, experts, [i >= first for i in range(model.layers)])


def _write_shared(model: ModelConfig) -> dict[str, Any]:
    experts = experts_of(model)
    return {
        "n_routed_experts": experts.count,
        "num_experts_per_tok": experts.active,
        "moe_intermediate_size": experts.d_ff,
        "n_shared_experts": experts.shared // experts.d_ff,
        "first_k_dense_replace": sum(
            isinstance(model.mlp(i), MlpSpec) for i in range(model.layers)
        ),
        "routed_scaling_factor": experts.router.scale,
        "n_group": experts.router.groups,
        "topk_group": experts.router.best_groups,
        "norm_topk_prob": experts.router.normalised,
    }


def _write_v2(model: ModelConfig) -> dict[str, Any]:
    grouped = experts_of(model).router.groups > 1
    return _write_shared(model) | {"topk_method": _GROUPED if grouped else "greedy"}


LATENT = ConfigPart(_read_latent, _write_latent)
V2_EXPERTS = ConfigPart(_read_v2, _write_v2)
V3_EXPERTS = ConfigPart(_read_v3, _write_shared)
