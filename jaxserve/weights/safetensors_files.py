"""Files in the safetensors format: their headers, and views of their tensors.

A file is a JSON header, then bytes. Nothing of the header is used before it has been validated
against the size of the file. Files are memory-mapped.
"""

from __future__ import annotations

import functools
import json
import math
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import ml_dtypes
import numpy as np

from jaxserve.checkpoint.model_files import MAX_JSON_BYTES, refuse_pointer
from jaxserve.checkpoint.model_paths import CheckpointError
from jaxserve.weights.mapped_file import MappedFile

FLOATS = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# dtypes of the tensors of quantised matrices
_CODES = {
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
_DTYPES = FLOATS | _CODES
# dtypes that are not loaded but may appear in a header, by item size in bytes
_OTHERS = {1: "BOOL F8_E5M2", 2: "I16 U16", 4: "U32", 8: "U64"}
_ITEM_SIZES = {name: d.itemsize for name, d in _DTYPES.items()} | {
    name: size for size, names in _OTHERS.items() for name in names.split()
}
NOT_FLOATS = _ITEM_SIZES.keys() - FLOATS.keys()


class TensorPlace(NamedTuple):
    """A tensor in a file: bytes `start` to `stop` of `file`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def by_expert(
    places: Mapping[str, TensorPlace], stacked: Mapping[str, tuple[str, ...]]
) -> dict[str, TensorPlace]:
    """Cuts tensors [experts, outputs, inputs] into a matrix of each expert and part. stacked: parts
    of outputs by the ends of such tensors' names, as in 'experts.down_proj'."""
    found: dict[str, TensorPlace] = {}
    for name, place in places.items():
        end = ".".join(name.split(".")[-2:])
        parts = stacked.get(end, ())
        if not parts or len(place.shape) != 3 or place.shape[1] % len(parts):
            found[name] = place
            continue
        experts, outputs, inputs = place.shape
        size = (place.stop - place.start) // max(experts * len(parts), 1)
        prefix = name.removesuffix(end.split(".")[1])
        for number in range(experts * len(parts)):
            expert, part = divmod(number, len(parts))
            start = place.start + number * size
            found[f"{prefix}{expert}.{parts[part]}"] = place._replace(
                shape=(outputs // len(parts), inputs), start=start, stop=start + size
            )
    return found


class MappedTensors:
    """Tensors in mapped files. `bytes_read` counts what `read` returned."""

    def __init__(self, places: Mapping[str, TensorPlace]):
        self.bytes_read = 0
        self._counting = threading.Lock()
        self._places = places
        files = {place.file for place in places.values()}
        self._files = {file: MappedFile(file) for file in files}

    @functools.cached_property
    def types(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Name -> (shape, name of the stored dtype)."""
        return {name: (place.shape, place.dtype) for name, place in self._places.items()}

    def read(self, name: str, *index: slice, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """Returns a view of a part of a tensor, in its stored dtype. shape: as which it is taken;
        None: its own."""
        place = self._places[name]
        memory = self._files[place.file].bytes[place.start : place.stop]
        values = memory.view(_DTYPES[place.dtype]).reshape(shape or place.shape)[index]
        with self._counting:
            self.bytes_read += values.nbytes
        return values

    def release(self) -> None:
        """Gives back the memory of what was read so far."""
        for file in self._files.values():
            file.release()


def safetensors_header(file: Path) -> dict[str, TensorPlace]:
    """Reads and validates the header of a .safetensors file: its tensors by name. Errors:
    CheckpointError for wrong lengths, unknown dtypes, overlaps, gaps, and bytes past the end."""
    refuse_pointer(file)
    try:
        size = file.stat().st_size
        with open(file, "rb") as f:
            length = int.from_bytes(f.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, MAX_JSON_BYTES):
                raise CheckpointError(
                    f"{file}: truncated, or not a safetensors file "
                    f"(header of {length} bytes, file of {size})"
                )
            header = json.loads(f.read(length), object_pairs_hook=_unique)
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file}: the header is not JSON ({error})") from None
    places = {}
    end = 8 + length
    entries = _object(header)
    entries.pop("__metadata__", None)
    for name, entry in sorted(entries.items(), key=_begin):
        place = _place(file, name, entry, 8 + length)
        if place.start != end:
            raise CheckpointError(
                f"{file}: tensor {name!r} begins at byte {place.start}, "
                f"the last one ends at {end}: an overlap or a gap"
            )
        places[name] = place
        end = place.stop
    if end != size:
        raise CheckpointError(
            f"{file}: the tensors end at byte {end}, the file at {size}: "
            "truncated, or data that no tensor claims"
        )
    return places


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict. Errors: ValueError for a repeated key."""
    entries: dict[str, Any] = {}
    for key, value in pairs:
        if key in entries:
            raise ValueError(f"{key!r} is given twice")
        entries[key] = value
    return entries


def _begin(item: tuple[str, Any]) -> tuple[int, int]:
    """Sort key of header entries: their offsets, invalid ones first."""
    offsets: Any = _object(item[1]).get("data_offsets")
    if _is_counts(offsets) and len(offsets) == 2:
        return offsets[0], offsets[1]
    return -1, -1


def _object(value: Any) -> dict[str, Any]:
    """Returns a JSON value if it is an object; else an empty one."""
    return value if isinstance(value, dict) else {}


def _is_counts(values: object) -> TypeGuard[list[int]]:
    """Returns True if a JSON value is a list of whole numbers of at least 0."""
    return isinstance(values, list) and all(
        isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values
    )


def _place(file: Path, name: str, entry: Any, data: int) -> TensorPlace:
    """Validates one entry of a header; data: where the tensors' bytes begin in the file."""
    fields = _object(entry)
    dtype = fields.get("dtype")
    shape = fields.get("shape")
    offsets = fields.get("data_offsets")
    if (
        not isinstance(dtype, str)
        or dtype not in _ITEM_SIZES
        or not _is_counts(shape)
        or not _is_counts(offsets)
        or len(offsets) != 2
    ):
        raise CheckpointError(
            f"{file}: tensor {name!r} has no valid dtype, shape and data_offsets: "
            f"{str(entry)[:200]}"
        )
    size = offsets[1] - offsets[0]
    if size != math.prod(shape) * _ITEM_SIZES[dtype]:
        raise CheckpointError(
            f"{file}: tensor {name!r} of {dtype} {shape} cannot have {size} bytes"
        )
    return TensorPlace(file, dtype, tuple(shape), data + offsets[0], data + offsets[1])
