"""Parts of a decoder layer as pure functions on local arrays: RMSNorm, RoPE with its scalings, and
SwiGLU."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.checkpoint.zoo import ModelConfig, RopeScaling


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Normalises x [..., D] by its root mean square, taken in f32, in the dtype of x (Zhang and
    Sennrich, 2019)."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + eps)).astype(
        x.dtype
    ) * weight


def swiglu(gate_up: jax.Array) -> jax.Array:
    """Gated activation silu(gate) * up: [T, 2, F] -> [T, F] (Shazeer, 2020)."""
    return jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1]


def rope_frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
    """RoPE frequencies: radians per position f32 [H / 2], and the factor on cos and sin (attention
    scaling of YaRN), after the model's RoPE scaling."""
    half = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    base = config.rope_theta**-half
    scaling = config.rope_scaling
    if scaling is None:
        return base.astype(np.float32), 1.0
    frequencies, factor = _SCALED[scaling.kind](base, scaling, config)
    return frequencies.astype(np.float32), factor


def rope_cos_sin(positions: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """cos and sin of RoPE, f32 [T, 1, 1, H / 2], at positions [T] (Su et al., 2021).

    The product with the identity makes XLA materialise the result; otherwise it would compute the
    cosines again in every layer.
    """
    frequencies, factor = rope_frequencies(config)
    angle = positions[:, None].astype(jnp.float32) * frequencies
    both = jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], 1) * factor
    both = jnp.dot(both, jnp.eye(both.shape[1]), precision=jax.lax.Precision.HIGHEST)[:, None, None]
    return both[..., : len(frequencies)], both[..., len(frequencies) :]


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Applies RoPE to x [T, K, heads, H]; dimension i is paired with i + H / 2, as in Hugging Face
    checkpoints."""
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def _linear(
    base: np.ndarray, scaling: RopeScaling, config: ModelConfig
) -> tuple[np.ndarray, float]:
    return base / scaling.factor, 1.0


def _llama3(
    base: np.ndarray, scaling: RopeScaling, config: ModelConfig
) -> tuple[np.ndarray, float]:
    """Llama 3.1 scaling: low frequencies are divided by `factor`, high ones kept, those between
    interpolated."""
    # full rotations over the original context length
    rotations = scaling.original_max_len * base / (2 * math.pi)
    keep = np.clip(
        (rotations - scaling.low_freq_factor)
        / (scaling.high_freq_factor - scaling.low_freq_factor),
        0,
        1,
    )
    return base / scaling.factor * (1 - keep) + base * keep, 1.0


def _yarn(base: np.ndarray, scaling: RopeScaling, config: ModelConfig) -> tuple[np.ndarray, float]:
    """YaRN scaling (Peng et al., 2023), with the conventions of Hugging Face checkpoints."""

    def dimension(rotations: float) -> float:
        return (
            config.head_dim
            * math.log(scaling.original_max_len / (rotations * 2 * math.pi))
            / (2 * math.log(config.rope_theta))
        )

    low = dimension(scaling.beta_fast)
    high = dimension(scaling.beta_slow)
    if scaling.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, config.head_dim - 1)
    ramp = np.clip((np.arange(config.head_dim // 2) - low) / max(high - low, 0.001), 0, 1)
    factor = scaling.attention_factor
    if factor is None:
        factor = _yarn_attention_factor(scaling)
    return base / scaling.factor * ramp + base * (1 - ramp), factor


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    """Factor on cos and sin for a config that does not state one."""

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return magnitude(scaling.mscale) / magnitude(scaling.mscale_all_dim)
    return magnitude(1.0)


_SCALED = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}
