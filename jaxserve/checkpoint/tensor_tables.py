"""Names of stored tensors by family: stored tensor -> the parts (see `checkpoint.specs`) that are
stacked in its rows. {layers}: number of the layer."""

from __future__ import annotations

from collections.abc import Mapping

Tensors = Mapping[str, tuple[str, ...]]

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
