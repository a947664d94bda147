"""Converts the metadata of a GGUF file to a `ModelConfig`: its fields are given the names that they
have in a config.json, which `model_config.from_hf` reads."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxserve.checkpoint.families import FAMILIES
from jaxserve.checkpoint.fields import LINEAR, Fields, token_ids
from jaxserve.checkpoint.generation_config import usable_sampling
from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.model_config import MAX_LAYERS, from_hf
from jaxserve.checkpoint.model_paths import CheckpointError, reason
from jaxserve.checkpoint.rope import Rope, llama3_scaling, yarn_magnitude
from jaxserve.checkpoint.rope_fields import FULL, SLIDING, write_scaling
from jaxserve.checkpoint.tokenizer_files import GGUF_TEMPLATE, turn_ends

# tensors that belong to the config: divisors of RoPE's frequencies
ROPE_FREQS = "rope_freqs.weight"
ROPE_LONG = "rope_factors_long.weight"
ROPE_SHORT = "rope_factors_short.weight"
ROPE_TENSORS = (ROPE_FREQS, ROPE_LONG, ROPE_SHORT)

_ENDS = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
_BEGIN = "tokenizer.ggml.bos_token_id"
# fields of an architecture -> those of a config.json
_NAMES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attention.scale": "attention_multiplier",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.value_length_mla": "v_head_dim",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "leading_dense_block_count": "first_k_dense_replace",
}
# families of an architecture besides its first, where a field has this value; None: any but 0
_VARIANTS = {
    "llama": (("expert_count", None, "mixtral"), ("attention.sliding_window", None, "mistral")),
    "olmo2": (("attention.sliding_window", None, "olmo3"),),
    "deepseek2": (("expert_gating_func", 2, "deepseek_v3"),),  # sigmoids
}
_UNREAD = {"rope.dimension_sections": None, "attention.causal": True}  # and their only values
_SECTIONS = {"qwen3_5", "qwen3_5_moe"}  # families in which a text's positions in all sections agree
_GEMMA_27B = {"gemma2": 46, "gemma3": 62}  # layers: its scale is not that of the others


@dataclass(frozen=True)
class _File:
    """Metadata of a file. family: a key of `FAMILIES`. read: its fields. names: of its
    tensors. factors: values of those among `ROPE_TENSORS` that it has."""

    family: str
    read: Fields
    names: Container[str]
    factors: Mapping[str, Sequence[float]]

    def get(self, key: str) -> Any:
        """Returns the value of a field as it is; None where it is missing."""
        return self.read.fields.get(self.read.prefix + key)

    def has(self, tensor: str) -> bool:
        """Returns True if layers have a tensor."""
        return f"blk.0.{tensor}" in self.names

    @property
    def layers(self) -> int:
        """Number of layers, without those that predict further tokens."""
        layers = self.read.count("block_count", high=MAX_LAYERS)
        return layers - self.read.count("nextn_predict_layers", 0, low=0, high=layers - 1)

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        default = self.read.count("embedding_length") // self.read.count("attention.head_count")
        return self.read.count("attention.key_length", default)


def from_gguf(
    fields: Mapping[str, Any],
    tensors: Container[str],
    name: str = "",
    factors: Mapping[str, Sequence[float]] | None = None,
) -> ModelConfig:
    """Converts the metadata of a GGUF file to a ModelConfig.

    tensors: names of its tensors. name: of the model, if not the file's. factors: values of those
    among `ROPE_TENSORS` that it has. Errors: CheckpointError that names the unsupported field.
    """
    arch = fields.get("general.architecture")
    families: dict[str, str] = {}
    for key, family in FAMILIES.items():
        families.setdefault(family.gguf, key)
    if arch not in families or not arch:
        known = ", ".join(filter(None, families))
        raise CheckpointError(f"GGUF architecture {arch!r} is not one of {known}")
    read = Fields({key: _single(value) for key, value in fields.items()}, f"{arch}.")
    file = _File(_variant(families[arch], arch, read), read, tensors, factors or {})
    config = _config(file)
    config.setdefault("vocab_size", len(fields.get("tokenizer.ggml.tokens", ())))
    try:
        model = from_hf(config, name=name or str(fields.get("general.name") or arch))
    except CheckpointError as error:
        raise CheckpointError(_in_words_of_gguf(reason(error), read.prefix)) from None
    ends = {key: fields.get(key) for key in _ENDS} | {GGUF_TEMPLATE: turn_ends(fields)}
    begins = token_ids(model.vocab, {_BEGIN: fields.get(_BEGIN)})
    return replace(
        model,
        gguf=True,
        norms=replace(model.norms, less_one=False),
        eos_ids=token_ids(model.vocab, ends),
        bos_id=next(iter(begins), None),
        sampling=usable_sampling("general.sampling", fields),
    )


def _single(value: Any) -> Any:
    """Returns the number of an array that has it for each layer; anything else as it is."""
    is_numbers = isinstance(value, np.ndarray) and value.dtype != bool
    if is_numbers and value.size and (value == value[0]).all():
        return value[0].item()
    return value


def _variant(family: str, arch: str, read: Fields) -> str:
    """Returns the family of a file, of which the first of its architecture is given."""
    for key, wanted, variant in _VARIANTS.get(arch, ()):
        value = read.count(key, 0, low=0)
        if value and wanted in (None, value):
            return variant
    return family


def _in_words_of_gguf(message: str, prefix: str) -> str:
    """Names the field of an error as GGUF files do."""
    name, colon, rest = message.partition(":")
    names = {hf: key for key, hf in _NAMES.items()}
    names["partial_rotary_factor"] = "rope.dimension_count"
    if name in names:
        name = prefix + names[name]
    return name + colon + rest


def _config(file: _File) -> dict[str, Any]:
    """Makes the fields of a config.json."""
    for key, only in _UNREAD.items():
        value = file.get(key)
        if value is not None and value is not only and not _agrees(file, key):
            raise CheckpointError(f"{file.read.prefix}{key}: {value} is not supported")
    found = {hf: file.get(key) for key, hf in _NAMES.items()}
    config: dict[str, Any] = {
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        **{hf: value for hf, value in found.items() if value is not None},
        "architectures": [FAMILIES[file.family].architecture],
        "num_hidden_layers": file.layers,
        "tie_word_embeddings": "output.weight" not in file.names,
        **_windows(file),
        "rope_scaling": _scaling(file),
        **_heads(file),
    }
    if file.family in _SPECIAL:
        config |= _SPECIAL[file.family](file)
    return config


def _agrees(file: _File, key: str) -> bool:
    """Returns True for a field that changes nothing for texts."""
    return key == "rope.dimension_sections" and file.family in _SECTIONS


def _windows(file: _File) -> dict[str, Any]:
    """Fields of sliding windows. The pattern is a number, the last of each that many layers has no
    window, or says of each layer whether it has one."""
    found: dict[str, Any] = {}
    if file.get("attention.sliding_window") is not None:
        window = file.read.count("attention.sliding_window", low=0) or None
        found = {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}
    pattern = file.get("attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray):
        marks = pattern[: file.layers].tolist()
        found["layer_types"] = [SLIDING if mark else FULL for mark in marks]
    elif pattern is not None:
        found["sliding_window_pattern"] = pattern
    return found


def _heads(file: _File) -> dict[str, Any]:
    """Sizes of heads. Errors: CheckpointError if values have another size than keys."""
    if file.family.startswith("deepseek"):
        return {}
    head_dim = file.head_dim
    values = file.read.count("attention.value_length", head_dim)
    if values != head_dim:
        raise CheckpointError(
            f"{file.read.prefix}attention.value_length: {values} differs from the head size "
            f"{head_dim}, which is not supported"
        )
    rotated = file.read.count("rope.dimension_count", head_dim)
    return {"head_dim": head_dim, "partial_rotary_factor": rotated / head_dim}


def _scaling(file: _File) -> dict[str, Any] | None:
    """Scaling of RoPE. Llama 3's and LongRoPE's are known by their tensors."""
    if ROPE_LONG in file.factors:
        return {
            "rope_type": "longrope",
            "short_factor": list(file.factors.get(ROPE_SHORT, ())),
            "long_factor": list(file.factors[ROPE_LONG]),
            "attention_factor": file.get("rope.scaling.attn_factor"),
            "original_max_position_embeddings": file.get("rope.scaling.original_context_length"),
        }
    if ROPE_FREQS in file.factors:
        return _llama3_scaling(file)
    kind = file.get("rope.scaling.type") or "none"
    if kind not in _SCALINGS:
        raise CheckpointError(
            f"{file.read.prefix}rope.scaling.type: {kind!r} is not one of {', '.join(_SCALINGS)}"
        )
    return _SCALINGS[kind](file)


def _linear(file: _File) -> dict[str, Any]:
    return {"rope_type": "linear", "factor": file.read.number("rope.scaling.factor")}


def _yarn(file: _File) -> dict[str, Any]:
    """`yarn_attn_factor` is that of transformers, `attn_factor` what llama.cpp multiplies its own
    with; 1 says nothing in either."""
    factor = file.read.number("rope.scaling.factor")
    attention = file.read.number("rope.scaling.yarn_attn_factor", 1.0)
    if attention == 1:
        attention = file.read.number("rope.scaling.attn_factor", 1.0)
        attention *= yarn_magnitude(factor)
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": file.get("rope.scaling.original_context_length"),
        "beta_fast": file.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": file.get("rope.scaling.yarn_beta_slow"),
        "attention_factor": attention,
    }


def _llama3_scaling(file: _File) -> dict[str, Any]:
    """Llama 3's scaling from the divisor of each frequency: the lowest frequency has the whole
    factor. Errors: CheckpointError if the others do not follow from it."""
    divisors = np.array(file.factors[ROPE_FREQS])
    theta = file.read.number("rope.freq_base", 1e4)
    head_dim = file.head_dim
    if len(divisors) == head_dim // 2 and divisors.min() > 0:
        scaling = llama3_scaling(float(divisors.max()))
        plain, _ = Rope(theta).frequencies(head_dim, 0)
        scaled, _ = Rope(theta, scaling).frequencies(head_dim, 0)
        if np.allclose(divisors, plain / scaled, rtol=1e-3, atol=0):
            return write_scaling(scaling)
    raise CheckpointError(f"{ROPE_FREQS}: these divisors are not those of Llama 3 scaling")


def _gemma(file: _File) -> dict[str, Any]:
    """The scale of attention, which files do not have, and the RoPE of layers with a window."""
    scalar = file.head_dim
    if file.layers == _GEMMA_27B[file.family]:
        scalar = file.read.count("embedding_length") // file.read.count("attention.head_count")
    local = file.read.number("rope.freq_base_swa", 1e4)
    return {"query_pre_attn_scalar": scalar, "rope_local_base_freq": local}


def _gemma3(file: _File) -> dict[str, Any]:
    """A file without a window has none, whatever the family's default is."""
    return {"sliding_window": None} | _windows(file) | _gemma(file)


