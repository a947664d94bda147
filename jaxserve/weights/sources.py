"""Finds and reads slices of the parts that parameters are assembled of, as a checkpoint holds them.

A part, such as the query projection, is stored by itself or in rows of a larger tensor: the table
of the model's family says where (`checkpoint.families`). Stored matrices are [out, in], parameters
[in, out].
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxserve.checkpoint.families import layout
from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.specs import LatentAttentionSpec, MixerSpec
from jaxserve.checkpoint.tensor_tables import Alternating, Stacked

Index = tuple[slice, ...]  # of a parameter; slices with start and stop
Read = Callable[[str, slice, slice | None], np.ndarray]  # tensor name, rows, columns (None: all)
_ROWS_AT_ONCE = 64  # converted and transposed together: faster than all rows, and less memory
_ALIGNMENT = 64  # bytes: JAX's CPU devices take over arrays at such addresses, and copy others


@dataclass(frozen=True)
class Place:
    """The place of a part in a checkpoint: rows from `row` on of a tensor. tensor, shape: its name,
    with fields for numbers, and its whole shape. turns: 0, or of how many parts the tensor has
    outputs by turns, see `tensor_tables.Alternating`; the part's are `row`, `row` + turns, ...
    stride: rows from an expert's to those of the next in a tensor of all experts; else 0."""

    tensor: str
    row: int
    shape: tuple[int, ...]
    turns: int = 0
    stride: int = 0


@dataclass(frozen=True)
class Sources:
    """Sources of a parameter. reader: reads tensors. numbers: those in the parameter's
    path, by what they number. parts: see `Assembly`. stored, model: the config of the checkpoint,
    and the one after `with_tp`. dtype: to convert to."""

    reader: Read
    numbers: dict[str, str]
    parts: tuple[str, ...]
    stored: ModelConfig
    model: ModelConfig
    dtype: np.dtype

    @property
    def mixer(self) -> MixerSpec:
        """Spec of the layer's mixer."""
        return self.model.mixer(int(self.numbers["layers"]))

    @property
    def latent(self) -> LatentAttentionSpec:
        """Spec of the layer's latent attention."""
        assert isinstance(self.mixer, LatentAttentionSpec)
        return self.mixer

    @property
    def rotated(self) -> int:
        """Number of dimensions of a head that the layer's RoPE rotates."""
        rope = self.model.rope(int(self.numbers["layers"]))
        return 0 if rope is None else rope.dims(self.model.head_dim)

    def read(
        self, part: str, rows: slice, columns: slice | None, expert: int | None = None
    ) -> np.ndarray:
        """Reads a slice of a part; expert: its number, for parts that each expert has."""
        place = places(self.stored)[part]
        name = place.tensor.format(**self.numbers, experts=expert)
        if not place.turns:
            first = place.row + place.stride * (expert or 0)
            return self.reader(name, slice(first + rows.start, first + rows.stop), columns)
        assert expert is not None
        one = slice(expert, expert + 1)
        outputs = slice(rows.start * place.turns, rows.stop * place.turns)
        if columns is None:
            return self.reader(name, one, outputs)[0, place.row :: place.turns]
        inputs_first = self.reader(name, one, columns)[0, :, outputs]
        return inputs_first[:, place.row :: place.turns].T


@functools.lru_cache(maxsize=16)
def places(model: ModelConfig) -> dict[str, Place]:
    """Returns the places of a model's parts by name. model: before `with_tp`."""
    shapes = model.parts()
    places: dict[str, Place] = {}
    for tensor, parts in layout(model).tensors.items():
        if not shapes.keys() >= set(parts):
            continue  # of layers that this model does not have
        if isinstance(parts, Stacked):
            places[parts[0]] = _stacked(tensor, shapes[parts[0]], model.experts)
            continue
        if isinstance(parts, Alternating):
            places |= _by_turns(tensor, parts, shapes, model.experts)
            continue
        rows = sum(shapes[part][0] for part in parts)
        row = 0
        for part in parts:
            places[part] = Place(tensor, row, (rows, *shapes[part][1:]))
            row += shapes[part][0]
    if model.tied:
        places["head"] = places["embed"]
    return places


def _stacked(tensor: str, shape: tuple[int, ...], experts: int) -> Place:
    """Place of a part of all experts."""
    return Place(tensor, 0, (experts * shape[0], *shape[1:]), stride=shape[0])


def _by_turns(
    tensor: str, parts: Alternating, shapes: dict[str, tuple[int, ...]], experts: int
) -> dict[str, Place]:
    """Places of the parts of a tensor of all experts."""
    outputs, *inputs = shapes[parts[0]]
    shape = (experts, *inputs, outputs * len(parts))
    return {part: Place(tensor, row, shape, len(parts)) for row, part in enumerate(parts)}


def inputs_first(rows: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Transposes [..., in] -> [in, ...] into a contiguous array of a dtype."""
    flat = rows.reshape(-1, rows.shape[-1])
    transposed = empty(flat.shape[::-1], dtype)
    transpose(flat, transposed)
    return transposed.reshape(-1, *rows.shape[:-1])


def transpose(rows: np.ndarray, out: np.ndarray) -> None:
    """Writes the transpose of a matrix to `out`, in the dtype of `out`."""
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        block = rows[first : first + _ROWS_AT_ONCE].astype(out.dtype, copy=False)
        out[:, first : first + _ROWS_AT_ONCE] = block.T


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Allocates an array that JAX's CPU devices take over without a copy."""
    nbytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return memory[first : first + nbytes].view(dtype).reshape(shape)
