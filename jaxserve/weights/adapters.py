"""Reads low-rank adapters that PEFT saved, as arrays beside the parameters that they change."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxserve.checkpoint.adapters import CONFIG, Factors, declare_factors, read_lora_config
from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.model_paths import CheckpointError
from jaxserve.weights.names import build, modules_of, tensors_of
from jaxserve.weights.quantised import Blocks
from jaxserve.weights.safetensors_files import FLOATS, MappedTensors, safetensors_header

FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_ENDS = (".lora_A.weight", ".lora_B.weight")
_LISTED = 8  # names in an error
Pair = tuple[np.ndarray, np.ndarray]  # down and up, as `Factors` declares them


class AdapterFolder:
    """An adapter in a folder, opened for a model. model: the config of the checkpoint. max_rank:
    the rank that its arrays have, which its own may not exceed.

    Errors: CheckpointError for a config that is not served, for factors of modules that the model
    does not have or that adapters cannot change, and for ranks and shapes that do not fit; those at
    fault are named, up to some.
    """

    def __init__(self, folder: Path, model: ModelConfig, max_rank: int):
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: is no folder with an adapter")
        if not (folder / FILE).exists():
            raise CheckpointError(f"{folder}: has no {FILE}; other files are not read")
        self._config = read_lora_config(folder)
        self._stored = dataclasses.replace(model, gguf=False)  # names and order of Hugging Face
        self._rank = max_rank
        self._tensors = MappedTensors(safetensors_header(folder / FILE))
        self._stems = self._found(folder)  # beginnings of tensors' names, by module
        code = hashlib.sha256((folder / CONFIG).read_bytes())
        with open(folder / FILE, "rb") as file:
            code.update(hashlib.file_digest(file, "sha256").digest())
        self.fingerprint = code.hexdigest()[:16]

    def arrays(self, model: ModelConfig, layers: range, dtype: np.dtype) -> dict[str, Pair]:
        """Reads the factors of the parameters of some layers by path, whole, in a dtype; zeros
        where the adapter changes nothing. model: after `with_tp`."""
        declared = declare_factors(model, layers, self._rank)
        return {path: self._pair(path, each, model, dtype) for path, each in declared.items()}

    def _pair(self, path: str, factors: Factors, model: ModelConfig, dtype: np.dtype) -> Pair:
        """Reads the factors of a parameter: the whole one module by module, the other one as the
        parameter itself is made of its modules."""
        whole = np.zeros(factors.whole.shape, dtype)
        matrices = {}
        for number, module in enumerate(modules_of(path, self._stored)):
            if module in self._stems:
                a, b = self._factors_of(module)
                own = slice(number * self._rank, number * self._rank + len(a))
                if factors.splits_outputs:
                    whole[:, own] = a.T
                    matrix = np.zeros((len(b), factors.width), np.float32)
                    matrix[:, own] = b
                else:
                    whole[own] = b.T
                    matrix = np.zeros((factors.width, a.shape[1]), np.float32)
                    matrix[own] = a
                matrices[module] = matrix
        if not matrices:
            split = np.zeros(factors.split.shape, dtype)
        else:
            split = build(
                path,
                tuple(slice(0, size) for size in factors.split.shape),
                _Matrices(matrices),
                dataclasses.replace(self._stored, d_model=factors.width),
                dataclasses.replace(model, d_model=factors.width),
                dtype,
            )
        return (whole, split) if factors.splits_outputs else (split, whole)

    def _factors_of(self, module: str) -> Pair:
        """Reads A [r, in] and B [out, r] of a module, B with the factor of the change, in f32."""
        stem = self._stems[module]
        a, b = (self._tensors.read(stem + end).astype(np.float32) for end in _ENDS)
        return a, b * np.float32(self._config.scale_of(stem.removeprefix(_PREFIX)))

    def _found(self, folder: Path) -> dict[str, str]:
        """Finds the modules that the file has factors of. Errors: CheckpointError."""
        types = self._tensors.types
        known = module_shapes(self._stored)
        by_layer = {_from_layers(module): module for module in known}
        stems = dict.fromkeys(map(_stem, types))
        found: dict[str, str] = {}
        faults = []
        for stem in stems:
            if not all(stem + end in types for end in _ENDS):
                faults.append(f"{stem} is not lora_A or lora_B of a module, with the other")
                continue
            module = by_layer.get(_from_layers(stem))
            if module is None:
                faults.append(
                    f"{stem} is no module that adapters can change in {self._stored.name}"
                )
                continue
            if module in found:
                faults.append(f"{stem} and {found[module]} are both for {module}")
            found[module] = stem
            faults += self._misshaped(stem, known[module])
        if not types:
            faults.append("it has no tensors")
        if faults:
            more = f"; and {len(faults) - _LISTED} more" if len(faults) > _LISTED else ""
            raise CheckpointError(f"{folder / FILE}: {'; '.join(faults[:_LISTED])}{more}")
        return found

    def _misshaped(self, stem: str, shape: tuple[int, ...]) -> list[str]:
        """Lists what is wrong with the factors of a matrix [out, in]."""
        rank = self._config.rank_of(stem.removeprefix(_PREFIX))
        if rank > self._rank:
            return [f"{stem}: rank {rank} is greater than max_lora_rank, {self._rank}"]
        outputs, inputs = shape
        right = ((rank, inputs), (outputs, rank))
        faults = []
        for end, wanted in zip(_ENDS, right):
            found, dtype = self._tensors.types[stem + end]
            if found != wanted:
                faults.append(f"{stem}{end} is {list(found)}, should be {list(wanted)}")
            if dtype not in FLOATS:
                faults.append(f"{stem}{end} is {dtype}, not floating point")
        return faults


class _Matrices:
    """Matrices [out, in] of modules by name, as `build` reads them; others are zeros."""

    def __init__(self, matrices: Mapping[str, np.ndarray]):
        self._matrices = matrices

    def read(
        self, name: str, rows: slice = slice(None), columns: slice | None = None
    ) -> np.ndarray:
        matrix = self._matrices.get(name.removesuffix(".weight"))
        assert columns is not None, f"{name} is a matrix"
        if matrix is None:
            return np.zeros((rows.stop - rows.start, columns.stop - columns.start), np.float32)
        return matrix[rows, columns]

    def blocks(
        self, name: str, rows: slice, columns: slice | None = None, expert: int | None = None
    ) -> Blocks | None:
        return None


@functools.lru_cache(maxsize=8)
def module_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes [out, in] of the modules that adapters can change. model: before `with_tp`."""
    shapes = tensors_of(model)
    paths = declare_factors(model, range(model.layers), 1)
    return {
        module: shapes[f"{module}.weight"]
        for path in paths
        for module in modules_of(path, model)
        if f"{module}.weight" in shapes
    }


def _stem(name: str) -> str:
    """Returns the name of a factor without its end; of other tensors, the whole name."""
    return next((name.removesuffix(end) for end in _ENDS if name.endswith(end)), name)


def _from_layers(name: str) -> str:
    """Returns the part of a module's name that starts with its layer: what is before that differs
    between a model and a wrapper of it."""
    return name[max(name.find("layers."), 0) :]
