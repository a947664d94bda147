"""Converts a Hugging Face config.json or the metadata of a GGUF file to a `ModelConfig`.

A config that asks for anything that the decoder does not support is refused here, before a weight
is read. Nothing in it is executed; `auto_map`, which names code, is ignored.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.checkpoint.model_paths import CheckpointError
from jaxserve.checkpoint.zoo import ModelConfig, RopeScaling, llama3_scaling


@dataclass(frozen=True)
class _Family:
    """Defaults of an architecture that its config need not state; gguf: its name in GGUF files."""

    gguf: str
    qkv_bias: bool = False
    qk_norm: bool = False
    max_len: int = 32768
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    window: int | None = None  # sliding window if the config has no `sliding_window` key


_FAMILIES = {
    "LlamaForCausalLM": _Family("llama", max_len=2048),
    "MistralForCausalLM": _Family("llama", max_len=131072, window=4096),
    "Qwen2ForCausalLM": _Family("qwen2", qkv_bias=True, window=4096),
    "Qwen3ForCausalLM": _Family("qwen3", qk_norm=True, window=4096),
}
_LIMIT = 2**31 - 1
_MAX_LAYERS = 10_000  # so that listing every tensor of a made-up config ends soon


def from_hf(config: dict, generation: dict | None = None, name: str = "") -> ModelConfig:
    """Converts config.json (and generation_config.json) to a ModelConfig; name: of the model, if
    the config has none to prefer. Errors: CheckpointError that names the unsupported field."""
    read = _Fields(config)
    architecture = _architecture(config)
    family = _FAMILIES[architecture]
    heads = read.count("num_attention_heads")
    max_len = read.count("max_position_embeddings", family.max_len)
    theta, scaling = _hf_rope(config, family, max_len)
    layers = read.count("num_hidden_layers", high=_MAX_LAYERS)
    window, sliding_layers = _hf_sliding(config, architecture, layers)
    return _checked(
        ModelConfig(
            name=name or str(config.get("_name_or_path") or architecture),
            layers=layers,
            d_model=read.count("hidden_size"),
            heads=heads,
            kv_heads=read.count(
                "num_key_value_heads", 8 if architecture == "MistralForCausalLM" else heads
            ),
            head_dim=read.count(
                "head_dim",
                128 if architecture == "Qwen3ForCausalLM" else read.count("hidden_size") // heads,
            ),
            d_ff=read.count("intermediate_size"),
            vocab=read.count("vocab_size"),
            max_len=_served_len(max_len, scaling),
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=read.number("rms_norm_eps", family.norm_eps),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            sliding_window=window,
            sliding_layers=sliding_layers,
            eos_ids=_ids((generation or {}).get("eos_token_id"), config.get("eos_token_id")),
            bos_id=_first(config.get("bos_token_id")),
            stored=_stored(config),
        )
    )


def _stored(config: dict) -> str:
    """The type of the weights; of others than those known here bfloat16."""
    stored = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    return stored if stored in ("float32", "float16") else "bfloat16"


def to_hf(config: ModelConfig) -> dict:
    """Converts a ModelConfig to a config.json from which `from_hf` gives the same ModelConfig."""
    family = {(f.qkv_bias, f.qk_norm): name for name, f in reversed(_FAMILIES.items())}
    architecture = family[config.qkv_bias, config.qk_norm]
    if architecture == "LlamaForCausalLM" and config.sliding_window:
        architecture = "MistralForCausalLM"
    sliding = config.sliding_layers or (config.sliding_window is not None,) * config.layers
    return {
        "architectures": [architecture],
        "model_type": architecture.removesuffix("ForCausalLM").lower(),
        "_name_or_path": config.name,
        "hidden_act": "silu",
        "num_hidden_layers": config.layers,
        "hidden_size": config.d_model,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.d_ff,
        "vocab_size": config.vocab,
        "max_position_embeddings": config.max_len,
        "rope_theta": config.rope_theta,
        "rope_scaling": _to_hf_scaling(config.rope_scaling),
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
        "layer_types": ["sliding_attention" if s else "full_attention" for s in sliding],
        "eos_token_id": list(config.eos_ids),
        "bos_token_id": config.bos_id,
        "torch_dtype": config.stored,
    }


def from_gguf(
    fields: dict, name: str = "", tied: bool = False, rope_factors: Sequence[float] | None = None
) -> ModelConfig:
    """Converts the metadata of a GGUF file to a ModelConfig.

    tied: the file has no `output.weight`. rope_factors: its `rope_freqs.weight`, which is how the
    format stores Llama 3 scaling. Errors: CheckpointError that names the unsupported field.
    """
    arch = fields.get("general.architecture")
    family = next((f for f in _FAMILIES.values() if f.gguf == arch), None)
    if family is None:
        known = sorted({family.gguf for family in _FAMILIES.values()})
        raise CheckpointError(f"GGUF architecture {arch!r} is not one of {', '.join(known)}")
    read = _Fields(fields, f"{arch}.")
    if read.count("expert_count", 0, low=0):
        raise CheckpointError(f"{arch}.expert_count: mixtures of experts are not supported")
    heads = read.count("attention.head_count")
    d_model = read.count("embedding_length")
    head_dim = read.count("attention.key_length", d_model // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (other := read.count(key, head_dim)) != head_dim:
            raise CheckpointError(
                f"{arch}.{key}: {other} differs from the head size {head_dim}, "
                "which is not supported"
            )
    theta = read.number("rope.freq_base", 10000.0)
    max_len = read.count("context_length")
    scaling = _gguf_scaling(read, max_len, rope_factors, (theta, head_dim))
    ends = [fields.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    return _checked(
        ModelConfig(
            name=name or str(fields.get("general.name") or arch),
            layers=read.count("block_count", high=_MAX_LAYERS),
            d_model=d_model,
            heads=heads,
            kv_heads=read.count("attention.head_count_kv", heads),
            head_dim=head_dim,
            d_ff=read.count("feed_forward_length"),
            vocab=read.count("vocab_size", len(fields.get("tokenizer.ggml.tokens", ()))),
            max_len=max_len,
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=read.number("attention.layer_norm_rms_epsilon", 1e-5),
            tied=tied,
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            sliding_window=read.count("attention.sliding_window", 0, low=0) or None,
            eos_ids=_ids(*ends),
            bos_id=_first(fields.get("tokenizer.ggml.bos_token_id")),
        )
    )


class _Fields:
    """Typed access to the fields of a config; defaults replace null and missing values."""

    def __init__(self, fields: dict, prefix: str = ""):
        self.fields = fields
        self.prefix = prefix

    def count(self, key: str, default: int | None = None, low: int = 1, high: int = _LIMIT) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise CheckpointError(
                f"{self.prefix}{key}: must be a whole number from {low} to {high}, "
                f"not {str(value)[:100]!r}"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not (math.isfinite(value) and value > 0)
        ):
            raise CheckpointError(f"{self.prefix}{key}: must be a positive number, not {value!r}")
        return float(value)

    def optional(self, key: str) -> float | None:
        return None if self._get(key, None, required=False) is None else self.number(key)

    def _get(self, key: str, default: Any, required: bool = True) -> Any:
        value = self.fields.get(self.prefix + key)
        if value is None and default is None and required:
            raise CheckpointError(f"{self.prefix}{key}: is missing")
        return default if value is None else value


def _architecture(config: dict) -> str:
    """The architecture that the config names. Errors: CheckpointError if it is not supported, or if
    the config asks for something that the decoder does not support."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if name not in _FAMILIES:
        raise CheckpointError(
            f"architecture {name!r} is not supported (auto_map is never run); "
            f"these are: {', '.join(_FAMILIES)}"
        )
    wanted = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "partial_rotary_factor": 1.0,
        "quantization_config": None,
    }
    if name == "Qwen2ForCausalLM":
        del wanted["attention_bias"]  # its biases are part of the architecture
    for key, value in wanted.items():
        if config.get(key) not in (value, None):
            raise CheckpointError(
                f"{key}: {config[key]!r} is not supported with {name}, only {value!r}"
            )
    return name


