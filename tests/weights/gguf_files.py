"""Writes models as GGUF files by the rules of llama.cpp's converter: which tensors it renames,
adds to, permutes, splits and joins, and what it says of a config."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import MODEL_ARCH as Arch

ARCHITECTURES = {
    "LlamaForCausalLM": Arch.LLAMA,
    "MixtralForCausalLM": Arch.LLAMA,
    "Qwen2ForCausalLM": Arch.QWEN2,
    "Qwen3ForCausalLM": Arch.QWEN3,
    "Qwen3MoeForCausalLM": Arch.QWEN3MOE,
    "Phi3ForCausalLM": Arch.PHI3,
    "Olmo2ForCausalLM": Arch.OLMO2,
    "Olmo3ForCausalLM": Arch.OLMO2,
    "GraniteForCausalLM": Arch.GRANITE,
    "SmolLM3ForCausalLM": Arch.SMOLLM3,
    "Gemma2ForCausalLM": Arch.GEMMA2,
    "Gemma3ForCausalLM": Arch.GEMMA3,
    "Glm4ForCausalLM": Arch.GLM4,
    "Glm4MoeForCausalLM": Arch.GLM4_MOE,
    "GptOssForCausalLM": Arch.GPT_OSS,
    "MiniMaxM2ForCausalLM": Arch.MINIMAXM2,
    "Qwen3NextForCausalLM": Arch.QWEN3NEXT,
    "Qwen3_5ForCausalLM": Arch.QWEN35,
    "Qwen3_5MoeForCausalLM": Arch.QWEN35MOE,
    "DeepseekV2ForCausalLM": Arch.DEEPSEEK2,
    "DeepseekV3ForCausalLM": Arch.DEEPSEEK2,
}
_IN_PAIRS = {Arch.LLAMA, Arch.GRANITE, Arch.SMOLLM3}  # rows of q and k, of halves in config.json
_HYBRID = {Arch.QWEN3NEXT, Arch.QWEN35, Arch.QWEN35MOE}
_NUMBERS = {  # of config.json
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "vocab_size": "vocab_size",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "v_head_dim": "attention.value_length_mla",
    "num_local_experts": "expert_count",
    "num_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "rotary_dim": "rope.dimension_count",
    "qk_rope_head_dim": "rope.dimension_count",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "full_attention_interval": "full_attention_interval",
    "sliding_window_pattern": "attention.sliding_window_pattern",
}
_REALS = {
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.freq_base_swa",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "routed_scaling_factor": "expert_weights_scale",
}


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    values: Mapping[str, np.ndarray],
    kind: str | Mapping[str, str] = "F32",
    extra: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Writes tensors of Hugging Face names. config: of config.json. kind: of matrices, or of each
    by a word in its name, Q8_0 of others. extra: more tensors, by llama.cpp's names."""
    arch = ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _Metadata(writer, arch, config).write()
    for name, value in converted(arch, config, values):
        is_matrix = value.ndim > 1 and name.endswith(".weight")
        quantised = gguf.GGMLQuantizationType[_kind(name, kind) if is_matrix else "F32"]
        value = np.ascontiguousarray(value, np.float32)
        writer.add_tensor(name, gguf.quants.quantize(value, quantised), raw_dtype=quantised)
    for name, value in (_rope_factors(config) | dict(extra or {})).items():
        writer.add_tensor(name, np.array(value, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _kind(name: str, kind: str | Mapping[str, str]) -> str:
    if isinstance(kind, str):
        return kind
    return next((value for word, value in kind.items() if word in name), "Q8_0")


class _Metadata:
    def __init__(self, writer: gguf.GGUFWriter, arch: Arch, config: Mapping[str, Any]):
        self.writer = writer
        self.arch = arch
        self.config = config
        self.prefix = gguf.MODEL_ARCH_NAMES[arch]

    def write(self) -> None:
        config = self.config
        for key, name in _NUMBERS.items():
            if isinstance(config.get(key), int):
                self.number(name, config[key])
        for key, name in _REALS.items():
            if config.get(key) is not None:
                self.real(name, config[key])
        if "norm_topk_prob" in config and self.arch != Arch.QWEN3MOE:
            self.writer.add_bool(f"{self.prefix}.expert_weights_norm", config["norm_topk_prob"])
        if config.get("partial_rotary_factor"):
            rotated = int(self.head_dim * config["partial_rotary_factor"])
            self.number("rope.dimension_count", rotated)
        if "layer_types" in config and config.get("sliding_window"):
            marks = [kind == "sliding_attention" for kind in config["layer_types"]]
            self.writer.add_array(f"{self.prefix}.attention.sliding_window_pattern", marks)
        if self.arch == Arch.DEEPSEEK2:
            self.deepseek()
        if self.arch in _HYBRID:
            values = config["linear_value_head_dim"] * config["linear_num_value_heads"]
            self.number("ssm.inner_size", values)
        if self.arch in (Arch.QWEN35, Arch.QWEN35MOE):
            self.writer.add_array(f"{self.prefix}.rope.dimension_sections", [11, 11, 10, 0])
        self.rope(config.get("rope_scaling") or {})
        for name, id in (("eos", 2), ("bos", 1)):
            self.writer.add_uint32(f"tokenizer.ggml.{name}_token_id", id)

    @property
    def head_dim(self) -> int:
        config = self.config
        return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]

    def deepseek(self) -> None:
        rotated = self.config["qk_rope_head_dim"]
        self.number("attention.head_count_kv", 1)
        self.number("attention.key_length", self.config["kv_lora_rank"] + rotated)
        self.number("attention.key_length_mla", self.config["qk_nope_head_dim"] + rotated)
        is_v3 = self.config["architectures"] == ["DeepseekV3ForCausalLM"]
        self.number("expert_gating_func", 2 if is_v3 else 1)

    def rope(self, scaling: Mapping[str, Any]) -> None:
        kind = scaling.get("rope_type")
        if kind in ("linear", "yarn"):
            self.writer.add_string(f"{self.prefix}.rope.scaling.type", kind)
            self.real("rope.scaling.factor", scaling["factor"])
        if kind == "yarn":
            original = scaling["original_max_position_embeddings"]
            self.number("rope.scaling.original_context_length", original)
        if scaling.get("attention_factor"):
            self.real("rope.scaling.yarn_attn_factor", scaling["attention_factor"])
        if scaling.get("mscale_all_dim"):
            self.real("rope.scaling.yarn_log_multiplier", 0.1 * scaling["mscale_all_dim"])
        if self.arch == Arch.PHI3:
            original = self.config.get("original_max_position_embeddings", 4096)
            self.number("rope.scaling.original_context_length", original)

    def number(self, name: str, value: int) -> None:
        self.writer.kv_data[0].pop(f"{self.prefix}.{name}", None)
        self.writer.add_uint32(f"{self.prefix}.{name}", value)

    def real(self, name: str, value: float) -> None:
        self.writer.add_float32(f"{self.prefix}.{name}", value)


def converted(
    arch: Arch, config: Mapping[str, Any], values: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors under llama.cpp's names."""
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, value in _joined(values).items():
        for inner, part in _split(arch, config, name, value):
            if inner.endswith("A_log"):
                yield names.get_name(inner), part
                continue
            stem, _, ending = inner.rpartition(".")
            yield f"{names.get_name(stem)}.{ending}", part


def _joined(values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts of a layer in one tensor; other tensors as they are."""
    joined: dict[str, list[np.ndarray]] = {}
    for name, value in values.items():
        joined.setdefault(re.sub(r"experts\.\d+", "experts", name), []).append(value)
    return {
        name: np.stack(parts) if ".experts." in name and len(parts) > 1 else parts[0]
        for name, parts in joined.items()
    }


def _split(
    arch: Arch, config: Mapping[str, Any], name: str, value: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    less_one = arch in (Arch.GEMMA2, Arch.GEMMA3, *_HYBRID) and "linear_attn" not in name
    if less_one and name.endswith("norm.weight"):
        value = value + 1
    if arch in _IN_PAIRS and re.search(r"\.[qk]_proj\.", name):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        value = value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
    if name.endswith("shared_expert_gate.weight"):
        value = value.squeeze()  # a matrix until quantising tools leave out the dimension of 1
    if ".linear_attn." in name:
        yield from _delta_net(config, name, value)
    elif arch == Arch.GPT_OSS and "experts" in name:
        yield from _split_by_turns(name, value)
    elif name.endswith("kv_b_proj.weight"):
        plain = config["qk_nope_head_dim"]
        heads = value.reshape(config["num_attention_heads"], -1, value.shape[-1])
        yield name.replace("kv_b", "k_b"), heads[:, :plain].swapaxes(1, 2)
        yield name.replace("kv_b", "v_b"), heads[:, plain:]
    else:
        name = name.replace("score_correction_bias", "score_correction.bias")
        yield name.replace("self_attn.sinks", "self_attn.sinks.weight"), value


def _delta_net(
    config: Mapping[str, Any], name: str, value: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """Gated DeltaNet: decays themselves; queries, keys and values of all heads one after another,
    gates by themselves."""
    if name.endswith("A_log"):
        yield name, -np.exp(value)
    elif name.endswith("in_proj_qkvz.weight"):
        heads = config["linear_num_key_heads"]
        key = config["linear_key_head_dim"]
        values = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
        by_head = value.reshape(heads, -1, value.shape[1])
        parts = np.split(by_head, np.cumsum([key, key, values]), 1)
        q, k, v, z = (part.reshape(-1, value.shape[1]) for part in parts)
        yield name.replace("qkvz", "qkv"), np.concatenate([q, k, v])
        yield name.replace("qkvz", "z"), z
    else:
        yield name.replace("dt_bias", "dt_proj.bias"), value.squeeze()


def _split_by_turns(name: str, value: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Experts of gpt-oss: outputs of gate and up by turns, inputs before outputs."""
    ending = "weight"
    if name.endswith("_bias"):
        ending = "bias"
    else:
        value = value.swapaxes(1, 2)
    stem = name.removesuffix("_bias")
    if stem.endswith("down_proj"):
        yield f"{stem}.{ending}", value
    else:
        yield f"{stem.replace('gate_up_proj', 'gate_proj')}.{ending}", value[:, ::2]
        yield f"{stem.replace('gate_up_proj', 'up_proj')}.{ending}", value[:, 1::2]


def _rope_factors(config: Mapping[str, Any]) -> dict[str, Any]:
    scaling = config.get("rope_scaling") or {}
    return {
        f"rope_factors_{kind}.weight": scaling[f"{kind}_factor"]
        for kind in ("long", "short")
        if f"{kind}_factor" in scaling
    }
