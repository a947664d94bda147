"""Configs of tiny models, as hubs hold them, and their weights."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "dtype": "float32",
}

LESS_ONE = ("gemma2", "gemma3", "qwen3_next", "qwen3_5")  # types whose norms are stored less 1
_QK_NORMS = ("q_norm.weight", "k_norm.weight")
_BIASED = ("bias", "correction", "sinks")  # in names of vectors and biases


@dataclass(frozen=True)
class Case:
    """A model's config.json as hubs hold it, the length of the prompt, and the seed of weights."""

    config: dict[str, Any]
    length: int
    seed: int

    def weights(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
        """Makes random tensors, f32, with which every part matters: logits of a few units, norms
        that are not one. A tied embedding is small and the last norm large: else a token is
        followed by itself for ever."""
        less_one = self.config["model_type"].startswith(LESS_ONE)
        found = {}
        for name, shape in shapes.items():
            noise = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
            mean, spread = _scale(name, shape, self.config["tie_word_embeddings"])
            if "norm" in name and "linear_attn" not in name and less_one:
                mean -= 1
            if self.config["model_type"] == "gemma4_text" and name.endswith(_QK_NORMS):
                mean *= 0.7  # attention's scale is 1
            found[name] = (mean + spread * noise.standard_normal(shape)).astype(np.float32)
        return found


def stacked(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of tensors with the experts of a layer in two, [experts, out, in]."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        prefix, expert, kind = name.partition(".experts.")
        if not expert:
            found[name] = shape
            continue
        number, part, _ = kind.split(".")
        rows = 1 + (part != "down_proj")
        together = "down_proj" if part == "down_proj" else "gate_up_proj"
        size = (int(number) + 1, rows * shape[0], shape[1])
        found[f"{prefix}.experts.{together}"] = size
    return found


def case(
    architecture: str, model_type: str, length: int = 48, seed: int = 0, **fields: Any
) -> Case:
    names = {"architectures": [architecture], "model_type": model_type}
    return Case(COMMON | names | fields, length, seed)


_PHI = dict(
    original_max_position_embeddings=32,
    partial_rotary_factor=0.75,
    rope_scaling={
        "type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.4, 1.6, 2.0],
        "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 8.0],
    },
)
_GEMMA = dict(
    head_dim=32,
    tie_word_embeddings=True,
    hidden_act="gelu_pytorch_tanh",
    hidden_activation="gelu_pytorch_tanh",
    query_pre_attn_scalar=24,
    sliding_window=20,
)
_GEMMA4 = dict(
    head_dim=16,
    num_key_value_heads=4,
    global_head_dim=32,
    num_hidden_layers=8,
    layer_types=2 * (["sliding_attention"] * 3 + ["full_attention"]),
    tie_word_embeddings=True,
    hidden_act="gelu_pytorch_tanh",
    hidden_activation="gelu_pytorch_tanh",
    sliding_window=20,
    vocab_size_per_layer_input=128,
    hidden_size_per_layer_input=0,
)
_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
_LATENT = dict(
    num_key_value_heads=4,
    kv_lora_rank=48,
    qk_rope_head_dim=16,
    qk_nope_head_dim=24,
    v_head_dim=20,
    n_routed_experts=16,
    num_experts_per_tok=3,
    moe_intermediate_size=40,
    n_shared_experts=2,
    first_k_dense_replace=1,
)
_DELTA_NET = dict(
    head_dim=32,
    partial_rotary_factor=0.25,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=24,
    linear_conv_kernel_dim=4,
    full_attention_interval=4,
)
_QWEN_EXPERTS = dict(
    num_experts=16,
    num_experts_per_tok=4,
    moe_intermediate_size=40,
    shared_expert_intermediate_size=48,
)
CASES = {
    "phi3": case("Phi3ForCausalLM", "phi3", sliding_window=40, **_PHI),
    "phi3-short": case("Phi3ForCausalLM", "phi3", 8, sliding_window=None, **_PHI),
    "olmo2": case("Olmo2ForCausalLM", "olmo2"),
    "olmo3": case(
        "Olmo3ForCausalLM",
        "olmo3",
        sliding_window=20,
        rope_theta=5e5,
        rope_scaling=_YARN | {"attention_factor": 1.2, "beta_fast": 32.0, "beta_slow": 1.0},
    ),
    "granite": case(
        "GraniteForCausalLM",
        "granite",
        tie_word_embeddings=True,
        embedding_multiplier=3.0,
        logits_scaling=1.7,
        residual_multiplier=0.7,
        attention_multiplier=0.4,
    ),
    "smollm3": case(
        "SmolLM3ForCausalLM",
        "smollm3",
        tie_word_embeddings=True,
        no_rope_layers=[1, 0, 1, 0],
        no_rope_layer_interval=2,
        use_sliding_window=False,
    ),
    "gemma2": case(
        "Gemma2ForCausalLM",
        "gemma2",
        attn_logit_softcapping=5.0,
        final_logit_softcapping=10.0,
        **_GEMMA,
    ),
    "gemma3": case(
        "Gemma3ForCausalLM",
        "gemma3_text",
        rope_local_base_freq=1e4,
        sliding_window_pattern=3,
        **_GEMMA | {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "gemma4": case(
        "Gemma4ForCausalLM",
        "gemma4_text",
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        final_logit_softcapping=10.0,
        **_GEMMA4,
    ),
    # layers with an input of their own, and half of which read the pages of others
    "gemma4-small": case(
        "Gemma4ForCausalLM",
        "gemma4_text",
        num_kv_shared_layers=4,
        use_double_wide_mlp=True,
        **_GEMMA4 | {"num_key_value_heads": 1, "hidden_size_per_layer_input": 12},
    ),
    "gemma4-experts": case(
        "Gemma4ForCausalLM",
        "gemma4_text",
        seed=2,
        attention_k_eq_v=True,
        num_global_key_value_heads=2,
        enable_moe_block=True,
        num_experts=8,
        top_k_experts=3,
        moe_intermediate_size=40,
        **_GEMMA4,
    ),
    "mixtral": case("MixtralForCausalLM", "mixtral", num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": case(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=48,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        decoder_sparse_step=1,
    ),
    "gpt_oss": case(
        "GptOssForCausalLM",
        "gpt_oss",
        head_dim=32,
        num_local_experts=8,
        num_experts_per_tok=3,
        sliding_window=20,
        rope_theta=150000.0,
        rope_scaling=_YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        attention_bias=True,
        swiglu_limit=7.0,
    ),
    "glm4_moe": case(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        seed=1,
        head_dim=32,
        attention_bias=True,
        partial_rotary_factor=0.5,
        use_qk_norm=True,
        n_routed_experts=16,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.7,
        norm_topk_prob=True,
        first_k_dense_replace=1,
    ),
    "minimax_m2": case(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        head_dim=32,
        rotary_dim=16,
        use_qk_norm=True,
        num_local_experts=8,
        num_experts_per_tok=3,
    ),
    "deepseek_v2": case(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        rope_scaling=_YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
        q_lora_rank=None,
        topk_method="greedy",
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        **_LATENT,
    ),
    "deepseek_v3": case(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        seed=1,
        rope_scaling=_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        q_lora_rank=32,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=1.7,
        **_LATENT,
    ),
    "qwen3_next": case(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        norm_topk_prob=True,
        mlp_only_layers=[1],
        decoder_sparse_step=1,
        **_DELTA_NET,
        **_QWEN_EXPERTS,
    ),
    "qwen3_5": case(
        "Qwen3_5ForCausalLM",
        "qwen3_5_text",
        seed=1,
        **_DELTA_NET | {"linear_num_value_heads": 6, "linear_conv_kernel_dim": 3},
    ),
    "qwen3_5_moe": case(
        "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", seed=1, **_DELTA_NET, **_QWEN_EXPERTS
    ),
    "glm": case(
        "GlmForCausalLM", "glm", seed=1, head_dim=32, attention_bias=True, partial_rotary_factor=0.5
    ),
    "glm4": case(
        "Glm4ForCausalLM",
        "glm4",
        seed=1,
        head_dim=32,
        attention_bias=True,
        partial_rotary_factor=0.5,
    ),
}


def _scale(name: str, shape: tuple[int, ...], tied: bool) -> tuple[float, float]:
    """Mean and standard deviation of a tensor."""
    if name == "model.norm.weight":
        return 1 + 12 * tied, 0.2
    if "norm" in name or name.endswith(("scale", "scalar")):
        return 1, 0.2
    if name == "model.embed_tokens_per_layer.weight":
        return 0, 0.3
    if name == "model.embed_tokens.weight":
        return 0, 0.03 if tied else 1.0
    if name == "lm_head.weight":
        return 0, 3 / shape[-1] ** 0.5
    if any(word in name for word in _BIASED):
        return 0, 0.3
    if name.endswith(("gate_up_proj", "down_proj")):  # of all experts: inputs before outputs
        return 0, 1.2 / shape[1] ** 0.5
    return 0, 1.2 / shape[-1] ** 0.5