def _hf_rope(config: dict, family: _Family, max_len: int) -> tuple[float, RopeScaling | None]:
    """RoPE base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and
    `rope_scaling` (before)."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, dict) or any(isinstance(v, dict) for v in given.values()):
        raise CheckpointError(
            f"rope_parameters: {given!r} is not one set of parameters for all layers"
        )
    top = {
        "rope_theta": config.get("rope_theta"),
        "original_max_position_embeddings": config.get("original_max_position_embeddings"),
    }
    read = _Fields({**top, **{k: v for k, v in given.items() if v is not None}})
    theta = read.number("rope_theta", family.rope_theta)
    if given.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise CheckpointError(
            f"partial_rotary_factor: {given['partial_rotary_factor']!r} is not supported"
        )
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind, read.number("factor"))
    if kind == "llama3":
        original = read.count("original_max_position_embeddings")
        low = read.number("low_freq_factor")
        high = read.number("high_freq_factor")
        if not low < high:
            raise CheckpointError(f"low_freq_factor: {low} is not below high_freq_factor {high}")
        return theta, RopeScaling(kind, read.number("factor"), original, low, high)
    if kind == "yarn":
        original = read.count("original_max_position_embeddings", max_len)
        optional: dict[str, Any] = {
            key: read.optional(key) for key in ("attention_factor", "mscale", "mscale_all_dim")
        }
        return theta, RopeScaling(
            kind,
            read.number("factor", max_len / original),
            original,
            beta_fast=read.number("beta_fast", 32.0),
            beta_slow=read.number("beta_slow", 1.0),
            truncate=bool(given.get("truncate", True)),
            **optional,
        )
    raise CheckpointError(f"rope scaling {kind!r} is not one of default, linear, llama3, yarn")


def _to_hf_scaling(scaling: RopeScaling | None) -> dict | None:
    if scaling is None:
        return None
    rest = dataclasses.asdict(scaling)
    return {
        "rope_type": rest.pop("kind"),
        "original_max_position_embeddings": rest.pop("original_max_len") or None,
        **rest,
    }


def _served_len(max_len: int, scaling: RopeScaling | None) -> int:
    """Most tokens of a sequence; YaRN configs may state the length before scaling."""
    if scaling is None or scaling.kind != "yarn":
        return max_len
    return max(max_len, int(scaling.factor * scaling.original_max_len))


def _hf_sliding(
    config: dict, architecture: str, layers: int
) -> tuple[int | None, tuple[bool, ...] | None]:
    """Sliding window and the layers that have it. A Qwen config's window applies only with
    `use_sliding_window`, from layer `max_window_layers` on."""
    window = config.get("sliding_window", _FAMILIES[architecture].window)
    qwen = architecture.startswith("Qwen")
    if (
        window is None
        or architecture == "LlamaForCausalLM"
        or (qwen and not config.get("use_sliding_window", False))
    ):
        return None, None
    window = _Fields({"sliding_window": window}).count("sliding_window")
    types = config.get("layer_types")
    if types is None:
        first = _Fields(config).count("max_window_layers", 28, low=0) if qwen else 0
        marks = tuple(i >= first for i in range(layers))
    elif (
        isinstance(types, list)
        and len(types) == layers
        and set(types) <= {"sliding_attention", "full_attention"}
    ):
        marks = tuple(t == "sliding_attention" for t in types)
    else:
        raise CheckpointError(
            f"layer_types: must be sliding_attention or full_attention for each of {layers} layers"
        )
    return (window, None if all(marks) else marks) if any(marks) else (None, None)


def _gguf_scaling(
    read: _Fields, max_len: int, rope_factors: Sequence[float] | None, rope: tuple[float, int]
) -> RopeScaling | None:
    if rope_factors is not None:
        return _llama3_from_factors(rope_factors, *rope)
    kind = read.fields.get(f"{read.prefix}rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return RopeScaling(kind, read.number("rope.scaling.factor"))
    if kind == "yarn":
        factor = read.number("rope.scaling.factor")
        original = read.count("rope.scaling.original_context_length", max_len)
        grown = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        extra = read.optional("rope.scaling.attn_factor")
        return RopeScaling(
            kind,
            factor,
            original,
            beta_fast=read.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=read.number("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=None if extra is None else extra * grown,
        )
    raise CheckpointError(
        f"{read.prefix}rope.scaling.type: {kind!r} is not one of none, linear, yarn"
    )


def _llama3_from_factors(factors: Sequence[float], theta: float, head_dim: int) -> RopeScaling:
    """Llama 3 scaling from the divisor of each frequency: the lowest frequency has the whole
    factor. Errors: CheckpointError if the others do not follow from it."""
    scaling = llama3_scaling(float(max(factors, default=0.0)))
    if len(factors) == head_dim // 2 and all(
        abs(a - b) <= 1e-3 * b for a, b in zip(factors, _llama3_factors(scaling, theta, head_dim))
    ):
        return scaling
    raise CheckpointError(
        "rope_freqs.weight: these frequency factors are not those of Llama 3 scaling"
    )


def _llama3_factors(scaling: RopeScaling, theta: float, head_dim: int) -> list[float]:
    """The divisor of each RoPE frequency with Llama 3 scaling."""
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    factors = []
    for i in range(0, head_dim, 2):
        # full rotations over the original context length
        rotations = scaling.original_max_len / (2 * math.pi * theta ** (i / head_dim))
        keep = min(max((rotations - low) / (high - low), 0.0), 1.0)
        factors.append(1 / (keep + (1 - keep) / scaling.factor))
    return factors


def _ids(*values: Any) -> tuple[int, ...]:
    """Token ids of fields that hold one, a list, or none: in order, without repeats."""
    flat = [
        i for v in values if v is not None for i in (v if isinstance(v, (list, tuple)) else [v])
    ]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in flat):
        raise CheckpointError(f"eos_token_id, bos_token_id: must be token ids, not {flat!r}")
    return tuple(dict.fromkeys(flat))


def _first(value: Any) -> int | None:
    return next(iter(_ids(value)), None)


def _checked(config: ModelConfig) -> ModelConfig:
    """The config, if it is consistent. Errors: CheckpointError."""
    if config.heads % config.kv_heads:
        raise CheckpointError(
            f"{config.heads} heads are not a multiple of {config.kv_heads} kv heads"
        )
    if config.head_dim % 2:
        raise CheckpointError(
            f"head size {config.head_dim} is odd; rotary positions need an even one"
        )
    for token in (*config.eos_ids, *(() if config.bos_id is None else (config.bos_id,))):
        if token >= config.vocab:
            raise CheckpointError(
                f"token id {token} (eos or bos) is not below the vocabulary size {config.vocab}"
            )
    return config
