"""`FAMILIES`: a row for each supported architecture, with what its models have in common: specs of
a layer's parts, fields of its config.json, names of its tensors.

A new architecture whose parts exist is a row here. A new kind of attention or MLP is a spec in
`checkpoint.specs` besides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jaxserve.checkpoint import config_parts as parts
from jaxserve.checkpoint import delta_parts as delta
from jaxserve.checkpoint import eagle
from jaxserve.checkpoint import expert_parts as experts
from jaxserve.checkpoint import gemma4_parts as gemma4
from jaxserve.checkpoint import latent_parts as latent
from jaxserve.checkpoint import tensor_tables as tables
from jaxserve.checkpoint.fields import FULL, HYBRID_TYPES, LAYER_TYPES, SLIDING
from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.specs import AttentionSpec, MlpSpec, NormSpec


@dataclass(frozen=True)
class Family:
    """Models of one architecture.

    architecture: its name in config.json. multimodal: names of those whose text part it is. gguf,
    gguf_layout: its name and its weights in GGUF files, '' where these are not read. specs: fields
    of `ModelConfig` that all its models have. parts: fields of config.json beyond those of every
    family. allowed: fields that other families must leave at their default. defaults: fields of
    config.json where a config does not state them. layer_types: kinds of its layers. full_every:
    where a config does not name these, the last of each that many layers attends to all tokens, the
    others are of the other kind; 0: there are no such kinds. local_rope: field with the base
    frequency of layers with a window, whose RoPE has no scaling; '': they are as all others.
    interleaved: dimensions 2 i and 2 i + 1 are rotated together, not i and i + half.
    further_layers: checkpoints may hold layers after the last one, which predict further tokens and
    are not needed.
    """

    architecture: str
    multimodal: tuple[str, ...] = ()
    gguf: str = ""
    gguf_layout: tables.Layout = tables.GGUF
    specs: dict[str, Any] = field(default_factory=dict)
    parts: tuple[parts.ConfigPart, ...] = ()
    tensors: tables.Tensors = field(default_factory=lambda: tables.LLAMA)
    allowed: frozenset[str] = frozenset()
    defaults: dict[str, Any] = field(default_factory=dict)
    layer_types: frozenset[str] = LAYER_TYPES
    full_every: int = 0
    local_rope: str = ""
    interleaved: bool = False
    further_layers: bool = False

    @property
    def model_type(self) -> str:
        return self.architecture.removesuffix("ForCausalLM").replace("_", "").lower()


_GEMMA_SPECS: dict[str, Any] = dict(
    mlps=(MlpSpec("gelu_pytorch_tanh"),),
    norms=NormSpec(before=True, after=True, less_one=True),
)
_GEMMA_DEFAULTS: dict[str, Any] = dict(
    num_hidden_layers=26,
    hidden_size=2304,
    intermediate_size=9216,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    query_pre_attn_scalar=256,
    tie_word_embeddings=True,
)
_SOFT_CAPS = frozenset({"attn_logit_softcapping", "final_logit_softcapping"})
_DEEPSEEK: dict[str, Any] = dict(
    max_position_embeddings=4096,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
)
# architectures that are known and not served, and why
REFUSED = dict.fromkeys(
    ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"),
    "each query attends to keys that an indexer chooses, which is not implemented; attention to "
    "all keys would give other tokens",
) | dict.fromkeys(eagle.ARCHITECTURES, "it is a draft head of another model: --drafts=eagle3")
_GLM: dict[str, Any] = dict(
    parts=(parts.BIAS,),
    allowed=frozenset({"attention_bias", "partial_rotary_factor"}),
    defaults=dict(
        num_key_value_heads=2,
        head_dim=128,
        partial_rotary_factor=0.5,
        attention_bias=True,
        max_position_embeddings=131072,
        rms_norm_eps=1.5625e-7,
    ),
    interleaved=True,
)

_DELTA_NET: dict[str, Any] = dict(
    specs=dict(norms=NormSpec(eps=1e-6, less_one=True)),
    allowed=frozenset({"partial_rotary_factor", "attn_output_gate"}),
    layer_types=HYBRID_TYPES,
    full_every=4,
    further_layers=True,
)
_DELTA_DEFAULTS: dict[str, Any] = dict(
    num_attention_heads=16,
    head_dim=256,
    partial_rotary_factor=0.25,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
)
_DELTA_EXPERTS: dict[str, Any] = _DELTA_DEFAULTS | dict(
    num_key_value_heads=2,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    norm_topk_prob=True,
)

FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        gguf="llama",
        gguf_layout=tables.GGUF_LLAMA,
        defaults=dict(max_position_embeddings=2048),
    ),
    "mistral": Family(
        "MistralForCausalLM",
        gguf="llama",
        gguf_layout=tables.GGUF_LLAMA,
        parts=(parts.MISTRAL_WINDOWS,),
        defaults=dict(max_position_embeddings=131072, num_key_value_heads=8),
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        gguf="qwen2",
        specs=dict(mixers=(AttentionSpec(qkv_bias=True),), norms=NormSpec(eps=1e-6)),
        parts=(parts.QWEN_WINDOWS,),
        allowed=frozenset({"attention_bias"}),
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        gguf="qwen3",
        specs=dict(mixers=(AttentionSpec(qk_norm="head"),), norms=NormSpec(eps=1e-6)),
        parts=(parts.QWEN_WINDOWS,),
        defaults=dict(head_dim=128),
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        gguf="phi3",
        gguf_layout=tables.GGUF_PHI,
        parts=(parts.PHI_WINDOW,),
        tensors=tables.PHI,
        allowed=frozenset({"partial_rotary_factor"}),
        defaults=dict(max_position_embeddings=4096, rms_norm_eps=1e-5),
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        gguf="olmo2",
        gguf_layout=tables.GGUF_OLMO,
        specs=dict(
            mixers=(AttentionSpec(qk_norm="all"),), norms=NormSpec(before=False, after=True)
        ),
        tensors=tables.OLMO,
        defaults=dict(max_position_embeddings=2048, rms_norm_eps=1e-5),
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        gguf="olmo2",
        gguf_layout=tables.GGUF_OLMO,
        specs=dict(
            mixers=(AttentionSpec(qk_norm="all"),), norms=NormSpec(before=False, after=True)
        ),
        parts=(parts.TYPED_WINDOWS,),
        tensors=tables.OLMO,
        defaults=dict(
            max_position_embeddings=2048, rms_norm_eps=1e-5, rope_theta=5e5, sliding_window=4096
        ),
        full_every=4,
        local_rope="rope_theta",
    ),
    "granite": Family(
        "GraniteForCausalLM",
        gguf="granite",
        gguf_layout=tables.GGUF_LLAMA,
        specs=dict(mixers=(AttentionSpec(scale=1.0),)),
        parts=(parts.MULTIPLIERS,),
        defaults=dict(max_position_embeddings=2048),
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        gguf="smollm3",
        gguf_layout=tables.GGUF_LLAMA,
        parts=(parts.POSITIONS, parts.SMOLLM_WINDOWS),
        allowed=frozenset({"no_rope_layers"}),
        defaults=dict(num_key_value_heads=4, rope_theta=2e6, tie_word_embeddings=True),
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        gguf="gemma2",
        gguf_layout=tables.GGUF_GEMMA,
        specs=_GEMMA_SPECS,
        parts=(parts.GEMMA, parts.TYPED_WINDOWS),
        tensors=tables.GEMMA,
        allowed=_SOFT_CAPS,
        defaults=_GEMMA_DEFAULTS
        | dict(
            max_position_embeddings=8192,
            sliding_window=4096,
            attn_logit_softcapping=50.0,
            final_logit_softcapping=30.0,
        ),
        full_every=2,
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        gguf="gemma3",
        gguf_layout=tables.GGUF_GEMMA,
        multimodal=("Gemma3ForConditionalGeneration",),
        specs=_GEMMA_SPECS | dict(mixers=(AttentionSpec(qk_norm="head"),)),
        parts=(parts.GEMMA, parts.TYPED_WINDOWS),
        tensors=tables.GEMMA,
        allowed=_SOFT_CAPS,
        defaults=_GEMMA_DEFAULTS
        | dict(
            vocab_size=262208,
            max_position_embeddings=131072,
            sliding_window=4096,
            rope_theta=1e6,
            rope_local_base_freq=1e4,
        ),
        full_every=6,
        local_rope="rope_local_base_freq",
    ),
    "gemma4": Family(
        "Gemma4ForCausalLM",
        multimodal=("Gemma4ForConditionalGeneration",),
        specs=dict(
            mixers=(gemma4.ATTENTION,),
            mlps=(MlpSpec(gemma4.ACTIVATION),),
            norms=NormSpec(before=True, after=True, scalar=True),
        ),
        parts=(gemma4.GEMMA4,),
        tensors=tables.GEMMA4,
        allowed=frozenset({"final_logit_softcapping", "use_bidirectional_attention"}),
        defaults=dict(
            vocab_size=262144,
            hidden_size=2304,
            intermediate_size=9216,
            num_hidden_layers=30,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=256,
            max_position_embeddings=131072,
            sliding_window=512,
            tie_word_embeddings=True,
            rope_parameters={
                SLIDING: {"rope_type": "default", "rope_theta": 1e4},
                FULL: {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1e6,
                },
            },
        ),
        full_every=6,
    ),
    "glm": Family(
        "GlmForCausalLM",
        tensors={**tables.SHARED, **tables.NORMS_BEFORE, **tables.SPLIT_QKV, **tables.FUSED_MLP},
        **_GLM,
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        gguf="glm4",
        gguf_layout=tables.GGUF_GLM4,
        specs=dict(norms=NormSpec(before=True, after=True)),
        tensors=tables.GLM4,
        **_GLM,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        gguf="llama",
        gguf_layout=tables.GGUF_LLAMA,
        parts=(experts.MIXTRAL, parts.TYPED_WINDOWS),
        tensors=tables.MIXTRAL,
        defaults=dict(
            max_position_embeddings=131072,
            rope_theta=1e6,
            rms_norm_eps=1e-5,
            num_key_value_heads=8,
            num_local_experts=8,
            num_experts_per_tok=2,
        ),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        gguf="qwen3moe",
        specs=dict(mixers=(AttentionSpec(qk_norm="head"),), norms=NormSpec(eps=1e-6)),
        parts=(experts.QWEN, parts.QWEN_WINDOWS),
        tensors=tables.QWEN_MOE,
        defaults=dict(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768),
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        gguf="gpt-oss",
        gguf_layout=tables.GGUF_SINKS,
        specs=dict(mixers=(AttentionSpec(qkv_bias=True, o_bias=True, sinks=True),)),
        parts=(experts.GPT_OSS, parts.TYPED_WINDOWS),
        tensors=tables.GPT_OSS,
        allowed=frozenset({"attention_bias"}),
        defaults=dict(
            max_position_embeddings=131072,
            rope_theta=150000.0,
            rms_norm_eps=1e-5,
            head_dim=64,
            num_local_experts=128,
            num_experts_per_tok=4,
            sliding_window=128,
        ),
        full_every=2,
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        gguf="glm4moe",
        gguf_layout=tables.GGUF_EXPERTS,
        parts=(parts.BIAS, experts.GLM),
        tensors=tables.GLM_MOE,
        allowed=frozenset({"attention_bias", "partial_rotary_factor", "use_qk_norm"}),
        defaults=dict(
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            partial_rotary_factor=0.5,
            num_key_value_heads=8,
            n_routed_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=1408,
        ),
        further_layers=True,
    ),
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM",
        gguf="minimax-m2",
        specs=dict(mixers=(AttentionSpec(qk_norm="all"),)),
        parts=(experts.MINIMAX,),
        tensors=tables.MIXTRAL,
        allowed=frozenset({"partial_rotary_factor", "use_qk_norm"}),
        defaults=dict(
            max_position_embeddings=196608,
            head_dim=128,
            num_key_value_heads=8,
            num_local_experts=256,
            num_experts_per_tok=8,
        ),
        further_layers=True,
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        gguf="deepseek2",
        gguf_layout=tables.GGUF_DEEPSEEK,
        parts=(latent.LATENT, latent.V2_EXPERTS),
        tensors=tables.DEEPSEEK,
        allowed=frozenset({"topk_method", "scoring_func"}),
        defaults=_DEEPSEEK,
        further_layers=True,
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        gguf="deepseek2",
        gguf_layout=tables.GGUF_DEEPSEEK,
        parts=(latent.LATENT, latent.V3_EXPERTS),
        tensors=tables.DEEPSEEK,
        defaults=_DEEPSEEK | dict(n_group=8, topk_group=4, first_k_dense_replace=3),
        further_layers=True,
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        gguf="qwen3next",
        gguf_layout=tables.GGUF_QWEN_NEXT,
        parts=(delta.DELTA_NET, experts.QWEN_SHARED),
        tensors=tables.QWEN_NEXT,
        defaults=_DELTA_EXPERTS
        | dict(num_experts=512, num_experts_per_tok=10, intermediate_size=5632),
        **_DELTA_NET,
    ),
    "qwen3_5": Family(
        "Qwen3_5ForCausalLM",
        multimodal=("Qwen3_5ForConditionalGeneration",),
        gguf="qwen35",
        gguf_layout=tables.GGUF_QWEN_35,
        parts=(delta.DELTA_NET,),
        tensors=tables.QWEN_35,
        defaults=_DELTA_DEFAULTS | dict(num_key_value_heads=4, intermediate_size=12288),
        **_DELTA_NET,
    ),
    "qwen3_5_moe": Family(
        "Qwen3_5MoeForCausalLM",
        multimodal=("Qwen3_5MoeForConditionalGeneration",),
        gguf="qwen35moe",
        gguf_layout=tables.GGUF_QWEN_35,
        parts=(delta.DELTA_NET, experts.QWEN_SHARED),
        tensors=tables.QWEN_35_MOE,
        # there is no dense MLP
        defaults=_DELTA_EXPERTS
        | dict(num_experts=256, num_experts_per_tok=8, intermediate_size=512),
        **_DELTA_NET,
    ),
}


def layout(model: ModelConfig) -> tables.Layout:
    """Returns how the checkpoint of a model holds its weights."""
    family = FAMILIES[model.family]
    if model.gguf:
        return family.gguf_layout
    return tables.Layout(family.tensors, family.interleaved)
