"""Reads folders of safetensors files as checkpoints.

A file is a JSON header, then bytes. Nothing of the header is used before it has been validated
against the size of the file. Files are memory-mapped; only .json and .safetensors files are opened.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import ml_dtypes
import numpy as np

from jaxserve.checkpoint.generation_config import generation_fields
from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.model_config import from_hf
from jaxserve.checkpoint.model_files import (
    MAX_JSON_BYTES,
    notes,
    read_json,
    read_object,
    refuse_pointer,
)
from jaxserve.checkpoint.model_paths import CheckpointError, reason
from jaxserve.checkpoint.tokenizer_files import eos_id
from jaxserve.weights.names import family_names
from jaxserve.weights.sources import places

_WHOLE = "model.safetensors"
_NUMBERED = re.compile(r"(model)-(\d+)-of-(\d{1,6})\.safetensors")
# beginnings of names of files that stand beside a model: the same weights under other names,
# adapters, states of training
_NOT_THE_MODEL = ("consolidated", "adapter", "optimizer", "training", "scheduler", "rng")
FLOATS = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# dtypes that are not loaded but may appear in a header, by item size in bytes
_OTHERS = {1: "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0", 2: "I16 U16", 4: "I32 U32", 8: "I64 U64"}
_ITEM_SIZES = {name: d.itemsize for name, d in FLOATS.items()} | {
    name: size for size, names in _OTHERS.items() for name in names.split()
}
_ALL = slice(None)


class TensorPlace(NamedTuple):
    """A tensor in a file: bytes `start` to `stop` of `file`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFolder:
    """A checkpoint in a folder with config.json and .safetensors files. `bytes_read` counts what
    `read` took from them; pickles and code in the folder are never opened."""

    def __init__(self, folder: Path, name: str = ""):
        self.bytes_read = 0
        self._counting = threading.Lock()
        self.tokenizer = tokenizer_of(folder)
        config = read_config(folder, name)
        stored = _placed_tensors(folder)
        names = family_names(stored, config)
        self._places = {names[name]: place for name, place in stored.items() if name in names}
        if others := [name for name in stored if name not in names]:
            notes.warning(
                f"{folder}: left out tensors of other parts than the decoder: {others[:20]}"
            )
        self.config = _tied_without_head(folder, config, self._places)
        self._maps = {
            file: np.memmap(file, np.uint8, "r")
            for file in {place.file for place in self._places.values()}
        }

    def tensors(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Name -> (shape, name of the stored dtype)."""
        return {name: (place.shape, place.dtype) for name, place in self._places.items()}

    def read(self, name: str, rows: slice = _ALL, columns: slice | None = None) -> np.ndarray:
        """Reads a slice of a tensor: a view of the mapped file, in the stored dtype."""
        place = self._places[name]
        values = (
            self._maps[place.file][place.start : place.stop]
            .view(FLOATS[place.dtype])
            .reshape(place.shape)
        )
        values = values[rows] if columns is None else values[rows, columns]
        with self._counting:
            self.bytes_read += values.nbytes
        return values


def _tied_without_head(folder: Path, config: ModelConfig, stored: Iterable[str]) -> ModelConfig:
    """Returns the config of a model whose head is its embedding where the files have no head: a
    config may leave that out, and models for embeddings have none."""
    head = places(config)["head"].tensor
    if head in stored:
        return config
    notes.warning(f"{folder}: there is no {head}; the embedding is taken for it")
    return replace(config, tied=True)


def tokenizer_of(folder: Path) -> Path | None:
    """Returns the folder if it holds a tokenizer."""
    return folder if (folder / "tokenizer.json").exists() else None


def read_config(folder: Path, name: str = "") -> ModelConfig:
    """ModelConfig of a folder's config.json, generation_config.json and tokenizer; name: of the
    model, if the files have none. Errors: CheckpointError."""
    config = read_object(folder / "config.json")
    generation = generation_fields(folder)
    end = eos_id(folder)
    try:
        return from_hf(config, generation, name, end)
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{folder / 'config.json'}: {reason(error)}") from None


def _placed_tensors(folder: Path) -> dict[str, TensorPlace]:
    """The tensors of all files of a folder, by name."""
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
    """The .safetensors files of a folder that hold its model; the others are said.

    They are model.safetensors, else those that the index names, else those of a numbered set, else
    all that are not known to be something else. Errors: CheckpointError where some are missing.
    """
    files = {file.name: file for file in sorted(folder.glob("*.safetensors"))}
    index = folder / f"{_WHOLE}.index.json"
    if _WHOLE in files:
        chosen = [_WHOLE]
    elif index.exists():
        chosen = _indexed(index)
    else:
        numbered = [match for name in files if (match := _NUMBERED.fullmatch(name))]
        chosen = _complete_set(numbered)
        chosen = chosen or [name for name in files if not name.startswith(_NOT_THE_MODEL)]
    if not chosen:
        raise CheckpointError(f"{folder}: no .safetensors files{without_weights(folder)}")
    if missing := [name for name in chosen if name not in files]:
        raise CheckpointError(
            f"{folder}: these files of the model are missing: {', '.join(missing)}"
        )
    if others := [name for name in files if name not in chosen]:
        notes.warning(f"{folder}: left out, as they are not of the model: {', '.join(others)}")
    return [files[name] for name in chosen]


def _complete_set(numbered: Sequence[re.Match[str]]) -> list[str]:
    """Returns the names of all files of the set to which the first of some numbered files
    belongs."""
    if not numbered:
        return []
    stem, digits, total = numbered[0].groups()
    numbers = range(1, int(total) + 1)
    return [f"{stem}-{i:0{len(digits)}}-of-{total}.safetensors" for i in numbers]


def without_weights(folder: Path) -> str:
    """Says what to do about a folder without weights that are read; '' where that is not known."""
    if adapters := sorted(folder.glob("adapter_*")):
        return f"; {adapters[0].name} is of an adapter: merge it into its model first"
    kinds = (".bin", ".pt", ".pth", ".ckpt")
    pickles = [file.name for file in sorted(folder.iterdir()) if file.suffix in kinds]
    if not pickles:
        return ""
    return f"; {pickles[0]} is a pickle, which is never read: convert it to safetensors"


def _indexed(index: Path) -> list[str]:
    """Returns the names of the files that an index names. Errors: CheckpointError."""
    content = read_json(index)
    weight_map = _object(content).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise CheckpointError(f"{index}: has no weight_map of file names")
    names = sorted(set(weight_map.values()))
    for name in names:
        if not re.fullmatch(r"[\w.-]+\.safetensors", name):
            raise CheckpointError(f"{index}: {name!r} is not the plain name of a .safetensors file")
    return names


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
