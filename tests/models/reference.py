"""A decoder in dense f64 numpy, written after the papers and the Hugging Face documentation: the
expected results of the tests."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.rope import Rope
from tests.weights.models import tensors


def random_weights(config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    """Random weights with which every part matters: sharp attention, logits of a few units, norms
    that are not one."""
    found = {
        name: value / np.sqrt(value.shape[-1]) * 2 if value.ndim > 1 else value * 0.3
        for name, value in tensors(config, seed).items()
    }
    return {
        name: value + 1 if name.endswith("norm.weight") else value for name, value in found.items()
    }


def rope_frequencies(config: ModelConfig) -> tuple[list[float], float]:
    """Angle per position of each pair of dimensions, and the factor on cos and sin."""
    rope = config.ropes[0]
    dims = config.head_dim
    scaling = rope.scaling
    plain = [rope.theta ** (-2 * i / dims) for i in range(dims // 2)]
    if scaling is None:
        return plain, 1.0
    if scaling.kind == "linear":
        return [f / scaling.factor for f in plain], 1.0
    if scaling.kind == "dynamic":
        length = max(config.max_len, scaling.original_max_len)
        growth = scaling.factor * length / scaling.original_max_len - (scaling.factor - 1)
        base = rope.theta * growth ** (dims / (dims - 2))
        return [base ** (-2 * i / dims) for i in range(dims // 2)], 1.0
    if scaling.kind == "longrope":
        beyond = config.max_len > scaling.original_max_len
        divisors = scaling.long if beyond else scaling.short
        factor = math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_len))
        return [f / divisor for f, divisor in zip(plain, divisors)], factor
    if scaling.kind == "llama3":
        return [_llama3(f, scaling) for f in plain], 1.0
    return _yarn(plain, rope, dims), _yarn_attention(scaling)


def _llama3(frequency: float, scaling) -> float:
    wavelength = 2 * math.pi / frequency
    if wavelength < scaling.original_max_len / scaling.high_freq_factor:
        return frequency
    if wavelength > scaling.original_max_len / scaling.low_freq_factor:
        return frequency / scaling.factor
    smooth = (scaling.original_max_len / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def _yarn(plain: list[float], rope: Rope, dims: int) -> list[float]:
    """Pairs that rotate more than `beta_fast` times over the original length are kept, those with
    less than `beta_slow` rotations interpolated."""
    scaling = rope.scaling
    pair = [
        dims
        * math.log(scaling.original_max_len / (beta * 2 * math.pi))
        / (2 * math.log(rope.theta))
        for beta in (scaling.beta_fast, scaling.beta_slow)
    ]
    low, high = (math.floor(pair[0]), math.ceil(pair[1])) if scaling.truncate else pair
    low = max(low, 0)
    high = min(high, dims - 1)
    found = []
    for i, f in enumerate(plain):
        ramp = min(max((i - low) / (high - low if high != low else 0.001), 0.0), 1.0)
        found.append(f * (1 - ramp) + f / scaling.factor * ramp)
    return found


def _yarn_attention(scaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    mscale = lambda weight: (
        1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0
    )
    if scaling.mscale and scaling.mscale_all_dim:
        return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return mscale(1.0)


def rope(x: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Applies RoPE to x [T, heads, H] at positions 0 to T - 1; dimension i is paired with i + H /
    2."""
    frequencies, factor = rope_frequencies(config)
    turned = (
        (x[..., : config.head_dim // 2] + 1j * x[..., config.head_dim // 2 :])
        * np.exp(1j * np.arange(len(x))[:, None, None] * np.array(frequencies))
        * factor
    )
    return np.concatenate([turned.real, turned.imag], -1)


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def forward(
    config: ModelConfig, tensors: dict[str, np.ndarray], tokens: list[int], last: int = 0
) -> np.ndarray:
    """Logits [T, V] of a whole sequence, or of its `last` tokens; `tensors` under their Hugging
    Face names."""
    name = "model.embed_tokens.weight" if config.tied else "lm_head.weight"
    return final_states(config, tensors, tokens, last) @ tensors[name].astype(np.float64).T


def final_states(
    config: ModelConfig, tensors: dict[str, np.ndarray], tokens: list[int], last: int = 0
) -> np.ndarray:
    """Hidden states [T, D] of a whole sequence, or of its `last` tokens, after the final norm."""
    *_, x = states_by_layer(config, tensors, tokens, last)
    return norm(x, tensors["model.norm.weight"].astype(np.float64), config.norms.eps)


def states_by_layer(
    config: ModelConfig, tensors: dict[str, np.ndarray], tokens: list[int], last: int = 0
) -> Iterator[np.ndarray]:
    """Yields the hidden states [T, D] before each layer, and those behind the last, of which only
    the `last` tokens' are computed."""
    w = {name: value.astype(np.float64) for name, value in tensors.items()}
    x = w["model.embed_tokens.weight"][tokens]
    for i in range(config.layers):
        yield x
        layer = {
            name.removeprefix(f"model.layers.{i}."): value
            for name, value in w.items()
            if name.startswith(f"model.layers.{i}.")
        }
        y = norm(x, layer["input_layernorm.weight"], config.norms.eps)
        kept = last if last and i == config.layers - 1 else len(x)  # of the last layer all others
        x = x[-kept:] + attended(config, layer, y, config.window(i), kept)
        y = norm(x, layer["post_attention_layernorm.weight"], config.norms.eps)
        gate = y @ layer["mlp.gate_proj.weight"].T
        up = y @ layer["mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp.down_proj.weight"].T
    yield x


def attended(
    config: ModelConfig,
    layer: dict[str, np.ndarray],
    x: np.ndarray,
    window: int | None,
    last: int,
) -> np.ndarray:
    """Attention of the `last` tokens to all."""
    T = len(x)
    H = config.head_dim

    def project(name: str) -> np.ndarray:
        y = x @ layer[f"self_attn.{name}_proj.weight"].T + layer.get(
            f"self_attn.{name}_proj.bias", 0
        )
        y = y.reshape(T, -1, H)
        return (
            norm(y, layer[f"self_attn.{name}_norm.weight"], config.norms.eps)
            if f"self_attn.{name}_norm.weight" in layer
            else y
        )

    q = rope(project("q"), config)[-last:]
    k = rope(project("k"), config)
    v = project("v")
    k, v = (y.repeat(config.heads // config.kv_heads, 1) for y in (k, v))
    scores = np.einsum("tnh,snh->nts", q, k) / math.sqrt(H)
    distance = np.arange(T - last, T)[:, None] - np.arange(T)
    scores[:, (distance < 0) | (distance >= (window or T))] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("nts,snh->tnh", weights / weights.sum(-1, keepdims=True), v)
    return out.reshape(last, -1) @ layer["self_attn.o_proj.weight"].T


def log_softmax(logits: np.ndarray) -> np.ndarray:
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
