"""Rotary position embeddings (RoPE; Su et al., 2021): the parameters of a layer's RoPE and its
frequencies, with the scalings for contexts longer than a model was trained with."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of RoPE frequencies. kind: a key of `SCALINGS`; the other fields have the meaning
    they have in transformers' modeling_rope_utils. short, long (longrope): divisors of the
    frequencies for sequences within the original length, and for longer ones."""

    kind: str
    factor: float
    original_max_len: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    attention_factor: float | None = None  # yarn, longrope
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    share: float = 1.0  # proportional: of the frequencies, the highest; the others are 0
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()

    def divisors(self, max_len: int) -> tuple[float, ...]:
        """Divisors of longrope's frequencies for sequences of at most `max_len` positions."""
        return self.long if max_len > self.original_max_len else self.short


@dataclass(frozen=True)
class Rope:
    """RoPE of a layer. share: part of a head's dimensions that is rotated, from the first on."""

    theta: float = 10000.0
    scaling: RopeScaling | None = None
    share: float = 1.0

    def dims(self, head_dim: int) -> int:
        """Number of rotated dimensions of a head."""
        return int(head_dim * self.share)

    def longest(self, max_len: int) -> int:
        """Returns the most positions of a sequence that settings may ask for, of a model whose
        config says `max_len`."""
        scaling = self.scaling
        if scaling is None or scaling.kind != "dynamic":
            return max_len
        return max(max_len, int(scaling.factor * scaling.original_max_len))

    def served(self, max_len: int) -> Rope:
        """Returns the RoPE with no other divisors than those for sequences of at most `max_len`
        positions: equal ones give equal keys."""
        if self.scaling is None:
            return self
        divisors = self.scaling.divisors(max_len)
        scaling = replace(self.scaling, short=divisors, long=divisors)
        if scaling.kind == "dynamic":
            scaling = replace(scaling, original_max_len=max(max_len, scaling.original_max_len))
        return replace(self, scaling=scaling)

    def frequencies(self, head_dim: int, max_len: int) -> tuple[np.ndarray, float]:
        """Radians per position, f64 [rotated dimensions / 2], and the factor on cos and sin.

        max_len: most positions of a sequence as served; longrope chooses its divisors by it, and
        dynamic scaling its base, once for all sequences, so that the KV of a prompt does not depend
        on what follows it.
        """
        dims = self.dims(head_dim)
        base = self.theta ** -(np.arange(0, dims, 2, dtype=np.float64) / dims)
        if self.scaling is None:
            return base, 1.0
        return SCALINGS[self.scaling.kind](base, self.theta, self.scaling, max_len)


def llama3_scaling(factor: float) -> RopeScaling:
    """RoPE scaling of the Llama 3.1 and 3.2 models, which differ only in the factor."""
    return RopeScaling(
        "llama3", factor, original_max_len=8192, low_freq_factor=1.0, high_freq_factor=4.0
    )


def _linear(
    base: np.ndarray, theta: float, scaling: RopeScaling, max_len: int
) -> tuple[np.ndarray, float]:
    return base / scaling.factor, 1.0


def _dynamic(
    base: np.ndarray, theta: float, scaling: RopeScaling, max_len: int
) -> tuple[np.ndarray, float]:
    """NTK-aware scaling (bloc97, 2023): a larger base for longer sequences, none for those within
    the original length."""
    dims = 2 * len(base)
    share = max(max_len / scaling.original_max_len, 1.0)
    growth = scaling.factor * share - (scaling.factor - 1)
    return base * growth ** (-np.arange(0, dims, 2) / (dims - 2)), 1.0


def _llama3(
    base: np.ndarray, theta: float, scaling: RopeScaling, max_len: int
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


def _yarn(
    base: np.ndarray, theta: float, scaling: RopeScaling, max_len: int
) -> tuple[np.ndarray, float]:
    """YaRN scaling (Peng et al., 2023), with the conventions of Hugging Face checkpoints."""
    dims = 2 * len(base)

    def dimension(rotations: float) -> float:
        return (
            dims
            * math.log(scaling.original_max_len / (rotations * 2 * math.pi))
            / (2 * math.log(theta))
        )

    low = dimension(scaling.beta_fast)
    high = dimension(scaling.beta_slow)
    if scaling.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dims - 1)
    ramp = np.clip((np.arange(len(base)) - low) / max(high - low, 0.001), 0, 1)
    factor = scaling.attention_factor
    if factor is None:
        factor = _yarn_attention_factor(scaling)
    return base / scaling.factor * ramp + base * (1 - ramp), factor


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """Growth of attention's logits with the factor of the context (Peng et al., 2023, Eq. 22)."""
    if factor <= 1:
        return 1.0
    return 0.1 * weight * math.log(factor) + 1.0


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    """Factor on cos and sin for a config that does not state one."""
    factor = scaling.factor
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_magnitude(factor, scaling.mscale) / yarn_magnitude(
            factor, scaling.mscale_all_dim
        )
    return yarn_magnitude(factor)


def _longrope(
    base: np.ndarray, theta: float, scaling: RopeScaling, max_len: int
) -> tuple[np.ndarray, float]:
    """LongRoPE (Ding et al., 2024): a divisor for each frequency."""
    factor = scaling.attention_factor
    if factor is None:
        factor = 1.0
        if scaling.factor > 1:
            original = scaling.original_max_len
            factor = math.sqrt(1 + math.log(scaling.factor) / math.log(original))
    return base / np.array(scaling.divisors(max_len)), factor


def _proportional(
    base: np.ndarray, theta: float, scaling: RopeScaling, max_len: int
) -> tuple[np.ndarray, float]:
    """The highest frequencies of a head that is rotated whole, and none in place of the others
    (Gemma 4)."""
    kept = int(scaling.share * len(base))
    return np.where(np.arange(len(base)) < kept, base, 0.0) / scaling.factor, 1.0


SCALINGS = {
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
