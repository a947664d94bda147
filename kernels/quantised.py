"""Weights that stay quantised on devices: their storage, and what it means.

Codes lie in tiles of 32 inputs x 16 outputs, in the order in which a product reads them, so that
inputs and outputs of a matrix can both be split over devices, at whole tiles.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

INPUTS = 32  # of a tile
OUTPUTS = 16
SUPER = 256  # inputs that share the factors of a super-block
LEAST_GROUP = 16  # inputs that share a scale; other groups are multiples of a tile's
# dimensions after that of outputs / 16
_TRAILING = {"codes": 3, "scales": 2, "offsets": 2, "supers": 3}


@dataclasses.dataclass(frozen=True)
class Form:
    """The encoding of quantised weights; programs are compiled for it.

    bits: of a code: 4, 5, 6 or 8. zero: the integer code of 0. mantissa: bits of the mantissa of
    codes that are floats with a sign (e2m1 has 1, e4m3 has 3); 0: codes are integers without sign.
    """

    bits: int
    zero: int = 0
    mantissa: int = 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantised:
    """A matrix whose entries are scale * (code - zero) + offset.

    codes    [..., outputs / 16, inputs / 32, bits, 16] uint32, laid out as `planes` says
    scales   [..., outputs / 16, inputs / group, 16] float16, bfloat16 or float32; with supers uint8
             or int8. group: 16 or a multiple of 32
    offsets  the same, or None: 0
    supers   [..., outputs / 16, inputs / 256, 1 or 2, 16] float16: factors of the scales of 256
             inputs, and of the offsets if there are any; None: 1

    Leading dimensions are experts, or outputs again (gate and up). Fields are arrays, of numpy too,
    or anything with the same structure (shapes, shardings).
    """

    codes: Any
    scales: Any
    offsets: Any
    supers: Any
    form: Form = dataclasses.field(metadata=dict(static=True))

    @property
    def inputs(self) -> int:
        return self.codes.shape[-3] * INPUTS

    @property
    def outputs(self) -> int:
        """Outputs of the last of their dimensions."""
        return self.codes.shape[-4] * OUTPUTS

    @property
    def leading(self) -> tuple[int, ...]:
        """Dimensions before the last of outputs."""
        return self.codes.shape[:-4]

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.inputs // self.scales.shape[-2]

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    def with_outputs(self, change: Callable[[Any, int], Any]) -> Quantised:
        """Replaces each array x by change(x, axis); axis: that of outputs / 16, from the end."""
        fields = {
            name: change(getattr(self, name), -1 - trailing)
            for name, trailing in _TRAILING.items()
            if getattr(self, name) is not None
        }
        return dataclasses.replace(self, **fields)

    def flat(self, experts: bool = False) -> Quantised:
        """Joins all dimensions of outputs into one, behind that of experts if there is one."""
        kept = int(experts)
        return self.with_outputs(
            lambda x, axis: x.reshape(*x.shape[:kept], -1, *x.shape[axis + 1 :])
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Joined:
    """Matrices of the same inputs whose outputs lie side by side, each `Quantised` or an array
    [inputs, outputs]; both with leading dimensions, and more of outputs, as `Quantised` has them.

    axis: that of outputs along which they lie, from the end.
    """

    parts: tuple[Any, ...]
    axis: int = dataclasses.field(metadata=dict(static=True))


@dataclasses.dataclass(frozen=True)
class Plane:
    """Some bits of the codes of a tile: those of input i are word[i] >> shift[i], of `bits` bits,
    and belong at bit `place` of the code."""

    word: np.ndarray
    shift: np.ndarray
    bits: int
    place: int


def planes(bits: int) -> list[Plane]:
    """The planes of codes of 4, 5, 6 or 8 bits. Codes of 8 bits lie four inputs to a word; of
    shorter ones, the low four bits lie as bytes of two inputs, 16 apart, and the rest after them.
    """
    i = np.arange(INPUTS)
    if bits == 8:
        return [Plane(i // 4, i % 4 * 8, 8, 0)]
    low = Plane(i % 16 // 4, i % 4 * 8 + i // 16 * 4, 4, 0)
    rest = bits - 4
    place = i * rest
    return [low, Plane(4 + place // 32, place % 32, rest, 4)][: 1 + (rest > 0)]


def dequantise(w: Quantised, dtype: Any = jnp.float32) -> jax.Array:
    """Computes the matrix [..., inputs, outputs] in f32, in this dtype."""
    values = _values(w)  # [..., outputs / 16, inputs, 16]
    values = jnp.moveaxis(values, -2, -3)
    return values.reshape(*values.shape[:-2], -1).astype(dtype)


def rows(w: Quantised, ids: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """Computes the inputs' entries of outputs ids [T]: [T, inputs]. Of a head, these are
    embeddings."""
    lane = ids % OUTPUTS

    def chosen(x: jax.Array, axis: int) -> jax.Array:
        tiles = x[ids // OUTPUTS]
        place = lane.reshape(-1, *[1] * (tiles.ndim - 1))
        return jnp.take_along_axis(tiles, place, -1)

    return _values(w.flat().with_outputs(chosen))[..., 0].astype(dtype)


def _values(w: Quantised) -> jax.Array:
    """Entries [..., inputs, lanes] in f32 of codes [..., inputs / 32, bits, lanes]."""
    values = _numbers(w) * _widened(w, w.scales, 0)
    return values if w.offsets is None else values + _widened(w, w.offsets, 1)


def _widened(w: Quantised, factors: jax.Array, part: int) -> jax.Array:
    """Scales or offsets in f32, by input. part: of them in `supers`."""
    factors = factors.astype(jnp.float32)
    if w.supers is not None:
        supers = w.supers[..., part, :].astype(jnp.float32)
        factors = factors * jnp.repeat(supers, SUPER // w.group, -2)
    return jnp.repeat(factors, w.group, -2)


def _numbers(w: Quantised) -> jax.Array:
    """The codes as numbers, less zero: f32 [..., inputs, lanes]."""
    form = w.form
    code = jnp.zeros((), jnp.uint32)
    for plane in planes(form.bits):
        part = w.codes[..., plane.word, :] >> plane.shift.astype(np.uint32)[:, None]
        code |= (part & (2**plane.bits - 1)) << plane.place
    code = code.reshape(*code.shape[:-3], -1, code.shape[-1])
    if form.mantissa:
        return _floats(code, form)
    return code.astype(jnp.float32) - form.zero


def _floats(code: jax.Array, form: Form) -> jax.Array:
    """The values of codes that are floats, by their exponents: subnormals are not flushed."""
    exponents = form.bits - 1 - form.mantissa
    bias = 2 ** (exponents - 1) - 1
    size = code & (2 ** (form.bits - 1) - 1)
    normal = jax.lax.bitcast_convert_type(
        (size << (23 - form.mantissa)) + ((127 - bias) << 23), jnp.float32
    )
    subnormal = size.astype(jnp.float32) * math.ldexp(1, 1 - bias - form.mantissa)
    value = jnp.where(size < 2**form.mantissa, subnormal, normal)
    return jnp.where(code >> (form.bits - 1), -value, value)