def _glm(file: _File) -> dict[str, Any]:
    return {"attention_bias": file.has("attn_q.bias")}


def _glm_moe(file: _File) -> dict[str, Any]:
    return _glm(file) | {"use_qk_norm": file.has("attn_q_norm.weight")}


def _qwen_moe(file: _File) -> dict[str, Any]:
    return {"norm_topk_prob": True}


def _delta_net(file: _File) -> dict[str, Any]:
    """Kinds of layers, and the size of a value. Errors: CheckpointError for files in which the
    projections of Gated DeltaNet layers are one tensor, made before 2026."""
    if file.has("ssm_in.weight"):
        raise CheckpointError("blk.0.ssm_in.weight: is of older files; convert the model again")
    heads = file.read.count("ssm.time_step_rank")
    size, rest = divmod(file.read.count("ssm.inner_size"), heads)
    if rest:
        raise CheckpointError(
            f"{file.read.prefix}ssm.inner_size: must be a multiple of {heads} heads"
        )
    every = file.read.count("full_attention_interval", 4)
    kinds = [FULL if (layer + 1) % every == 0 else LINEAR for layer in range(file.layers)]
    return {"linear_value_head_dim": size, "layer_types": kinds, "norm_topk_prob": True}


def _qwen35(file: _File) -> dict[str, Any]:
    """Fields of `_delta_net`. Errors: CheckpointError where key heads have several value heads,
    which these files hold in another order, so that ranks would read parts of blocks."""
    keys, values = (file.read.count(f"ssm.{name}") for name in ("group_count", "time_step_rank"))
    if keys != values:
        raise CheckpointError(
            f"{file.read.prefix}ssm.time_step_rank: {values} value heads of {keys} key heads are "
            "not read from GGUF files, whose order of value heads is another; use safetensors"
        )
    return _delta_net(file)


