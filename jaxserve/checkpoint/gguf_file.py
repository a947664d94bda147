"""Reads the header of a GGUF file: metadata and table of tensors.

Every count, length and offset is checked against the size of the file before it is used, which the
reader of the `gguf` library does not do; of that library only the block formats are used.

Layout, little endian: magic, version, tensor count, field count; fields (key, type, value); tensor
infos (name, dimensions, type, offset); padding; data. Tensors lie one after another, each padded to
the alignment.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxserve.checkpoint.model_files import refuse_pointer
from jaxserve.checkpoint.model_paths import CheckpointError, reason

# field types: codes of `struct`, by number
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING = 8
_ARRAY = 9
_MAX_DIMENSIONS = 4


@dataclass(frozen=True)
class GgufTensor:
    """Shape (row-major; the file lists dimensions innermost first), GGML type, and place of a
    tensor: bytes `start` to `stop` of the file."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    stop: int


@dataclass(frozen=True)
class GgufHeader:
    """Metadata by key, and tensors by name."""

    fields: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_header(path: Path | str) -> GgufHeader:
    """Reads metadata and tensor table. Errors: CheckpointError if the file is truncated,
    inconsistent, or not a GGUF file of a known version."""
    refuse_pointer(Path(path))
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Cursor(data))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {reason(error)}") from None
    except (struct.error, ValueError, TypeError, OverflowError) as error:
        raise CheckpointError(f"{path}: not a readable GGUF file ({error})") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None


class _Cursor:
    """Reads forward through bytes; a read past their end is a CheckpointError."""

    def __init__(self, data: mmap.mmap):
        self.data = data
        self.at = 0

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise CheckpointError(
                f"truncated: {count} bytes are announced at byte {self.at}, "
                f"the file ends at {len(self.data)}"
            )
        self.at += count
        return self.data[self.at - count : self.at]

    def scalar(self, code: str) -> Any:
        """One number; code: of `struct`."""
        value = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]
        # shortest decimal of an f32: 1e-05, not 9.999999747378752e-06
        return float(str(np.float32(value))) if code == "f" else value

    def count(self, what: str, smallest: int) -> int:
        """A count of items that take at least `smallest` bytes each; what: their name in errors."""
        value = self.scalar("Q")
        if value * smallest > len(self.data) - self.at:
            raise CheckpointError(
                f"{value} {what} are announced at byte {self.at}, more than fit in the file"
            )
        return value

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode()

    def value(self, kind: int) -> Any:
        """A field's value; kind: its GGUF type."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(self.scalar("I"))
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        raise CheckpointError(f"unknown field type {kind} at byte {self.at}")

    def array(self, kind: int) -> Any:
        """An array field: numbers as a numpy array, strings as a list."""
        if kind == _STRING:
            return [self.string() for _ in range(self.count("strings", 8))]
        if kind not in _SCALARS:
            raise CheckpointError(f"arrays of field type {kind} are not supported")
        dtype = np.dtype("<" + _SCALARS[kind])
        return np.frombuffer(
            self.take(self.count("numbers", dtype.itemsize) * dtype.itemsize), dtype
        )


def _parse(cursor: _Cursor) -> GgufHeader:
    if cursor.take(4) != b"GGUF":
        raise CheckpointError("not a GGUF file: its first four bytes are not 'GGUF'")
    if (version := cursor.scalar("I")) not in (2, 3):
        raise CheckpointError(f"GGUF version {version} is not 2 or 3 (or the file is big endian)")
    tensor_count = cursor.count("tensors", 24)
    field_count = cursor.count("fields", 13)
    fields: dict[str, Any] = {}
    for _ in range(field_count):
        key = cursor.string()
        if key in fields:
            raise CheckpointError(f"field {key!r} is given twice")
        fields[key] = cursor.value(cursor.scalar("I"))
    if fields.get("split.count", 1) > 1:
        raise CheckpointError(
            "the model is split over several GGUF files; "
            "merge them first (llama.cpp's gguf-split --merge)"
        )
    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= 2**20 or alignment & (alignment - 1):
        raise CheckpointError(f"alignment {alignment!r} is not a power of two")
    infos = [_tensor_info(cursor) for _ in range(tensor_count)]
    return GgufHeader(
        fields, _placed(infos, _padded(cursor.at, alignment), alignment, len(cursor.data))
    )


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int, int]:
    """One entry of the tensor table: name, shape, type, offset in the data section, and bytes."""
    name = cursor.string()
    dimensions = cursor.scalar("I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise CheckpointError(f"tensor {name!r} has {dimensions} dimensions")
    shape = tuple(cursor.scalar("Q") for _ in range(dimensions))[::-1]
    code = cursor.scalar("I")
    offset = cursor.scalar("Q")
    if code not in GGML_QUANT_SIZES:
        raise CheckpointError(f"tensor {name!r} has the unknown type {code}")
    kind = GGMLQuantizationType(code)
    block, size = GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise CheckpointError(
            f"tensor {name!r}: rows of {shape[-1]} are not whole blocks of {block}"
        )
    return name, shape, kind, offset, math.prod(shape) // block * size


def _placed(infos: list[tuple], begin: int, alignment: int, size: int) -> dict[str, GgufTensor]:
    """Checks that tensors follow each other without gaps, inside the file of `size` bytes, and
    returns them by name. begin: start of the data section."""
    tensors: dict[str, GgufTensor] = {}
    end = 0
    for name, shape, kind, offset, nbytes in infos:
        if name in tensors:
            raise CheckpointError(f"tensor {name!r} is given twice")
        if offset != _padded(end, alignment):
            raise CheckpointError(
                f"tensor {name!r} begins at data byte {offset}, "
                f"the one before it ends at {end}: an overlap or a gap"
            )
        end = offset + nbytes
        if begin + end > size:
            raise CheckpointError(
                f"truncated: tensor {name!r} ends at byte {begin + end}, the file at {size}"
            )
        tensors[name] = GgufTensor(shape, kind, begin + offset, begin + end)
    return tensors


def _padded(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment
