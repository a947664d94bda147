"""Spec of Gated DeltaNet layers, which keep a state of fixed size in place of keys and values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from jaxserve.checkpoint.specs import Declared, Dimensions


@dataclass(frozen=True)
class DeltaNetSpec:
    """Gated DeltaNet (Yang et al., 2024), as Qwen3-Next has it. Queries, keys and values pass
    through a convolution over the last `taps` tokens; each value head has a state [key, value].

    key_heads, value_heads: numbers of heads; a key head serves consecutive value heads. key, value:
    numbers of a key and of a value.
    """

    has_pages: ClassVar[bool] = False
    stores: ClassVar[bool] = False  # keys and values

    key_heads: int
    value_heads: int
    key: int
    value: int
    taps: int

    @property
    def group(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def channels(self) -> int:
        """Numbers that the convolution sees of a key head: query, key, and its heads' values."""
        return 2 * self.key + self.group * self.value

    def declare(self, sizes: Dimensions) -> dict[str, Declared]:
        """`qkvz` has query, key, values and output gates of each key head side by side, `ba` the
        numbers that make beta and decay: splitting the key heads over ranks splits everything."""
        D = sizes.d_model
        K = self.key_heads
        G = self.group
        outputs = self.channels + G * self.value
        heads = ("kv_heads", None, None)
        return {
            "qkvz": Declared((D, K, outputs), ("embed", "kv_heads", None), inputs=1),
            "ba": Declared((D, K, 2, G), ("embed", *heads), inputs=1),
            "conv": Declared((K, self.channels, self.taps), heads, wide=True),
            "a_log": Declared((K, G), heads[:2], wide=True),
            "dt_bias": Declared((K, G), heads[:2], wide=True),
            "out_norm": Declared((self.value,), (None,), wide=True),
            "out_proj": Declared((K, G, self.value, D), (*heads, "embed"), inputs=3),
        }

    def parts(self, sizes: Dimensions) -> dict[str, tuple[int, ...]]:
        """Shapes of the parts, rows first, that the parameters are assembled of. Qwen3-Next stores
        `delta_qkvz` and `delta_ba` by key head, Qwen3.5 their parts by themselves."""
        D = sizes.d_model
        keys = self.key_heads * self.key
        values = self.value_heads * self.value
        return {
            "delta_qkvz": (2 * keys + 2 * values, D),
            "delta_q": (keys, D),
            "delta_k": (keys, D),
            "delta_v": (values, D),
            "delta_z": (values, D),
            "delta_ba": (2 * self.value_heads, D),
            "delta_b": (self.value_heads, D),
            "delta_a": (self.value_heads, D),
            "conv_q": (keys, 1, self.taps),
            "conv_k": (keys, 1, self.taps),
            "conv_v": (values, 1, self.taps),
            "a_log": (self.value_heads,),
            "dt_bias": (self.value_heads,),
            "delta_norm": (self.value,),
            "delta_o": (D, values),
        }

    def splits(self, sizes: Dimensions, tp: int) -> bool:
        """Returns True if `tp` ranks can share the key heads."""
        return self.key_heads % tp == 0

    def share(self, tp: int) -> DeltaNetSpec:
        """Returns the spec of one of `tp` ranks, which has one key head at least."""
        heads = -(-self.key_heads // tp)
        return replace(self, key_heads=heads, value_heads=heads * self.group)

    def inner(self, itemsize: int) -> int:
        """Numbers of `itemsize` bytes that a token takes at once: the projection, and in f32 what
        is convolved, what enters the pieces and what their solution is."""
        projected = self.key_heads * (self.channels + self.group * self.value)
        wide = 3 * self.key_heads * self.group * (2 * self.key + self.value)
        return projected + wide * 4 // itemsize

    @property
    def state(self) -> tuple[int, ...]:
        """Shape of a sequence's state, which is f32."""
        return self.key_heads, self.group, self.key, self.value

    @property
    def passed_bytes(self) -> int:
        """Bytes of what tokens make of any state, f32: a matrix [key, key] and one [key, value] for
        each value head (`kernels.delta_rule`)."""
        return 4 * self.value_heads * self.key * (self.key + self.value)

    @property
    def window(self) -> tuple[int, ...]:
        """Shape of the last inputs of the convolution, which a sequence keeps for its next
        tokens."""
        return self.key_heads, self.taps - 1, self.channels
