"""Safetensors folders, read without the library: a JSON header, then bytes. The header is believed
only where it adds up.

Files are mapped; `bytes_read` counts what was taken from them. Nothing but .json and .safetensors
files is ever opened.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxserve.checkpoint.model_config import from_hf
from jaxserve.checkpoint.model_paths import CheckpointError
from jaxserve.checkpoint.zoo import ModelConfig

MAX_HEADER = 100 * 2**20
FLOATS = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_OTHERS = {1: "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0", 2: "I16 U16", 4: "I32 U32", 8: "I64 U64"}
_SIZES = {name: d.itemsize for name, d in FLOATS.items()} | {
    name: size for size, names in _OTHERS.items() for name in names.split()
}
_ALL = slice(None)


class TensorPlace(NamedTuple):
    """Where a tensor lies: bytes `start` to `stop` of `file`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFolder:
    """A folder with config.json and one or more .safetensors files. Other weight files in it, and
    code, are never opened."""

    def __init__(self, folder: Path, name: str = ""):
        self.bytes_read = 0
        self.tokenizer = folder if (folder / "tokenizer.json").exists() else None
        self.config = read_config(folder, name)
        self._places = _placed_tensors(folder)
        self._maps = {
            file: np.memmap(file, np.uint8, "r")
            for file in {place.file for place in self._places.values()}
        }

    def tensors(self) -> dict[str, tuple[tuple[int, ...], str]]:
        return {name: (place.shape, place.dtype) for name, place in self._places.items()}

    def read(self, name: str, rows: slice = _ALL, columns: slice | None = None) -> np.ndarray:
        """A view of the mapped file, in the stored dtype."""
        place = self._places[name]
        found = (
            self._maps[place.file][place.start : place.stop]
            .view(FLOATS[place.dtype])
            .reshape(place.shape)
        )
        found = found[rows] if columns is None else found[rows, columns]
        self.bytes_read += found.nbytes
        return found


def read_json(path: Path) -> Any:
    """Errors: CheckpointError for what is missing, not JSON or absurdly large."""
    try:
        if path.stat().st_size > MAX_HEADER:
            raise CheckpointError(f"{path}: larger than {MAX_HEADER} bytes")
        return json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from None


def read_config(folder: Path, name: str = "") -> ModelConfig:
    """ModelConfig of a folder's config.json and generation_config.json."""
    generation = folder / "generation_config.json"
    config = read_json(folder / "config.json")
    more = read_json(generation) if generation.exists() else {}
    if not isinstance(config, dict) or not isinstance(more, dict):
        raise CheckpointError(f"{folder}: config.json and generation_config.json must hold objects")
    try:
        return from_hf(config, more, name)
    except (TypeError, ValueError, AttributeError) as error:
        text = (
            error.args[0].removeprefix("model: ") if isinstance(error, CheckpointError) else error
        )
        raise CheckpointError(f"{folder / 'config.json'}: {text}") from None


def _placed_tensors(folder: Path) -> dict[str, TensorPlace]:
    places: dict[str, TensorPlace] = {}
    for file in _shards(folder):
        for name, place in safetensors_header(file).items():
            if name in places:
                raise CheckpointError(
                    f"{file}: tensor {name!r} is in {places[name].file.name} as well"
                )
            places[name] = place
    return places


def _shards(folder: Path) -> list[Path]:
    """The .safetensors files of a folder: those its index names, where it has one."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            others = [
                f.name
                for f in sorted(folder.iterdir())
                if f.suffix in (".bin", ".pt", ".pth", ".ckpt")
            ]
            hint = (
                f"; {others[0]} is a pickle, which is never read: convert it to safetensors"
                if others
                else ""
            )
            raise CheckpointError(f"{folder}: no .safetensors files{hint}")
        return files
    weight_map = (
        (content := read_json(index)) and isinstance(content, dict) and content.get("weight_map")
    )
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise CheckpointError(f"{index}: has no weight_map of file names")
    names = sorted(set(weight_map.values()))
    for name in names:
        if not re.fullmatch(r"[\w.-]+\.safetensors", name):
            raise CheckpointError(f"{index}: {name!r} is not the plain name of a .safetensors file")
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise CheckpointError(f"{folder}: missing files that the index names: {', '.join(missing)}")
    return [folder / name for name in names]


def safetensors_header(file: Path) -> dict[str, TensorPlace]:
    """Tensors of one file. Errors: CheckpointError where the header lies: lengths, dtypes,
    overlaps, gaps, bytes past the end."""
    try:
        size = file.stat().st_size
        with open(file, "rb") as f:
            length = int.from_bytes(f.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, MAX_HEADER):
                raise CheckpointError(
                    f"{file}: truncated or no safetensors file (header of {length} bytes, file of {size})"
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
    entries = (
        {name: entry for name, entry in header.items() if name != "__metadata__"}
        if isinstance(header, dict)
        else {}
    )
    for name, entry in sorted(entries.items(), key=_begin):
        place = _place(file, name, entry, 8 + length)
        if place.start != end:
            raise CheckpointError(
                f"{file}: tensor {name!r} begins at byte {place.start}, the last one ends at {end}: an overlap or a gap"
            )
        places[name] = place
        end = place.stop
    if end != size:
        raise CheckpointError(
            f"{file}: the tensors end at byte {end}, the file at {size}: truncated, or data that no tensor claims"
        )
    return places


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} is there twice")
        found[key] = value
    return found


def _begin(item: tuple[str, Any]) -> tuple[int, int]:
    offsets: Any = item[1].get("data_offsets") if isinstance(item[1], dict) else None
    return (offsets[0], offsets[1]) if _whole(offsets) and len(offsets) == 2 else (-1, -1)


def _whole(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values
    )


def _place(file: Path, name: str, entry: Any, data: int) -> TensorPlace:
    dtype: Any
    shape: Any
    offsets: Any
    dtype, shape, offsets = (
        (entry.get(k) for k in ("dtype", "shape", "data_offsets"))
        if isinstance(entry, dict)
        else (None,) * 3
    )
    if (
        not isinstance(dtype, str)
        or dtype not in _SIZES
        or not _whole(shape)
        or not _whole(offsets)
        or len(offsets) != 2
    ):
        raise CheckpointError(
            f"{file}: tensor {name!r} has no valid dtype, shape and data_offsets: {str(entry)[:200]}"
        )
    if offsets[1] - offsets[0] != math.prod(shape) * _SIZES[dtype]:
        raise CheckpointError(
            f"{file}: tensor {name!r} of {dtype} {shape} cannot have {offsets[1] - offsets[0]} bytes"
        )
    return TensorPlace(file, dtype, tuple(shape), data + offsets[0], data + offsets[1])
