"""The interface of checkpoints, how one is opened, and the check that it holds a whole model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

from jaxserve.checkpoint.fetch import local_files
from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.model_files import notes
from jaxserve.checkpoint.model_paths import CheckpointError, check_revision
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.weights.gguf_weights import GgufFile
from jaxserve.weights.names import ignored, tensors_of
from jaxserve.weights.quantised import Blocks
from jaxserve.weights.random_weights import RandomWeights
from jaxserve.weights.safetensors_files import NOT_FLOATS
from jaxserve.weights.safetensors_folder import SafetensorsFolder, without_weights
from jaxserve.weights.store import OrbaxFolder, is_orbax

_MAX_NAMES = 1000  # listed per kind of fault in an error


class Checkpoint(Protocol):
    """Tensors by name, of Hugging Face or, in a GGUF file, of llama.cpp.

    config: the model as stored, before `with_tp`. tokenizer: the file or folder that
    `Tokenizer.load` takes, or None. bytes_read: bytes that `read` took from files.
    """

    config: ModelConfig

    @property
    def bytes_read(self) -> int: ...

    @property
    def tokenizer(self) -> Path | None: ...

    def tensors(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Name -> (shape, name of the stored dtype)."""

    def read(
        self, name: str, rows: slice = slice(None), columns: slice | None = None
    ) -> np.ndarray:
        """Reads a slice of a tensor, f32 or in the stored float type; only its rows and columns (in
        whole quantisation blocks) are read from disk. columns: None for vectors and whole rows."""

    def blocks(
        self, name: str, rows: slice, columns: slice | None = None, expert: int | None = None
    ) -> Blocks | None:
        """Reads a slice of a matrix as it is stored, if it is quantised in a way that devices can
        keep; None otherwise. Without rows nothing is read but the encoding. columns: in
        whole groups; None: all. expert: whose matrix, if the tensor has those of all experts."""

    def release(self) -> None:
        """Gives back the memory of what was read so far, which else counts as the process's."""


def open_checkpoint(source: str | Path, revision: str | None = None) -> Checkpoint | OrbaxFolder:
    """Opens a model: a path (folder or .gguf file), a name or hub id (downloaded unless cached), or
    'random:NAME' for random weights of a shape in `MODELS`. revision: of a hub id; None is main.

    Headers and configs are read and validated, no tensor is read. Errors: CheckpointError, and
    ConfigError for the revision.
    """
    check_revision(source, revision)
    text = str(source)
    if text.startswith("random:"):
        name = text.removeprefix("random:")
        if name not in MODELS:
            raise CheckpointError(f"random:{name}: {name!r} is not one of {', '.join(MODELS)}")
        return RandomWeights(MODELS[name])
    path = local_files(source, revision=revision)
    name = text
    if Path(text).exists():
        name = path.resolve().name.removesuffix(".gguf")
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path}: is neither a folder nor a .gguf file")
        return GgufFile(path, name)
    if not (path / "config.json").exists():
        raise CheckpointError(
            f"{path}: holds neither a .gguf file nor a config.json with weights beside it"
            f"{without_weights(path)}"
        )
    return OrbaxFolder(path, name) if is_orbax(path) else SafetensorsFolder(path, name)


def check(checkpoint: Checkpoint | OrbaxFolder, config: ModelConfig) -> None:
    """Checks that the checkpoint holds exactly the tensors of `config` (before or after `with_tp`)
    in the right shapes. Saved (orbax) folders are not checked here but by `restore`, since what
    they must hold depends on the mesh.

    Biases of zero that the model does not have are left out, which the log says: some tools write
    them beside each quantised matrix. Errors: one CheckpointError with every missing, unexpected,
    misshaped and unreadable name.
    """
    if isinstance(checkpoint, OrbaxFolder):
        return
    stored = checkpoint.tensors()
    own = checkpoint.config
    wanted = tensors_of(replace(config, kv_heads=own.kv_heads, layer_sizes=own.layer_sizes))
    both = [(name, *stored[name], shape) for name, shape in wanted.items() if name in stored]
    others = [name for name in stored if name not in wanted and not ignored(name, config)]
    biases = [name for name in others if _is_bias(name, stored)]
    zeros = [name for name in biases if not checkpoint.read(name).any()]
    if zeros:
        notes.warning(f"{checkpoint.config.name}: left out biases of zero: {zeros[:20]}")
    faults = {
        "missing": [name for name in wanted if name not in stored],
        "unexpected": [name for name in others if name not in zeros],
        "misshaped": [
            f"{name} is {list(shape)}, should be {list(right)}"
            for name, shape, _, right in both
            if shape != right
        ],
        "not floating point": [
            f"{name} is {dtype}" for name, _, dtype, _ in both if dtype in NOT_FLOATS
        ],
    }
    if any(faults.values()):
        raise CheckpointError(
            f"{checkpoint.config.name} does not match its config: "
            + "; ".join(_listed(kind, names) for kind, names in faults.items() if names)
        )


def _is_bias(name: str, stored: Mapping[str, tuple[tuple[int, ...], str]]) -> bool:
    """Returns True for the bias, in floats, of a matrix of the checkpoint."""
    matrix = name.removesuffix(".bias") + ".weight"
    return name.endswith(".bias") and matrix in stored and stored[name][1] not in NOT_FLOATS


def _listed(kind: str, names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{len(names)} {kind}: {', '.join(names[:_MAX_NAMES])}{more}"
