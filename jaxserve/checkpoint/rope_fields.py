"""Reads the RoPE of all layers from config.json, and gives it back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from jaxserve.checkpoint.fields import FULL, SLIDING, Fields
from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.model_paths import CheckpointError
from jaxserve.checkpoint.rope import SCALINGS, Rope, RopeScaling
from jaxserve.checkpoint.specs import Dimensions

WHOLE = 1.0  # partial_rotary_factor of heads that are rotated whole
_OUTSIDE = ("rope_theta", "original_max_position_embeddings", "partial_rotary_factor")


def read_ropes(
    config: Mapping[str, Any], types: list[str] | None, max_len: int, local: str
) -> tuple[Rope, ...]:
    """Reads the RoPE of each layer, or one for all, from `rope_parameters` (transformers 5) or from
    `rope_theta`, `rope_scaling` and `partial_rotary_factor` (hubs).

    types: kinds of layers, if the config has any. local: see `Family.local_rope`. Errors:
    CheckpointError.
    """
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise CheckpointError(f"rope_parameters: {parameters!r} is no object")
    if any(isinstance(value, dict) for value in parameters.values()):
        if types is None or not all(isinstance(parameters.get(kind), dict) for kind in types):
            raise CheckpointError(
                f"rope_parameters: {parameters!r} is not one set of parameters for all layers, nor "
                "one for each kind in layer_types"
            )
        by_type = {kind: _rope(config, parameters[kind], max_len) for kind in dict.fromkeys(types)}
        return tuple(by_type[kind] for kind in types)
    rope = _rope(config, parameters, max_len)
    if not local or types is None:
        return (rope,)
    plain = Rope(Fields(dict(config)).number(local))
    return tuple(plain if kind == SLIDING else rope for kind in types)


def write_ropes(model: ModelConfig) -> dict[str, Any]:
    """Returns the fields of config.json from which `read_ropes` reads the model's RoPE."""
    by_type = {
        SLIDING if model.window(layer) else FULL: rope
        for layer in range(model.layers)
        if (rope := model.rope(layer)) is not None
    }
    ropes = list(dict.fromkeys(by_type.values()))
    if len(ropes) > 1:
        return {"rope_parameters": {kind: _parameters(rope) for kind, rope in by_type.items()}}
    rope = next(iter(ropes), Rope())
    written = {"rope_theta": rope.theta, "rope_scaling": _written(rope.scaling)}
    if rope.share != WHOLE:
        written["partial_rotary_factor"] = rope.share
    if rope.scaling is not None and rope.scaling.kind == "longrope":
        written["original_max_position_embeddings"] = rope.scaling.original_max_len
    return written


def _parameters(rope: Rope) -> dict[str, Any]:
    scaling = _written(rope.scaling) or {"rope_type": "default"}
    return {"partial_rotary_factor": rope.share} | scaling | {"rope_theta": rope.theta}


def _rope(config: Mapping[str, Any], parameters: Mapping[str, Any], max_len: int) -> Rope:
    """Reads one RoPE; parameters: those of rope_parameters or rope_scaling."""
    outside = {key: config.get(key) for key in _OUTSIDE}
    fields = Fields({**outside, **{k: v for k, v in parameters.items() if v is not None}})
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    theta = fields.number("rope_theta")
    share = fields.number("partial_rotary_factor", WHOLE)
    if kind == "proportional":
        if share > WHOLE:
            raise CheckpointError(f"partial_rotary_factor: {share} is above 1")
        return Rope(theta, RopeScaling(kind, fields.number("factor", 1.0), share=share))
    return Rope(theta, _read_scaling(kind, fields, max_len), share)


def _read_scaling(kind: str, fields: Fields, max_len: int) -> RopeScaling | None:
    """Reads a RoPE scaling of this kind."""
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind, fields.number("factor"))
    if kind == "llama3":
        original = fields.count("original_max_position_embeddings")
        low = fields.number("low_freq_factor")
        high = fields.number("high_freq_factor")
        if not low < high:
            raise CheckpointError(f"low_freq_factor: {low} is not below high_freq_factor {high}")
        return RopeScaling(kind, fields.number("factor"), original, low, high)
    original = fields.count("original_max_position_embeddings", max_len)
    if kind == "dynamic":
        return RopeScaling(kind, fields.number("factor"), original)
    if kind == "yarn":
        return RopeScaling(
            kind,
            fields.number("factor", max_len / original),
            original,
            beta_fast=fields.number("beta_fast", 32.0),
            beta_slow=fields.number("beta_slow", 1.0),
            attention_factor=fields.optional("attention_factor"),
            mscale=fields.optional("mscale"),
            mscale_all_dim=fields.optional("mscale_all_dim"),
            truncate=bool(fields.fields.get("truncate", True)),
        )
    if kind in ("longrope", "su"):
        return RopeScaling(
            "longrope",
            fields.number("factor", max_len / original),
            original,
            attention_factor=fields.optional("attention_factor"),
            short=fields.numbers("short_factor"),
            long=fields.numbers("long_factor"),
        )
    raise CheckpointError(f"rope scaling {kind!r} is not one of default, {', '.join(SCALINGS)}")


def _written(scaling: RopeScaling | None) -> dict | None:
    return None if scaling is None else write_scaling(scaling)


def write_scaling(scaling: RopeScaling) -> dict[str, Any]:
    """Returns the `rope_scaling` from which a scaling is read."""
    fields = dataclasses.asdict(scaling)
    written = {
        "rope_type": fields.pop("kind"),
        "original_max_position_embeddings": fields.pop("original_max_len") or None,
    }
    if (share := fields.pop("share")) != WHOLE:
        written["partial_rotary_factor"] = share
    for key in ("short", "long"):
        if divisors := fields.pop(key):
            written[f"{key}_factor"] = list(divisors)
    return written | fields


def check_heads(sizes: Dimensions, ropes: Iterable[Rope | None]) -> None:
    """Checks that heads can be grouped, and turned by these ropes. Errors: CheckpointError."""
    if sizes.heads % sizes.kv_heads:
        raise CheckpointError(
            f"{sizes.heads} heads are not a multiple of {sizes.kv_heads} kv heads"
        )
    if sizes.head_dim % 2:
        raise CheckpointError(
            f"head size {sizes.head_dim} is odd; rotary positions need an even one"
        )
    for rope in ropes:
        if rope is not None:
            _check_rope(rope, sizes.head_dim)


def _check_rope(rope: Rope, head_dim: int) -> None:
    dims = rope.dims(head_dim)
    if rope.share > WHOLE or dims < 2 or dims % 2:
        raise CheckpointError(
            f"partial_rotary_factor: {rope.share} of a head size of {head_dim} is no even number "
            "of dimensions"
        )
    scaling = rope.scaling
    if scaling is not None and scaling.kind == "longrope":
        for key, divisors in (("short_factor", scaling.short), ("long_factor", scaling.long)):
            if len(divisors) != dims // 2:
                raise CheckpointError(
                    f"{key}: has {len(divisors)} numbers; "
                    f"{dims} rotated dimensions need {dims // 2}"
                )
