"""`MODELS`: the configs of well-known models, for planning, benchmarks, simulations and random
weights. The config of a checkpoint is read from its own files by `checkpoint.model_config`."""

from __future__ import annotations

from typing import Any

from jaxserve.checkpoint.delta_net import DeltaNetSpec
from jaxserve.checkpoint.families import FAMILIES
from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.rope import Rope, RopeScaling, llama3_scaling
from jaxserve.checkpoint.specs import AttentionSpec, ExpertsSpec, Multipliers, NormSpec, RouterSpec


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    router = RouterSpec("chosen", bias=True)
    spec = ExpertsSpec(experts, 4, 2880, router, activation="clamped", biases=True)
    kinds = dict(mlps=(spec,), windows=(128, None) * (layers // 2))
    return _GPT_OSS | kinds | dict(layers=layers)


_TINY = dict(
    layers=2,
    d_model=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    d_ff=128,
    vocab=512,
    max_len=2**24,
    eos_ids=(2,),
    bos_id=1,
)
_SMOLLM2 = dict(
    layers=30,
    d_model=576,
    heads=9,
    kv_heads=3,
    head_dim=64,
    d_ff=1536,
    vocab=49152,
    max_len=8192,
    ropes=(Rope(1e5),),
    tied=True,
    eos_ids=(2,),
    bos_id=1,
)
_LLAMA2 = dict(
    layers=32,
    d_model=4096,
    heads=32,
    kv_heads=32,
    head_dim=128,
    d_ff=11008,
    vocab=32000,
    max_len=4096,
    eos_ids=(2,),
    bos_id=1,
)
_LLAMA3 = dict(
    layers=32,
    d_model=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    d_ff=14336,
    vocab=128256,
    max_len=8192,
    ropes=(Rope(5e5),),
    eos_ids=(128001, 128009),
    bos_id=128000,
)
_LLAMA31 = _LLAMA3 | dict(
    max_len=131072,
    ropes=(Rope(5e5, llama3_scaling(8.0)),),
    eos_ids=(128001, 128008, 128009),
)
_LLAMA32 = _LLAMA31 | dict(
    layers=16,
    d_model=2048,
    head_dim=64,
    d_ff=8192,
    ropes=(Rope(5e5, llama3_scaling(32.0)),),
    tied=True,
)
_MISTRAL = _LLAMA2 | dict(
    family="mistral",
    kv_heads=8,
    d_ff=14336,
    max_len=32768,
)
_QWEN2 = dict(
    family="qwen2",
    layers=24,
    d_model=896,
    heads=14,
    kv_heads=2,
    head_dim=64,
    d_ff=4864,
    vocab=151936,
    max_len=32768,
    ropes=(Rope(1e6),),
    tied=True,
    eos_ids=(151645, 151643),
)
_QWEN3 = dict(
    family="qwen3",
    layers=28,
    d_model=1024,
    heads=16,
    kv_heads=8,
    head_dim=128,
    d_ff=3072,
    vocab=151936,
    max_len=40960,
    ropes=(Rope(1e6),),
    tied=True,
    eos_ids=(151645, 151643),
)
_LARGE_QWEN2 = _QWEN2 | dict(kv_heads=8, head_dim=128, vocab=152064, tied=False)
_QWEN2_SIZES: dict[str, dict[str, Any]] = {
    "0.5b": _QWEN2,
    "1.5b": _QWEN2 | dict(layers=28, d_model=1536, heads=12, head_dim=128, d_ff=8960),
    "3b": _QWEN2 | dict(layers=36, d_model=2048, heads=16, head_dim=128, d_ff=11008),
    "7b": _LARGE_QWEN2 | dict(layers=28, d_model=3584, heads=28, kv_heads=4, d_ff=18944),
    "14b": _LARGE_QWEN2 | dict(layers=48, d_model=5120, heads=40, d_ff=13824),
    "32b": _LARGE_QWEN2 | dict(layers=64, d_model=5120, heads=40, d_ff=27648),
    "72b": _LARGE_QWEN2 | dict(layers=80, d_model=8192, heads=64, d_ff=29568),
}
_PHI4 = dict(
    family="phi3",
    layers=40,
    d_model=5120,
    heads=40,
    kv_heads=10,
    head_dim=128,
    d_ff=17920,
    vocab=100352,
    max_len=16384,
    ropes=(Rope(2.5e5),),
    eos_ids=(100265,),
    bos_id=100257,
)
_OLMO2 = dict(
    family="olmo2",
    layers=32,
    d_model=4096,
    heads=32,
    kv_heads=32,
    head_dim=128,
    d_ff=11008,
    vocab=100352,
    max_len=4096,
    norms=NormSpec(eps=1e-6, before=False, after=True),
    ropes=(Rope(5e5),),
    eos_ids=(100257,),
)
_GRANITE31 = dict(
    family="granite",
    layers=40,
    d_model=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    d_ff=12800,
    vocab=49155,
    max_len=131072,
    mixers=(AttentionSpec(scale=0.0078125),),
    multipliers=Multipliers(embedding=12.0, residual=0.22, logits_divisor=16.0),
    ropes=(Rope(1e7),),
    tied=True,
    eos_ids=(0,),
    bos_id=0,
)
_QWEN3_MOE = _QWEN3 | dict(
    family="qwen3_moe",
    layers=48,
    d_model=2048,
    heads=32,
    kv_heads=4,
    d_ff=6144,
    mlps=(ExpertsSpec(128, 8, 768),),
    tied=False,
)
_MIXTRAL = _MISTRAL | dict(family="mixtral", mlps=(ExpertsSpec(8, 2, 14336),), ropes=(Rope(1e6),))
_GPT_OSS = dict(
    family="gpt_oss",
    d_model=2880,
    heads=64,
    kv_heads=8,
    head_dim=64,
    d_ff=2880,
    vocab=201088,
    max_len=131072,
    ropes=(Rope(150000.0, RopeScaling("yarn", 32.0, 4096, truncate=False)),),
    eos_ids=(200002, 199999, 200012),
)
_QWEN3_NEXT = _QWEN3 | dict(
    family="qwen3_next",
    layers=48,
    d_model=2048,
    kv_heads=2,
    head_dim=256,
    d_ff=5632,
    max_len=262144,
    mixers=(
        *(DeltaNetSpec(16, 32, 128, 128, 4),) * 3,
        AttentionSpec(qk_norm="head", gate=True),
    )
    * 12,
    mlps=(ExpertsSpec(512, 10, 512, shared=512, shared_gate=True),),
    ropes=(Rope(1e7, share=0.25),),
    tied=False,
)
_ROWS: dict[str, dict[str, Any]] = {
    "tiny": _TINY,
    "tiny-window": _TINY | dict(family="mistral", windows=(64,)),
    "smollm2-135m": _SMOLLM2,
    "smollm2-360m": _SMOLLM2 | dict(layers=32, d_model=960, heads=15, kv_heads=5, d_ff=2560),
    "smollm2-1.7b": _SMOLLM2
    | dict(layers=24, d_model=2048, heads=32, kv_heads=32, d_ff=8192, ropes=(Rope(1.3e5),)),
    "llama2-7b": _LLAMA2,
    "llama2-13b": _LLAMA2 | dict(layers=40, d_model=5120, heads=40, kv_heads=40, d_ff=13824),
    "llama2-70b": _LLAMA2 | dict(layers=80, d_model=8192, heads=64, kv_heads=8, d_ff=28672),
    "llama3-8b": _LLAMA3,
    "llama3-70b": _LLAMA3 | dict(layers=80, d_model=8192, heads=64, d_ff=28672),
    "llama3.1-8b": _LLAMA31,
    "llama3.1-70b": _LLAMA31 | dict(layers=80, d_model=8192, heads=64, d_ff=28672),
    "llama3.1-405b": _LLAMA31 | dict(layers=126, d_model=16384, heads=128, d_ff=53248),
    "llama3.2-1b": _LLAMA32,
    "llama3.2-3b": _LLAMA32 | dict(layers=28, d_model=3072, heads=24, head_dim=128),
    "mistral-7b-v0.1": _MISTRAL | dict(windows=(4096,)),
    "mistral-7b-v0.3": _MISTRAL | dict(vocab=32768, ropes=(Rope(1e6),)),
    **{f"qwen2-{size}": _QWEN2_SIZES[size] for size in ("0.5b", "1.5b", "7b", "72b")},
    **{f"qwen2.5-{size}": row for size, row in _QWEN2_SIZES.items()},
    "qwen3-0.6b": _QWEN3,
    "qwen3-1.7b": _QWEN3 | dict(d_model=2048, d_ff=6144),
    "qwen3-4b": _QWEN3 | dict(layers=36, d_model=2560, heads=32, d_ff=9728),
    "qwen3-8b": _QWEN3 | dict(layers=36, d_model=4096, heads=32, d_ff=12288, tied=False),
    "qwen3-14b": _QWEN3 | dict(layers=40, d_model=5120, heads=40, d_ff=17408, tied=False),
    "qwen3-32b": _QWEN3 | dict(layers=64, d_model=5120, heads=64, d_ff=25600, tied=False),
    "phi4": _PHI4,
    "olmo2-7b": _OLMO2,
    "olmo2-13b": _OLMO2 | dict(layers=40, d_model=5120, heads=40, kv_heads=40, d_ff=13824),
    "granite3.1-8b": _GRANITE31,
    "qwen3-30b-a3b": _QWEN3_MOE,
    "qwen3-235b-a22b": _QWEN3_MOE
    | dict(layers=94, d_model=4096, heads=64, d_ff=12288, mlps=(ExpertsSpec(128, 8, 1536),)),
    "mixtral-8x7b": _MIXTRAL,
    "qwen3-next-80b-a3b": _QWEN3_NEXT,
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
}


def _model(name: str, family: str = "llama", **fields: Any) -> ModelConfig:
    """Adds what the family says to the fields of a row."""
    return ModelConfig(name=name, family=family, **FAMILIES[family].specs | fields)


MODELS = {name: _model(name, **row) for name, row in _ROWS.items()}
