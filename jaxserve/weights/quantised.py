"""Quantised matrices as checkpoints hold them, and the layout in which devices keep them.

`Blocks` is a matrix [outputs, inputs] whose rows and columns can be cut and joined; `pack` makes a
`kernels.quantised.Quantised` of it. All in numpy.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind

from jaxserve.kernels.quantised import INPUTS, LEAST_GROUP, OUTPUTS, SUPER, Form, Quantised


@dataclasses.dataclass(frozen=True)
class Encoding:
    """Encoding of a matrix that can stay quantised, from which types and sizes of the arrays of
    `Blocks` follow.

    group: inputs that share a scale; None: all. scales: type of the scales, and of offsets if there
    are any. supers: factors of 256 inputs, 0, 1, or 2 with offsets.
    """

    form: Form
    group: int | None
    scales: np.dtype
    offsets: bool = False
    supers: int = 0

    def split(self, inputs: int) -> Encoding:
        """Returns the encoding of parts of this number of inputs, which may cut groups. Errors:
        ValueError, with the limit, for parts that cannot stay quantised."""
        unit = SUPER if self.supers else INPUTS
        group = math.gcd(self.group, inputs) if self.group else None
        if inputs % unit:
            raise ValueError(f"{inputs} inputs on a device are no multiple of {unit}")
        if group not in (None, LEAST_GROUP) and group % INPUTS:
            raise ValueError(f"groups of {group} inputs are no multiple of {INPUTS}")
        return dataclasses.replace(self, group=group)


_FLOATS = {(4, 1): ml_dtypes.float4_e2m1fn, (8, 3): ml_dtypes.float8_e4m3fn}  # by bits, mantissa


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A matrix whose entries are scale * (code - zero) + offset, as of `Quantised`.

    codes    [outputs, inputs] uint8
    scales   [outputs, inputs / group]
    offsets  the same, or None
    supers   [outputs, inputs / 256, 1 or 2], or None
    """

    form: Form
    codes: np.ndarray
    scales: np.ndarray
    offsets: np.ndarray | None = None
    supers: np.ndarray | None = None

    @property
    def encoding(self) -> Encoding:
        """Encoding of the matrix."""
        groups = self.scales.shape[1]
        return Encoding(
            self.form,
            None if groups == 1 else self.codes.shape[1] // groups,
            self.scales.dtype,
            self.offsets is not None,
            0 if self.supers is None else self.supers.shape[2],
        )

    def rows(self, index: slice | np.ndarray) -> Blocks:
        """Takes some of the outputs."""
        return self._replaced((name, x[index]) for name, x in self._arrays())

    def padded(self, outputs: int) -> Blocks:
        """Adds outputs of zeros, up to `outputs`."""
        more = outputs - len(self.codes)
        if not more:
            return self
        return self._replaced(
            (name, np.pad(x, [(0, more)] + [(0, 0)] * (x.ndim - 1))) for name, x in self._arrays()
        )

    def columns(self, first: int, last: int) -> Blocks:
        """Takes inputs `first` to `last`. Groups that a limit cuts become shorter ones, unless they
        span all inputs. Errors: ValueError for a limit within a super-block."""
        inputs = self.codes.shape[1]

        def cut(name: str, x: np.ndarray) -> np.ndarray:
            if x.shape[1] == 1:
                return x
            group = inputs // x.shape[1]
            shorter = math.gcd(group, first, last)
            if shorter < group:
                if self.supers is not None:
                    raise ValueError(f"columns {first} to {last} cut groups of {group} inputs")
                x = np.repeat(x, group // shorter, 1)
            return x[:, first // shorter : last // shorter]

        return self._replaced((name, cut(name, x)) for name, x in self._arrays())

    def _arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        for name in ("codes", "scales", "offsets", "supers"):
            if getattr(self, name) is not None:
                yield name, getattr(self, name)

    def _replaced(self, arrays: Any) -> Blocks:
        return dataclasses.replace(self, **dict(arrays))


def joined(parts: Sequence[Blocks]) -> Blocks:
    """Joins matrices of the same form along their outputs. Errors: ValueError for different
    forms."""
    if len({(part.form, part.scales.shape[1:], part.scales.dtype) for part in parts}) > 1:
        raise ValueError("matrices of different forms cannot be joined")
    return parts[0]._replaced(
        (name, np.concatenate([getattr(part, name) for part in parts]))
        for name, _ in parts[0]._arrays()
    )


def pack(blocks: Blocks) -> Quantised:
    """Lays a matrix out in tiles. Errors: ValueError for outputs that are no multiple of 16, or
    inputs that are none of 32."""
    outputs, inputs = blocks.codes.shape
    if outputs % OUTPUTS or inputs % INPUTS:
        raise ValueError(
            f"a matrix of {inputs} inputs and {outputs} outputs cannot stay quantised: "
            f"they must be multiples of {INPUTS} and {OUTPUTS}"
        )
    fields = {name: _by_tile(x) for name, x in blocks._arrays()}
    fields["codes"] = _words(blocks.codes, blocks.form.bits)
    return Quantised(
        fields["codes"],
        fields["scales"],
        fields.get("offsets"),
        fields.get("supers"),
        blocks.form,
    )


def _by_tile(x: np.ndarray) -> np.ndarray:
    """[outputs, ...] -> [outputs / 16, ..., 16]."""
    return np.ascontiguousarray(np.moveaxis(x.reshape(-1, OUTPUTS, *x.shape[1:]), 1, -1))


def _words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Packs codes [outputs, inputs] into words [outputs / 16, inputs / 32, bits, 16], laid out as
    `kernels.quantised.planes` says."""
    tiles = codes.reshape(-1, OUTPUTS, codes.shape[1] // INPUTS, INPUTS)
    if bits == 8:
        return _placed([tiles])
    parts = [tiles[..., :16] & 15 | tiles[..., 16:] << 4]
    rest = bits - 4
    if rest:
        each = 8 // rest  # inputs of a byte
        high = tiles >> 4
        parts.append(
            np.bitwise_or.reduce([high[..., i::each] << i * rest for i in range(each)], axis=0)
        )
    return _placed(parts)


def _placed(parts: list[np.ndarray]) -> np.ndarray:
    """Bytes [outputs / 16, 16, inputs / 32, 4 n] -> words [outputs / 16, inputs / 32, all n,
    16]."""
    count = sum(part.shape[-1] for part in parts) // 4
    first, lanes, tiles, _ = parts[0].shape
    words = np.empty((first, tiles, count, lanes), np.uint32)
    at = 0
    for part in parts:
        whole = np.ascontiguousarray(part).view("<u4")
        words[:, :, at : at + whole.shape[-1]] = whole.transpose(0, 2, 3, 1)
        at += whole.shape[-1]
    return words


def dequantised(blocks: Blocks) -> np.ndarray:
    """Computes the matrix [outputs, inputs] in f32."""
    values = _numbers(blocks.form)[blocks.codes]
    values *= _factors(blocks, blocks.scales, 0)
    if blocks.offsets is not None:
        values += _factors(blocks, blocks.offsets, 1)
    return values


@functools.cache
def _numbers(form: Form) -> np.ndarray:
    """The numbers of all codes of a form, f32."""
    codes = np.arange(2**form.bits, dtype=np.uint8)
    if form.mantissa:
        return codes.view(_FLOATS[form.bits, form.mantissa]).astype(np.float32)
    return codes.astype(np.float32) - form.zero


def _factors(blocks: Blocks, factors: np.ndarray, part: int) -> np.ndarray:
    """Scales or offsets by input, in f32. part: of them in `supers`."""
    inputs = blocks.codes.shape[1]
    factors = factors.astype(np.float32)
    if blocks.supers is not None:
        supers = blocks.supers[..., part].astype(np.float32)
        factors = factors * np.repeat(supers, factors.shape[1] // supers.shape[1], 1)
    return np.repeat(factors, inputs // factors.shape[1], 1)


# --- GGUF


def from_gguf(raw: np.ndarray, kind: Kind) -> Blocks:
    """Reads rows of whole blocks [outputs, bytes] uint8. Errors: ValueError for types that are not
    kept."""
    if kind not in GGUF_KINDS:
        raise ValueError(f"{kind.name} is not kept")
    size = GGML_QUANT_SIZES[kind][1]
    return GGUF_KINDS[kind](raw.reshape(len(raw), raw.shape[1] // size, size))


def _q8_0(blocks: np.ndarray) -> Blocks:
    return Blocks(Form(8, 128), _flat(blocks[..., 2:] ^ 128), _half(blocks, 0))


def _q4_0(blocks: np.ndarray) -> Blocks:
    return Blocks(Form(4, 8), _flat(_nibbles(blocks[..., 2:])), _half(blocks, 0))


def _q4_1(blocks: np.ndarray) -> Blocks:
    return Blocks(Form(4), _flat(_nibbles(blocks[..., 4:])), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: np.ndarray) -> Blocks:
    return Blocks(Form(5, 16), _five(blocks[..., 2:]), _half(blocks, 0))


def _q5_1(blocks: np.ndarray) -> Blocks:
    return Blocks(Form(5), _five(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2))


def _q4_k(blocks: np.ndarray) -> Blocks:
    low = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32))
    return Blocks(Form(4), _flat(low), *_six_bit_scales(blocks))


def _q5_k(blocks: np.ndarray) -> Blocks:
    low = _nibbles(blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32))
    low = low.reshape(*blocks.shape[:2], 8, 32)
    high = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return Blocks(Form(5), _flat(low | high << 4), *_six_bit_scales(blocks))


def _q6_k(blocks: np.ndarray) -> Blocks:
    shape = blocks.shape[:2]
    low = _nibbles(blocks[..., :128].reshape(*shape, 2, 64)).reshape(*shape, 8, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = blocks[..., 128:192].reshape(*shape, 2, 1, 32) >> shifts & 3
    codes = low | high.reshape(*shape, 8, 32) << 4
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    return Blocks(Form(6, 32), _flat(codes), _flat(scales), supers=_half(blocks, 208)[..., None])


def _six_bit_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scales, offsets and supers of K-quants of 8 groups with offsets: 6 bits each, in 12 bytes of
    which the last four have the rest of the groups 4 to 7."""
    first, second, rest = (blocks[..., at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([first & 63, rest & 15 | first >> 6 << 4], -1)
    offsets = np.concatenate([second & 63, rest >> 4 | second >> 6 << 4], -1)
    supers = np.stack([_half(blocks, 0), -_half(blocks, 2)], -1)
    return _flat(scales), _flat(offsets), supers


def _five(rest: np.ndarray) -> np.ndarray:
    """Codes of blocks of 32 of 5 bits: four bytes of high bits, then the low four bits."""
    high = np.unpackbits(np.ascontiguousarray(rest[..., :4]), axis=-1, bitorder="little")
    return _flat(_nibbles(rest[..., 4:]) | high << 4)


def _nibbles(x: np.ndarray) -> np.ndarray:
    """Low four bits of all bytes [..., n], then the high ones: [..., 2 n]."""
    return np.concatenate([x & 15, x >> 4], -1)


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at a byte of each block."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]


def _flat(x: np.ndarray) -> np.ndarray:
    return x.reshape(len(x), math.prod(x.shape[1:]))


GGUF_KINDS: dict[Kind, Callable[[np.ndarray], Blocks]] = {
    Kind.Q8_0: _q8_0,
    Kind.Q4_0: _q4_0,
    Kind.Q4_1: _q4_1,
    Kind.Q5_0: _q5_0,
    Kind.Q5_1: _q5_1,
    Kind.Q4_K: _q4_k,
    Kind.Q5_K: _q5_k,
    Kind.Q6_K: _q6_k,
}
