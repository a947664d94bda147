"""Finds and reads slices of the parts that parameters are assembled of, as a checkpoint holds them.

A part, such as the query projection, is stored by itself or in rows of a larger tensor: the table
of the model's family says where (`checkpoint.families`). Stored matrices are [out, in], parameters
[in, out].
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Protocol

import ml_dtypes
import numpy as np

from jaxserve.checkpoint.delta_net import DeltaNetSpec
from jaxserve.checkpoint.families import layout
from jaxserve.checkpoint.model import MixerSpec, ModelConfig
from jaxserve.checkpoint.specs import LatentAttentionSpec
from jaxserve.checkpoint.tensor_tables import Alternating, Stacked
from jaxserve.weights.quantise import quantised
from jaxserve.weights.quantised import Blocks, Encoding

Index = tuple[slice, ...]  # of a parameter; slices with start and stop
_ROWS_AT_ONCE = 64  # converted and transposed together: faster than all rows, and less memory
_MOVED = np.dtype(np.uint64)
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_ALIGNMENT = 64  # bytes: JAX's CPU devices take over arrays at such addresses, and copy others


class Reader(Protocol):
    """Reads slices of tensors by name; see `weights.checkpoint.Checkpoint`."""

    def read(
        self, name: str, rows: slice = slice(None), columns: slice | None = None
    ) -> np.ndarray: ...

    def blocks(
        self, name: str, rows: slice, columns: slice | None = None, expert: int | None = None
    ) -> Blocks | None: ...


@dataclass(frozen=True)
class Rows:
    """Rows of a part in the order in which they are outputs of a parameter, and those of its
    columns that are inputs (None: of a vector).

    numbers: of the rows, in any shape; those past the part stand for zeros. expert: number of the
    expert whose part it is, for parts that each has.
    """

    part: str
    numbers: np.ndarray
    columns: slice | None
    expert: int | None = None

    @property
    def width(self) -> int:
        """Number of the columns."""
        assert self.columns is not None
        return self.columns.stop - self.columns.start


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
    and the one after `with_tp`. dtype: to convert to. method: quantises matrices of layers that are
    stored as floats, a key of `quantise.METHODS`; '': none."""

    reader: Reader
    numbers: dict[str, str]
    parts: tuple[str, ...]
    stored: ModelConfig
    model: ModelConfig
    dtype: np.dtype
    method: str = ""

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
    def delta_net(self) -> DeltaNetSpec:
        """Spec of the layer's Gated DeltaNet, of all ranks."""
        assert isinstance(self.mixer, DeltaNetSpec)
        return self.mixer

    @property
    def rotated(self) -> int:
        """Number of dimensions of a head that the layer's RoPE rotates."""
        rope = self.model.rope(int(self.numbers["layers"]))
        return 0 if rope is None else rope.dims(self.model.head_dim)

    def tensor(self, part: str, expert: int | None = None) -> str:
        """Name of the tensor that has a part; expert: its number, for parts that each expert
        has."""
        return places(self.stored)[part].tensor.format(**self.numbers, experts=expert)

    def read(
        self, part: str, rows: slice, columns: slice | None, expert: int | None = None
    ) -> np.ndarray:
        """Reads a slice of a part; expert: as of `tensor`."""
        place = places(self.stored)[part]
        name = self.tensor(part, expert)
        if not place.turns:
            first = place.row + place.stride * (expert or 0)
            return self.reader.read(name, slice(first + rows.start, first + rows.stop), columns)
        assert expert is not None
        one = slice(expert, expert + 1)
        outputs = slice(rows.start * place.turns, rows.stop * place.turns)
        if columns is None:
            return self.reader.read(name, one, outputs)[0, place.row :: place.turns]
        inputs_first = self.reader.read(name, one, columns)[0, :, outputs]
        return inputs_first[:, place.row :: place.turns].T

    def take(self, rows: Rows) -> np.ndarray:
        """Reads rows in their order: [*shape of the numbers, columns]."""
        found, order = self._found(rows)
        values = self.read(rows.part, found, rows.columns, rows.expert)
        if order is not None:
            real = order < len(values)
            ordered = np.zeros((len(order), *values.shape[1:]), values.dtype)
            ordered[real] = values[order[real]]
            values = ordered
        return values.reshape(*rows.numbers.shape, *values.shape[1:])

    def blocks(self, rows: Rows) -> Blocks:
        """Reads rows of a part that has an encoding, in their order: [numbers, columns]."""
        place = places(self.stored)[rows.part]
        found, order = self._found(rows)
        first = place.row + place.stride * (rows.expert or 0)
        some = slice(first + found.start, first + found.stop)
        if place.turns:
            some = slice(found.start * place.turns, found.stop * place.turns)
        name = self.tensor(rows.part, rows.expert)
        blocks = self.reader.blocks(name, some, rows.columns, rows.expert)
        if blocks is None:
            return quantised(self.take(rows).reshape(-1, rows.width), self.method)
        if place.turns:
            blocks = blocks.rows(slice(place.row, None, place.turns))
        if order is not None:
            count = found.stop - found.start
            blocks = blocks.padded(count + 1).rows(np.minimum(order, count))
        return blocks

    def encoding(self, rows: Rows) -> Encoding | None:
        """Returns how a part is quantised; None where it is not."""
        blocks = self.reader.blocks(
            self.tensor(rows.part, rows.expert), slice(0, 0), None, rows.expert
        )
        if blocks is None and self.method and rows.part not in ("embed", "head", "inputs_embed"):
            blocks = quantised(np.zeros((0, rows.width), np.float32), self.method)
        return None if blocks is None else blocks.encoding

    def _found(self, rows: Rows) -> tuple[slice, np.ndarray | None]:
        """The range of stored rows that has all these, and their places in it where they do not
        follow each other; places past it: zeros."""
        numbers = rows.numbers.ravel()
        count = self.stored.parts()[rows.part][0]
        real = numbers[numbers < count]
        if not real.size:
            return slice(0, 0), numbers
        found = slice(int(real.min()), int(real.max()) + 1)
        if len(numbers) == found.stop - found.start and (np.diff(numbers) == 1).all():
            return found, None
        return found, np.where(numbers < count, numbers - found.start, found.stop - found.start)


@functools.lru_cache(maxsize=64)
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


def transpose(rows: np.ndarray, out: np.ndarray) -> None:
    """Writes the transpose of a matrix to `out`, in the dtype of `out`. Neighbours in `out` are
    moved together: numpy moves one element at a time, which is most of the time of loading."""
    together = _MOVED.itemsize // out.itemsize
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        block = converted(rows[first : first + _ROWS_AT_ONCE], out.dtype)
        whole = len(block) // together * together
        moved = np.empty((whole // together, block.shape[1], together), out.dtype)
        for i in range(together):  # long rows: an inner loop over few neighbours is slow
            moved[:, :, i] = block[i:whole:together]
        out[:, first : first + whole].view(_MOVED)[...] = moved.view(_MOVED)[..., 0].T
        out[:, first + whole : first + _ROWS_AT_ONCE] = block[whole:].T


def converted(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns values in a dtype; those that have it as they are. The bits of a bfloat16 are the
    upper ones of its float32, and shifting them is faster than what ml_dtypes does."""
    if values.dtype == _BFLOAT16 and dtype == np.float32:
        return (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return values.astype(dtype, copy=False)


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Allocates an array that JAX's CPU devices take over without a copy."""
    nbytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return memory[first : first + nbytes].view(dtype).reshape(shape)