def _gpt_oss(file: _File) -> dict[str, Any]:
    """Limits of YaRN's ramp are not rounded in any of these models; files cannot say it."""
    scaling = _scaling(file)
    if scaling is None:
        return {}
    return {"rope_scaling": scaling | {"truncate": False}}


def _deepseek(file: _File) -> dict[str, Any]:
    """Sizes of heads, and YaRN with the factor on logits. Errors: CheckpointError for files in
    which the expansion of latents is one tensor, made before 2025-04."""
    rotated = file.read.count("rope.dimension_count")
    plain = file.read.count("attention.key_length_mla") - rotated
    config = {
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": plain,
        "head_dim": rotated,
        "num_key_value_heads": file.read.count("attention.head_count"),
        "norm_topk_prob": bool(file.get("expert_weights_norm")),
    }
    weight = file.read.optional("rope.scaling.yarn_log_multiplier")
    scaling = _scaling(file)
    if weight is None or scaling is None:
        return config
    mscale = round(10 * weight, 6)
    del scaling["attention_factor"]
    return config | {"rope_scaling": scaling | {"mscale": mscale, "mscale_all_dim": mscale}}


def _deepseek_v2(file: _File) -> dict[str, Any]:
    method = "greedy"
    if file.read.count("expert_group_count", 1) > 1:
        method = "group_limited_greedy"
    return _deepseek(file) | {"topk_method": method}


_SCALINGS: dict[str, Callable[[_File], dict[str, Any] | None]] = {
    "none": lambda file: None,
    "linear": _linear,
    "yarn": _yarn,
}
# what a family has besides
_SPECIAL: dict[str, Callable[[_File], dict[str, Any]]] = {
    "gemma2": _gemma,
    "gemma3": _gemma3,
    "glm4": _glm,
    "glm4_moe": _glm_moe,
    "qwen3_moe": _qwen_moe,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek,
    "qwen3_next": _delta_net,
    "qwen3_5": _qwen35,
    "qwen3_5_moe": _qwen35,
}
