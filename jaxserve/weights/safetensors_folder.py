"""Reads folders of safetensors files as checkpoints.

Only .json and .safetensors files are opened.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxserve.checkpoint.families import layout
from jaxserve.checkpoint.generation_config import generation_fields
from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.model_config import from_hf
from jaxserve.checkpoint.model_files import notes, read_json, read_object
from jaxserve.checkpoint.model_paths import CheckpointError, reason
from jaxserve.checkpoint.quantization import read_quantization
from jaxserve.checkpoint.tensor_tables import STACKED_EXPERTS, names_experts
from jaxserve.checkpoint.tokenizer_files import eos_id
from jaxserve.weights.names import family_names
from jaxserve.weights.quantised import Blocks
from jaxserve.weights.quantised_layouts import quantised_tensors
from jaxserve.weights.quantised_tensors import QuantisedTensor
from jaxserve.weights.safetensors_files import (
    MappedTensors,
    TensorPlace,
    by_expert,
    safetensors_header,
)
from jaxserve.weights.sources import places

_WHOLE = "model.safetensors"
_NUMBERED = re.compile(r"(model)-(\d+)-of-(\d{1,6})\.safetensors")
# beginnings of names of files that stand beside a model: the same weights under other names,
# adapters, states of training
_NOT_THE_MODEL = ("consolidated", "adapter", "optimizer", "training", "scheduler", "rng")
_ALL = slice(None)


class SafetensorsFolder:
    """A checkpoint in a folder with config.json and .safetensors files. Pickles and code in the
    folder are never opened."""

    def __init__(self, folder: Path, name: str = ""):
        self.tokenizer = tokenizer_of(folder)
        config = read_config(folder, name)
        stored = placed_tensors(folder)
        names = family_names(stored, config)
        if others := [name for name in stored if name not in names]:
            notes.warning(
                f"{folder}: left out tensors of other parts than the decoder: {others[:20]}"
            )
        places = {names[name]: place for name, place in stored.items() if name in names}
        if names_experts(layout(config).tensors):
            places = by_expert(places, STACKED_EXPERTS)
        self._files = MappedTensors(places)
        quantization = read_quantization(read_object(folder / "config.json"))
        self._quantised: dict[str, QuantisedTensor] = {}
        if quantization is not None:
            self._quantised = quantised_tensors(self._files, quantization)
        self.config = _tied_without_head(folder, config, self.tensors())

    @property
    def bytes_read(self) -> int:
        """Bytes that were taken from the files."""
        return self._files.bytes_read

    def tensors(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Name -> (shape, name of the stored dtype or, of a quantised matrix, of its format)."""
        found = dict(self._files.types)
        for name, tensor in self._quantised.items():
            for part in tensor.names:
                del found[part]
            found[name] = tensor.shape, tensor.kind
        return found

    def read(self, name: str, rows: slice = _ALL, columns: slice | None = None) -> np.ndarray:
        """Reads a slice of a tensor: a view of the mapped file, in the stored dtype; f32 if it is
        quantised."""
        if name in self._quantised:
            tensor = self._quantised[name]
            return tensor.values(self._files, *_limits(tensor.shape, rows, columns))
        index = (rows,) if columns is None else (rows, columns)
        return self._files.read(name, *index)

    def blocks(
        self, name: str, rows: slice, columns: slice | None = None, expert: int | None = None
    ) -> Blocks | None:
        """Reads a slice of a quantised matrix as it is stored; None for a tensor that is not
        quantised. expert: which matrix, of a tensor that has those of all experts."""
        tensor = self._quantised.get(name)
        if tensor is None:
            return None
        if len(tensor.shape) == 2:
            expert = None  # the tensor is that of one
        return tensor.blocks(self._files, *_limits(tensor.matrix, rows, columns), expert)

    def release(self) -> None:
        """Gives back the memory of what was read so far."""
        self._files.release()


def _limits(shape: tuple[int, ...], rows: slice, columns: slice | None) -> tuple[slice, slice]:
    """Slices of a matrix with start and stop."""
    both = rows, columns or _ALL
    top, left = (slice(*some.indices(size)[:2]) for some, size in zip(both, shape))
    return top, left


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


def placed_tensors(folder: Path) -> dict[str, TensorPlace]:
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
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise CheckpointError(f"{index}: has no weight_map of file names")
    names = sorted(set(weight_map.values()))
    for name in names:
        if not re.fullmatch(r"[\w.-]+\.safetensors", name):
            raise CheckpointError(f"{index}: {name!r} is not the plain name of a .safetensors file")
    return names
