"""Fields of config.json that describe mixtures of experts: how they are read to a `ModelConfig`,
and given back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.config_parts import ConfigPart, attention_of, with_mixers
from jaxserve.checkpoint.fields import Fields
from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.model_paths import CheckpointError
from jaxserve.checkpoint.specs import ExpertsSpec, MlpSpec, RouterSpec

# names of one field; transformers 5 writes the first, whichever hubs have
_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


def _read_mixtral(fields: Fields, model: ModelConfig) -> ModelConfig:
    return with_experts(model, read_experts(fields, model.d_ff, RouterSpec()))


def _read_minimax(fields: Fields, model: ModelConfig) -> ModelConfig:
    router = RouterSpec("sigmoid", correction=True)
    return with_experts(model, read_experts(fields, model.d_ff, router))


def _write_local(model: ModelConfig) -> dict[str, Any]:
    experts = experts_of(model)
    return {"num_local_experts": experts.count, "num_experts_per_tok": experts.active}


def _read_gpt_oss(fields: Fields, model: ModelConfig) -> ModelConfig:
    experts = read_experts(fields, model.d_ff, RouterSpec("chosen", bias=True))
    return with_experts(model, replace(experts, activation="clamped", biases=True))


def _write_gpt_oss(model: ModelConfig) -> dict[str, Any]:
    return _write_local(model) | {"hidden_act": "silu"}


def _read_qwen(fields: Fields, model: ModelConfig) -> ModelConfig:
    """Reads experts of all layers but those in `mlp_only_layers`, and those whose number is no
    multiple of `decoder_sparse_step`."""
    router = RouterSpec(normalised=bool(fields.fields.get("norm_topk_prob", False)))
    experts = read_experts(fields, fields.count("moe_intermediate_size"), router)
    dense = fields.fields.get("mlp_only_layers") or []
    step = fields.count("decoder_sparse_step", 1)
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise CheckpointError("mlp_only_layers: must be a list of layers")
    marks = [i not in dense and (i + 1) % step == 0 for i in range(model.layers)]
    return with_experts(model, experts, marks)


def _write_qwen(model: ModelConfig) -> dict[str, Any]:
    experts = experts_of(model)
    return {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.active,
        "moe_intermediate_size": experts.d_ff,
        "norm_topk_prob": experts.router.normalised,
        "mlp_only_layers": [i for i in range(model.layers) if isinstance(model.mlp(i), MlpSpec)],
    }


def _read_qwen_shared(fields: Fields, model: ModelConfig) -> ModelConfig:
    """Reads experts beside an MLP that computes every token, with a gate."""
    shared = fields.count("shared_expert_intermediate_size")
    model = _read_qwen(fields, model)
    return replace(
        model,
        mlps=tuple(
            replace(spec, shared=shared, shared_gate=True)
            if isinstance(spec, ExpertsSpec)
            else spec
            for spec in model.mlps
        ),
    )


def _write_qwen_shared(model: ModelConfig) -> dict[str, Any]:
    return _write_qwen(model) | {"shared_expert_intermediate_size": experts_of(model).shared}


def grouped_sigmoid(fields: Fields) -> RouterSpec:
    """Reads a router by sigmoids with a correction, whose experts are in groups (DeepSeek V3,
    section 2.1.2)."""
    return RouterSpec(
        "sigmoid",
        normalised=bool(fields.fields.get("norm_topk_prob", True)),
        scale=fields.number("routed_scaling_factor", 1.0),
        correction=True,
        groups=fields.count("n_group", 1),
        best_groups=fields.count("topk_group", 1),
    )


def with_shared_experts(
    fields: Fields, model: ModelConfig, router: RouterSpec, dense: int
) -> ModelConfig:
    """Reads experts of all layers but the first, and the MLP that computes every token. dense:
    number of the first layers, where a config does not state it."""
    size = fields.count("moe_intermediate_size")
    shared = fields.count("n_shared_experts", 1, low=0) * size
    experts = replace(read_experts(fields, size, router), shared=shared)
    first = fields.count("first_k_dense_replace", dense, low=0)
    return with_experts(model, experts, [i >= first for i in range(model.layers)])


def _read_glm(fields: Fields, model: ModelConfig) -> ModelConfig:
    """Reads experts after the first layers, and whether queries and keys have norms."""
    qk_norm = "head" if fields.fields.get("use_qk_norm") else ""
    model = with_mixers(model, qk_norm=qk_norm)
    return with_shared_experts(fields, model, grouped_sigmoid(fields), dense=1)


def write_shared_experts(model: ModelConfig) -> dict[str, Any]:
    """The inverse of `with_shared_experts`, with the router's groups."""
    experts = experts_of(model)
    return {
        "n_routed_experts": experts.count,
        "num_experts_per_tok": experts.active,
        "moe_intermediate_size": experts.d_ff,
        "n_shared_experts": experts.shared // experts.d_ff,
        "norm_topk_prob": experts.router.normalised,
        "routed_scaling_factor": experts.router.scale,
        "n_group": experts.router.groups,
        "topk_group": experts.router.best_groups,
        "first_k_dense_replace": sum(
            isinstance(model.mlp(i), MlpSpec) for i in range(model.layers)
        ),
    }


def _write_glm(model: ModelConfig) -> dict[str, Any]:
    return write_shared_experts(model) | {"use_qk_norm": bool(attention_of(model).qk_norm)}


def read_experts(fields: Fields, d_ff: int, router: RouterSpec) -> ExpertsSpec:
    """Reads the numbers of experts, and of those that compute a token."""
    name = next((key for key in _COUNTS if fields.fields.get(key) is not None), _COUNTS[0])
    count = fields.count(name)
    active = fields.count("num_experts_per_tok", high=count)
    if count % router.groups or router.best_groups > router.groups:
        raise CheckpointError(
            f"n_group: {count} experts are not split into {router.groups} groups of which the best "
            f"{router.best_groups} are taken"
        )
    return ExpertsSpec(count, active, d_ff, router)


def with_experts(
    model: ModelConfig, experts: ExpertsSpec, marks: Sequence[bool] = (True,)
) -> ModelConfig:
    """Returns the model with experts in the marked layers; one mark is for all."""
    mlps = tuple(experts if mark else MlpSpec() for mark in marks)
    if len(set(mlps)) == 1:
        mlps = mlps[:1]
    return replace(model, mlps=mlps)


def experts_of(model: ModelConfig) -> ExpertsSpec:
    """Returns the spec of the model's experts, which is one for all its layers with experts."""
    return next(spec for spec in model.mlps if isinstance(spec, ExpertsSpec))


MIXTRAL = ConfigPart(_read_mixtral, _write_local)
MINIMAX = ConfigPart(_read_minimax, _write_local)
GPT_OSS = ConfigPart(_read_gpt_oss, _write_gpt_oss)
QWEN = ConfigPart(_read_qwen, _write_qwen)
QWEN_SHARED = ConfigPart(_read_qwen_shared, _write_qwen_shared)
GLM = ConfigPart(_read_glm, _write_glm)
