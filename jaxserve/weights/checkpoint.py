"""What a checkpoint is to the rest of jaxserve, how one is opened, and the check that it holds a
whole model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

from jaxserve.checkpoint.fetch import fetch
from jaxserve.checkpoint.model_paths import HUB_ID, CheckpointError, model_file, resolve
from jaxserve.checkpoint.zoo import MODELS, ModelConfig
from jaxserve.weights.gguf_weights import GgufFile
from jaxserve.weights.names import ignored, tensors_of
from jaxserve.weights.random_weights import RandomWeights
from jaxserve.weights.safetensors_folder import FLOATS, SafetensorsFolder
from jaxserve.weights.store import OrbaxFolder, is_orbax

_REPORTED = 1000  # names per kind of fault in an error


class Checkpoint(Protocol):
    """Tensors under their Hugging Face names. `config` is the model as stored, before `with_tp`;
    `tokenizer` is the file or folder that `Tokenizer.load` takes, None where there is none;
    `bytes_read` counts what `read` took from files."""

    config: ModelConfig
    bytes_read: int

    @property
    def tokenizer(self) -> Path | None: ...

    def tensors(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Name -> shape, name of the stored dtype."""

    def read(
        self, name: str, rows: slice = slice(None), columns: slice | None = None
    ) -> np.ndarray:
        """Those rows and columns; only they (in whole quantisation blocks) are read."""


def open_checkpoint(source: str | Path) -> Checkpoint | OrbaxFolder:
    """A fetched name, a folder, a .gguf file, a hub id (fetched if it is not in the cache), or
    'random:NAME' for a row of `MODELS`.

    Headers and configs are read and validated; no tensor is. Errors: CheckpointError.
    """
    text = str(source)
    if text.startswith("random:"):
        name = text.removeprefix("random:")
        if name not in MODELS:
            raise CheckpointError(f"random:{name}: {name!r} is not one of {', '.join(MODELS)}")
        return RandomWeights(MODELS[name])
    if HUB_ID.fullmatch(text) and not Path(text).exists():
        fetch(text)
    path = model_file(resolve(source))
    name = (
        text
        if not Path(text).exists()
        else path.resolve().stem
        if path.is_file()
        else path.resolve().name
    )
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path}: is neither a folder nor a .gguf file")
        return GgufFile(path, name)
    if not (path / "config.json").exists():
        raise CheckpointError(
            f"{path}: holds neither a .gguf file nor a config.json with weights beside it"
        )
    return OrbaxFolder(path, name) if is_orbax(path) else SafetensorsFolder(path, name)


def check(checkpoint: Checkpoint | OrbaxFolder, config: ModelConfig) -> None:
    """That the checkpoint holds the tensors of `config` (before or after `with_tp`), all of them
    and no others, in the right shapes. What an orbax folder must hold depends on the mesh;
    `restore` checks it.

    Errors: one CheckpointError with every missing, unexpected, misshaped and unreadable name.
    """
    if isinstance(checkpoint, OrbaxFolder):
        return
    there = checkpoint.tensors()
    quantised = isinstance(checkpoint, GgufFile)
    wanted = tensors_of(replace(config, kv_heads=checkpoint.config.kv_heads))
    both = [(name, *there[name], shape) for name, shape in wanted.items() if name in there]
    faults = {
        "missing": [name for name in wanted if name not in there],
        "unexpected": [name for name in there if name not in wanted and not ignored(name, config)],
        "misshaped": [
            f"{name} is {list(shape)}, should be {list(right)}"
            for name, shape, _, right in both
            if shape != right
        ],
        "of a dtype that is no float": [
            f"{name} is {dtype}"
            for name, _, dtype, _ in both
            if not quantised and dtype not in FLOATS
        ],
    }
    if any(faults.values()):
        raise CheckpointError(
            f"{checkpoint.config.name} does not hold the model that its config describes: "
            + "; ".join(_listed(kind, names) for kind, names in faults.items() if names)
        )


def _listed(kind: str, names: list[str]) -> str:
    more = f" and {len(names) - _REPORTED} more" if len(names) > _REPORTED else ""
    return f"{len(names)} {kind}: {', '.join(names[:_REPORTED])}{more}"
