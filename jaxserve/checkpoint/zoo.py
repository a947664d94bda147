"""`ModelConfig`, which says all that differs between the supported models, and `MODELS`, the
configs of well-known models for planning, benchmarks and tests.

The config of a checkpoint is read from its own files by `checkpoint.model_config`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

from jaxserve.settings.schema import ConfigError


@dataclass(frozen=True)
class RopeScaling:
    """RoPE scaling for contexts longer than the model was trained with. kind: linear, llama3 or
    yarn; the other fields have the meaning they have in transformers' modeling_rope_utils."""

    kind: str
    factor: float
    original_max_len: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a decoder.

    sliding_window w: a token attends to itself and the w - 1 tokens before it (None: to all), in
    the layers that `sliding_layers` marks (None: in all layers). max_len: most tokens of a
    sequence. tied: the LM head is the embedding. eos_ids: tokens that end a completion. stored: the
    type in which a checkpoint holds the weights, or was made from; bfloat16 where it does not say.
    """

    name: str
    layers: int
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    d_ff: int
    vocab: int
    max_len: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] | None = None
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    stored: str = "bfloat16"

    @property
    def parameters(self) -> int:
        """Number of weights; a tied head is not counted again."""
        D = self.d_model
        N = self.heads
        K = self.kv_heads
        H = self.head_dim
        attention = (
            D * (N + 2 * K) * H + N * H * D + (N + 2 * K) * H * self.qkv_bias + 2 * H * self.qk_norm
        )
        return (
            self.layers * (attention + 3 * D * self.d_ff + 2 * D)
            + D
            + self.vocab * D * (1 if self.tied else 2)
        )

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of KV cache per token, over all layers, for numbers of `itemsize` bytes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize

    def with_tp(self, tp: int) -> ModelConfig:
        """The config for `tp` ranks: kv heads are repeated if there are fewer than ranks. Errors:
        ConfigError if heads or d_ff do not divide, with the degrees that work."""
        if not self.splits(tp):
            works = [d for d in range(1, self.heads + 1) if self.splits(d)]
            raise ConfigError(
                "mesh",
                f"tp={tp} cannot split {self.name} "
                f"({self.heads} heads, {self.kv_heads} kv heads, ffn {self.d_ff}); "
                f"these can: {', '.join(map(str, works))}",
            )
        return replace(self, kv_heads=max(self.kv_heads, tp))

    def splits(self, tp: int) -> bool:
        """Whether so many ranks can share the model; kv heads may be repeated."""
        heads = self.kv_heads % tp == 0 or (tp % self.kv_heads == 0 and self.heads % tp == 0)
        return heads and self.d_ff % tp == 0


def layers_of(config: ModelConfig, spp: int) -> list[range]:
    """Splits the layers into `spp` contiguous stages whose sizes differ by at most one. Errors:
    ConfigError for more stages than layers."""
    if not 1 <= spp <= config.layers:
        raise ConfigError(
            "mesh",
            f"spp={spp} must be from 1 to {config.layers}, the number of layers of {config.name}",
        )
    ends = [config.layers * s // spp for s in range(spp + 1)]
    return [range(a, b) for a, b in itertools.pairwise(ends)]


def llama3_scaling(factor: float) -> RopeScaling:
    """RoPE scaling of the Llama 3.1 and 3.2 models, which differ only in the factor."""
    return RopeScaling(
        "llama3", factor, original_max_len=8192, low_freq_factor=1.0, high_freq_factor=4.0
    )


_SMOL = dict(rope_theta=1e5, tied=True, eos_ids=(2,), bos_id=1)
_LLAMA2 = dict(eos_ids=(2,), bos_id=1)
_LLAMA3 = dict(rope_theta=5e5, eos_ids=(128001, 128009), bos_id=128000)
_LLAMA31 = dict(
    rope_theta=5e5,
    rope_scaling=llama3_scaling(8.0),
    eos_ids=(128001, 128008, 128009),
    bos_id=128000,
)
_LLAMA32 = dict(_LLAMA31, rope_scaling=llama3_scaling(32.0), tied=True)
_QWEN2 = dict(rope_theta=1e6, norm_eps=1e-6, qkv_bias=True, eos_ids=(151645, 151643))
_QWEN3 = dict(rope_theta=1e6, norm_eps=1e-6, qk_norm=True, eos_ids=(151645, 151643))

_ROWS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    #                  L    D      N    K   H    F      V       most tokens
    "tiny": ((2, 64, 4, 2, 16, 128, 512, 2**24), dict(eos_ids=(2,), bos_id=1)),
    "tiny-window": (
        (2, 64, 4, 2, 16, 128, 512, 2**24),
        dict(eos_ids=(2,), bos_id=1, sliding_window=64),
    ),
    "smollm2-135m": ((30, 576, 9, 3, 64, 1536, 49152, 8192), _SMOL),
    "smollm2-360m": ((32, 960, 15, 5, 64, 2560, 49152, 8192), _SMOL),
    "smollm2-1.7b": ((24, 2048, 32, 32, 64, 8192, 49152, 8192), dict(_SMOL, rope_theta=130000.0)),
    "llama2-7b": ((32, 4096, 32, 32, 128, 11008, 32000, 4096), _LLAMA2),
    "llama2-13b": ((40, 5120, 40, 40, 128, 13824, 32000, 4096), _LLAMA2),
    "llama2-70b": ((80, 8192, 64, 8, 128, 28672, 32000, 4096), _LLAMA2),
    "llama3-8b": ((32, 4096, 32, 8, 128, 14336, 128256, 8192), _LLAMA3),
    "llama3-70b": ((80, 8192, 64, 8, 128, 28672, 128256, 8192), _LLAMA3),
    "llama3.1-8b": ((32, 4096, 32, 8, 128, 14336, 128256, 131072), _LLAMA31),
    "llama3.1-70b": ((80, 8192, 64, 8, 128, 28672, 128256, 131072), _LLAMA31),
    "llama3.1-405b": ((126, 16384, 128, 8, 128, 53248, 128256, 131072), _LLAMA31),
    "llama3.2-1b": ((16, 2048, 32, 8, 64, 8192, 128256, 131072), _LLAMA32),
    "llama3.2-3b": ((28, 3072, 24, 8, 128, 8192, 128256, 131072), _LLAMA32),
    "mistral-7b-v0.1": (
        (32, 4096, 32, 8, 128, 14336, 32000, 32768),
        dict(_LLAMA2, sliding_window=4096),
    ),
    "mistral-7b-v0.3": ((32, 4096, 32, 8, 128, 14336, 32768, 32768), dict(_LLAMA2, rope_theta=1e6)),
    "qwen2-0.5b": ((24, 896, 14, 2, 64, 4864, 151936, 32768), dict(_QWEN2, tied=True)),
    "qwen2-1.5b": ((28, 1536, 12, 2, 128, 8960, 151936, 32768), dict(_QWEN2, tied=True)),
    "qwen2-7b": ((28, 3584, 28, 4, 128, 18944, 152064, 32768), _QWEN2),
    "qwen2-72b": ((80, 8192, 64, 8, 128, 29568, 152064, 32768), _QWEN2),
    "qwen2.5-0.5b": ((24, 896, 14, 2, 64, 4864, 151936, 32768), dict(_QWEN2, tied=True)),
    "qwen2.5-1.5b": ((28, 1536, 12, 2, 128, 8960, 151936, 32768), dict(_QWEN2, tied=True)),
    "qwen2.5-3b": ((36, 2048, 16, 2, 128, 11008, 151936, 32768), dict(_QWEN2, tied=True)),
    "qwen2.5-7b": ((28, 3584, 28, 4, 128, 18944, 152064, 32768), _QWEN2),
    "qwen2.5-14b": ((48, 5120, 40, 8, 128, 13824, 152064, 32768), _QWEN2),
    "qwen2.5-32b": ((64, 5120, 40, 8, 128, 27648, 152064, 32768), _QWEN2),
    "qwen2.5-72b": ((80, 8192, 64, 8, 128, 29568, 152064, 32768), _QWEN2),
    "qwen3-0.6b": ((28, 1024, 16, 8, 128, 3072, 151936, 40960), dict(_QWEN3, tied=True)),
    "qwen3-1.7b": ((28, 2048, 16, 8, 128, 6144, 151936, 40960), dict(_QWEN3, tied=True)),
    "qwen3-4b": ((36, 2560, 32, 8, 128, 9728, 151936, 40960), dict(_QWEN3, tied=True)),
    "qwen3-8b": ((36, 4096, 32, 8, 128, 12288, 151936, 40960), _QWEN3),
    "qwen3-14b": ((40, 5120, 40, 8, 128, 17408, 151936, 40960), _QWEN3),
    "qwen3-32b": ((64, 5120, 64, 8, 128, 25600, 151936, 40960), _QWEN3),
}
MODELS: dict[str, ModelConfig] = {
    name: ModelConfig(name, *shape, **rest) for name, (shape, rest) in _ROWS.items()
}
