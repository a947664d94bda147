"""Saves and restores sharded parameters with orbax, so that a restart neither dequantises nor
re-lays-out a checkpoint.

A folder holds `params` (orbax), config.json and the tokenizer's files. It restores onto any mesh
whose parameters have the saved shapes: any spp and kvp, and any tp that neither repeats kv heads
differently nor pads the vocabulary differently.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxserve.checkpoint.generation_config import FILE, file_fields
from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.model_config import to_hf
from jaxserve.checkpoint.model_paths import CheckpointError
from jaxserve.checkpoint.specs import Declared
from jaxserve.text import Tokenizer
from jaxserve.weights.safetensors_folder import read_config, tokenizer_of

log = logging.getLogger(__name__)
_PARAMS = "params"
# Parameter names in folders saved by jaxserve 0.1; read until 0.3.
_RENAMED = {
    "norm1": "attn_norm",
    "norm2": "mlp_norm",
    "o": "attention.o_proj",
    **{name: f"attention.{name}" for name in ("qkv", "qkv_bias", "q_norm", "k_norm", "o_proj")},
    **{name: f"mlp.{name}" for name in ("gate_up", "down")},
}


class OrbaxFolder:
    """A folder written by `save`; `load` restores it. It has no tensors under Hugging Face
    names."""

    def __init__(self, folder: Path, name: str = ""):
        self.folder = folder
        self.bytes_read = 0
        self.config = read_config(folder, name)
        self.tokenizer = tokenizer_of(folder)

    def tensors(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Parameter path -> (shape, name of the stored dtype)."""
        return {_current_name(path): entry for path, entry in _stored(self.folder).items()}


def is_orbax(folder: Path) -> bool:
    """Returns True if `save` wrote this folder."""
    return (folder / _PARAMS / "_METADATA").exists()


def save(
    folder: Path | str,
    params: Mapping[str, jax.Array],
    config: ModelConfig,
    tokenizer: Path | None = None,
) -> None:
    """Writes the parameters of all stages (by path), config.json and generation_config.json
    (`config` is before `with_tp`), and the files of `tokenizer`, a file or folder that
    `Tokenizer.load` takes.

    Errors: CheckpointError where the folder holds parameters already, or some are quantised.
    """
    import orbax.checkpoint as ocp

    folder = Path(folder).absolute()
    if (folder / _PARAMS).exists():
        raise CheckpointError(f"{folder} holds saved parameters already")
    if quantised := [path for path, value in params.items() if not isinstance(value, jax.Array)]:
        raise CheckpointError(
            f"{quantised[0]} is quantised, and folders hold floats: load the model with "
            "quantization=none to save it"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(folder / _PARAMS, dict(params))
    if jax.process_index() == 0:
        (folder / "config.json").write_text(json.dumps(to_hf(config), indent=1))
        (folder / FILE).write_text(json.dumps(file_fields(config.sampling)))
        if tokenizer is not None:
            Tokenizer.load(tokenizer).save(folder)


def check_saved(saved: OrbaxFolder, declared: Mapping[str, Declared]) -> None:
    """Checks that a saved folder holds the declared parameters in their shapes. Errors: one
    CheckpointError with every missing and misshaped name."""
    _check(saved.folder, declared, {path: shape for path, (shape, _) in saved.tensors().items()})


def restore(
    folder: Path | str,
    declared: Mapping[str, Declared],
    shardings: Mapping[str, jax.sharding.Sharding],
    dtype: jnp.dtype | str,
) -> dict[str, jax.Array]:
    """Reads the declared parameters (of one stage, or of all) by path; each device reads its part.
    dtype: to convert those to that need not be wide.

    Errors: one CheckpointError with every missing and misshaped name, before anything is allocated.
    """
    import orbax.checkpoint as ocp

    folder = Path(folder).absolute()
    stored = _stored(folder)
    stored_names = {_current_name(path): path for path in stored}
    _check(folder, declared, {path: stored[name][0] for path, name in stored_names.items()})
    if any(path != name for path, name in stored_names.items()):
        log.warning(
            "%s has parameter names of jaxserve 0.1, which version 0.3 will not read; "
            "save the model again",
            folder,
        )
    target = {
        stored_names[path]: jax.ShapeDtypeStruct(
            d.shape, d.dtype(jnp.dtype(dtype)), sharding=shardings[path]
        )
        for path, d in declared.items()
    }
    arguments = ocp.args.PyTreeRestore(
        item=target,
        restore_args=ocp.checkpoint_utils.construct_restore_args(target),
        partial_restore=True,
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        params = checkpointer.restore(folder / _PARAMS, args=arguments)
    return {path: params[stored_names[path]] for path in declared}


def _current_name(path: str) -> str:
    """Returns the path of a stored parameter under today's names."""
    old = re.fullmatch(r"(layers\.\d+)\.(\w+)", path)
    return f"{old[1]}.{_RENAMED.get(old[2], old[2])}" if old else path


def _stored(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shapes and dtypes in a saved folder, by path as stored. Errors: CheckpointError."""
    import orbax.checkpoint as ocp

    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            tree = checkpointer.metadata(folder.absolute() / _PARAMS).item_metadata.tree
        return {path: (tuple(entry.shape), str(entry.dtype)) for path, entry in tree.items()}
    except Exception as error:  # orbax and tensorstore raise many kinds
        raise CheckpointError(
            f"{folder}: not readable as an orbax checkpoint ({type(error).__name__}: {error})"
        ) from None


def _check(
    folder: Path, declared: Mapping[str, Declared], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises CheckpointError where declared parameters are missing from `shapes` or differ."""
    faults = [f"{path} is missing" for path in declared if path not in shapes]
    misshaped = [
        f"{path} is {list(shapes[path])}, should be {list(d.shape)}"
        for path, d in declared.items()
        if path in shapes and shapes[path] != d.shape
    ]
    if misshaped:
        faults += [
            *misshaped,
            "a tp that repeats kv heads or pads the vocabulary differently changes shapes: "
            "load the original checkpoint",
        ]
    if faults:
        raise CheckpointError(f"{folder} does not hold these parameters: {'; '.join(faults)}")
