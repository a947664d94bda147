"""Names of stored tensors by family: stored tensor -> the parts (see `checkpoint.specs`) that are
stacked in its rows. {layers}, {experts}: number of the layer, of the expert. First those of Hugging
Face, then those of llama.cpp."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


class Alternating(tuple[str, ...]):
    """Parts in a tensor of all experts, [experts, in, out] or, of biases, [experts, out]: outputs
    of each part by turns (gpt-oss)."""


class Stacked(tuple[str, ...]):
    """A part of all experts, rows of one after those of the other (GGUF)."""


Tensors = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Layout:
    """Places of a family's weights in a format. interleaved: dimensions 2 i and 2 i + 1 of a head
    are rotated together, not i and i + half."""

    tensors: Tensors
    interleaved: bool = False


LAYER = "model.layers.{layers}."
ATTENTION = LAYER + "self_attn."
MLP = LAYER + "mlp."
SHARED: Tensors = {
    "model.embed_tokens.weight": ("embed",),
    ATTENTION + "o_proj.weight": ("o",),
    ATTENTION + "o_proj.bias": ("o_bias",),
    ATTENTION + "q_norm.weight": ("q_norm",),
    ATTENTION + "k_norm.weight": ("k_norm",),
    MLP + "down_proj.weight": ("down",),
    "model.norm.weight": ("norm",),
    "lm_head.weight": ("head",),
}
NORMS_BEFORE: Tensors = {
    LAYER + "input_layernorm.weight": ("attn_norm",),
    LAYER + "post_attention_layernorm.weight": ("mlp_norm",),
}
NORMS_AFTER: Tensors = {
    LAYER + "post_attention_layernorm.weight": ("attn_post_norm",),
    LAYER + "post_feedforward_layernorm.weight": ("mlp_post_norm",),
}
NORMS_AROUND: Tensors = {
    LAYER + "input_layernorm.weight": ("attn_norm",),
    LAYER + "pre_feedforward_layernorm.weight": ("mlp_norm",),
    **NORMS_AFTER,
}
# the norm that follows attention has another name than in all other families
GLM_NORMS: Tensors = {
    **NORMS_BEFORE,
    LAYER + "post_self_attn_layernorm.weight": ("attn_post_norm",),
    LAYER + "post_mlp_layernorm.weight": ("mlp_post_norm",),
}
SPLIT_QKV: Tensors = {
    ATTENTION + "q_proj.weight": ("q",),
    ATTENTION + "k_proj.weight": ("k",),
    ATTENTION + "v_proj.weight": ("v",),
    ATTENTION + "q_proj.bias": ("q_bias",),
    ATTENTION + "k_proj.bias": ("k_bias",),
    ATTENTION + "v_proj.bias": ("v_bias",),
}
SPLIT_MLP: Tensors = {MLP + "gate_proj.weight": ("gate",), MLP + "up_proj.weight": ("up",)}
FUSED_QKV: Tensors = {ATTENTION + "qkv_proj.weight": ("q", "k", "v")}
FUSED_MLP: Tensors = {MLP + "gate_up_proj.weight": ("gate", "up")}

LLAMA: Tensors = {**SHARED, **NORMS_BEFORE, **SPLIT_QKV, **SPLIT_MLP}
PHI: Tensors = {**SHARED, **NORMS_BEFORE, **FUSED_QKV, **FUSED_MLP}
OLMO: Tensors = {**SHARED, **NORMS_AFTER, **SPLIT_QKV, **SPLIT_MLP}
GEMMA: Tensors = {**SHARED, **NORMS_AROUND, **SPLIT_QKV, **SPLIT_MLP}
GLM4: Tensors = {**SHARED, **GLM_NORMS, **SPLIT_QKV, **FUSED_MLP}

_ROUTER: Tensors = {
    MLP + "gate.weight": ("router",),
    MLP + "gate.e_score_correction_bias": ("correction",),
}


def _experts(prefix: str) -> Tensors:
    """Returns the tensors of each expert, under a prefix."""
    expert = prefix + "experts.{experts}."
    return {
        expert + "gate_proj.weight": ("expert_gate",),
        expert + "up_proj.weight": ("expert_up",),
        expert + "down_proj.weight": ("expert_down",),
    }


_EXPERTS = _experts(MLP)
# tensors [experts, outputs, inputs] in which a checkpoint may hold `_EXPERTS` of a layer, and the
# parts of these names that are stacked in an expert's outputs
STACKED_EXPERTS = {
    "experts.gate_up_proj": ("gate_proj.weight", "up_proj.weight"),
    "experts.down_proj": ("down_proj.weight",),
}
_SHARED_EXPERTS: Tensors = {
    MLP + "shared_experts.gate_proj.weight": ("shared_gate_proj",),
    MLP + "shared_experts.up_proj.weight": ("shared_up_proj",),
    MLP + "shared_experts.down_proj.weight": ("shared_down_proj",),
}
_SPARSE = LAYER + "block_sparse_moe."
MIXTRAL: Tensors = {
    **LLAMA,
    _SPARSE + "gate.weight": ("router",),
    _SPARSE + "e_score_correction_bias": ("correction",),
    _SPARSE + "experts.{experts}.w1.weight": ("expert_gate",),
    _SPARSE + "experts.{experts}.w3.weight": ("expert_up",),
    _SPARSE + "experts.{experts}.w2.weight": ("expert_down",),
}
GEMMA4: Tensors = {
    **GEMMA,
    LAYER + "layer_scalar": ("layer_scalar",),
    LAYER + "per_layer_input_gate.weight": ("input_gate",),
    LAYER + "per_layer_projection.weight": ("input_proj",),
    LAYER + "post_per_layer_input_norm.weight": ("input_norm",),
    "model.embed_tokens_per_layer.weight": ("inputs_embed",),
    "model.per_layer_model_projection.weight": ("inputs_proj",),
    "model.per_layer_projection_norm.weight": ("inputs_norm",),
    LAYER + "router.proj.weight": ("router",),
    LAYER + "router.scale": ("router_scale",),
    LAYER + "router.per_expert_scale": ("expert_scale",),
    LAYER + "pre_feedforward_layernorm_2.weight": ("experts_norm",),
    LAYER + "post_feedforward_layernorm_1.weight": ("mlp_out_norm",),
    LAYER + "post_feedforward_layernorm_2.weight": ("experts_out_norm",),
    **_experts(LAYER),
}
QWEN_MOE: Tensors = {**LLAMA, **_ROUTER, **_EXPERTS}


def names_experts(tensors: Tensors) -> bool:
    """Returns True if each expert has tensors of its own that `STACKED_EXPERTS` may replace."""
    return any(name.endswith("experts.{experts}.gate_proj.weight") for name in tensors)


GLM_MOE: Tensors = {**QWEN_MOE, **_SHARED_EXPERTS}
GPT_OSS: Tensors = {
    **LLAMA,
    ATTENTION + "sinks": ("sinks",),
    MLP + "router.weight": ("router",),
    MLP + "router.bias": ("router_bias",),
    MLP + "experts.gate_up_proj": Alternating(("expert_gate", "expert_up")),
    MLP + "experts.gate_up_proj_bias": Alternating(("expert_gate_bias", "expert_up_bias")),
    MLP + "experts.down_proj": Alternating(("expert_down",)),
    MLP + "experts.down_proj_bias": Alternating(("expert_down_bias",)),
}
DEEPSEEK: Tensors = {
    **GLM_MOE,
    ATTENTION + "q_a_proj.weight": ("q_a",),
    ATTENTION + "q_a_layernorm.weight": ("q_a_norm",),
    ATTENTION + "q_b_proj.weight": ("q_b",),
    ATTENTION + "kv_a_proj_with_mqa.weight": ("kv_a",),
    ATTENTION + "kv_a_layernorm.weight": ("kv_a_norm",),
    ATTENTION + "kv_b_proj.weight": ("kv_b",),
}

_SHARED_EXPERT: Tensors = {
    MLP + "shared_expert.gate_proj.weight": ("shared_gate_proj",),
    MLP + "shared_expert.up_proj.weight": ("shared_up_proj",),
    MLP + "shared_expert.down_proj.weight": ("shared_down_proj",),
    MLP + "shared_expert_gate.weight": ("shared_gate",),
}
_DELTA = LAYER + "linear_attn."
_DELTA_NET: Tensors = {
    _DELTA + "conv1d.weight": ("conv_q", "conv_k", "conv_v"),
    _DELTA + "A_log": ("a_log",),
    _DELTA + "dt_bias": ("dt_bias",),
    _DELTA + "norm.weight": ("delta_norm",),
    _DELTA + "out_proj.weight": ("delta_o",),
}
QWEN_NEXT: Tensors = {
    **QWEN_MOE,
    **_SHARED_EXPERT,
    **_DELTA_NET,
    _DELTA + "in_proj_qkvz.weight": ("delta_qkvz",),
    _DELTA + "in_proj_ba.weight": ("delta_ba",),
}
QWEN_35: Tensors = {
    **LLAMA,
    **_DELTA_NET,
    _DELTA + "in_proj_qkv.weight": ("delta_q", "delta_k", "delta_v"),
    _DELTA + "in_proj_z.weight": ("delta_z",),
    _DELTA + "in_proj_b.weight": ("delta_b",),
    _DELTA + "in_proj_a.weight": ("delta_a",),
}
QWEN_35_MOE: Tensors = {**QWEN_35, **QWEN_MOE, **_SHARED_EXPERT}
_BLOCK = "blk.{layers}."
_GGUF: Tensors = {
    "token_embd.weight": ("embed",),
    "output_norm.weight": ("norm",),
    "output.weight": ("head",),
    _BLOCK + "attn_norm.weight": ("attn_norm",),
    _BLOCK + "attn_q.weight": ("q",),
    _BLOCK + "attn_k.weight": ("k",),
    _BLOCK + "attn_v.weight": ("v",),
    _BLOCK + "attn_q.bias": ("q_bias",),
    _BLOCK + "attn_k.bias": ("k_bias",),
    _BLOCK + "attn_v.bias": ("v_bias",),
    _BLOCK + "attn_q_norm.weight": ("q_norm",),
    _BLOCK + "attn_k_norm.weight": ("k_norm",),
    _BLOCK + "attn_output.weight": ("o",),
    _BLOCK + "attn_output.bias": ("o_bias",),
    _BLOCK + "ffn_gate.weight": ("gate",),
    _BLOCK + "ffn_up.weight": ("up",),
    _BLOCK + "ffn_down.weight": ("down",),
    _BLOCK + "ffn_gate_inp.weight": ("router",),
    _BLOCK + "ffn_gate_inp.bias": ("router_bias",),
    _BLOCK + "exp_probs_b.bias": ("correction",),
    _BLOCK + "ffn_gate_exps.weight": Stacked(("expert_gate",)),
    _BLOCK + "ffn_up_exps.weight": Stacked(("expert_up",)),
    _BLOCK + "ffn_down_exps.weight": Stacked(("expert_down",)),
    _BLOCK + "ffn_gate_exps.bias": Stacked(("expert_gate_bias",)),
    _BLOCK + "ffn_up_exps.bias": Stacked(("expert_up_bias",)),
    _BLOCK + "ffn_down_exps.bias": Stacked(("expert_down_bias",)),
    _BLOCK + "ffn_gate_shexp.weight": ("shared_gate_proj",),
    _BLOCK + "ffn_up_shexp.weight": ("shared_up_proj",),
    _BLOCK + "ffn_down_shexp.weight": ("shared_down_proj",),
    _BLOCK + "ffn_gate_inp_shexp.weight": ("shared_gate",),
}
_FFN_NORM: Tensors = {_BLOCK + "ffn_norm.weight": ("mlp_norm",)}
_POST_NORMS: Tensors = {
    _BLOCK + "post_attention_norm.weight": ("attn_post_norm",),
    _BLOCK + "post_ffw_norm.weight": ("mlp_post_norm",),
}
_GGUF_FUSED_MLP: Tensors = {_BLOCK + "ffn_up.weight": ("gate", "up")}
_NORMS_AROUND: Tensors = {**_GGUF, **_FFN_NORM, **_POST_NORMS}

GGUF = Layout({**_GGUF, **_FFN_NORM})
GGUF_LLAMA = Layout(GGUF.tensors, interleaved=True)
GGUF_PHI = Layout({**GGUF.tensors, _BLOCK + "attn_qkv.weight": ("q", "k", "v"), **_GGUF_FUSED_MLP})
GGUF_OLMO = Layout({**_GGUF, **_POST_NORMS})
GGUF_GEMMA = Layout(_NORMS_AROUND)
GGUF_GLM4 = Layout({**_NORMS_AROUND, **_GGUF_FUSED_MLP}, interleaved=True)
# here the norm that follows attention is that before the MLP
GGUF_EXPERTS = Layout({**_GGUF, _BLOCK + "post_attention_norm.weight": ("mlp_norm",)})
GGUF_SINKS = Layout({**GGUF_EXPERTS.tensors, _BLOCK + "attn_sinks.weight": ("sinks",)})
GGUF_DEEPSEEK = Layout(
    {
        **GGUF.tensors,
        _BLOCK + "attn_q_a.weight": ("q_a",),
        _BLOCK + "attn_q_a_norm.weight": ("q_a_norm",),
        _BLOCK + "attn_q_b.weight": ("q_b",),
        _BLOCK + "attn_kv_a_mqa.weight": ("kv_a",),
        _BLOCK + "attn_kv_a_norm.weight": ("kv_a_norm",),
        _BLOCK + "attn_k_b.weight": ("k_b",),
        _BLOCK + "attn_v_b.weight": ("v_b",),
    }
)
_GGUF_DELTA_NET: Tensors = {
    **GGUF_EXPERTS.tensors,
    _BLOCK + "attn_qkv.weight": ("delta_q", "delta_k", "delta_v"),
    _BLOCK + "attn_gate.weight": ("delta_z",),
    _BLOCK + "ssm_conv1d.weight": ("conv_q", "conv_k", "conv_v"),
    _BLOCK + "ssm_a": ("a_log",),
    _BLOCK + "ssm_dt.bias": ("dt_bias",),
    _BLOCK + "ssm_norm.weight": ("delta_norm",),
    _BLOCK + "ssm_out.weight": ("delta_o",),
}
GGUF_QWEN_NEXT = Layout({**_GGUF_DELTA_NET, _BLOCK + "ssm_ba.weight": ("delta_ba",)})
GGUF_QWEN_35 = Layout(
    {
        **_GGUF_DELTA_NET,
        _BLOCK + "ssm_beta.weight": ("delta_b",),
        _BLOCK + "ssm_alpha.weight": ("delta_a",),
    }
)
