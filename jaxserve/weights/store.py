"""Parameters saved and restored as they lie on the mesh, with orbax: no dequantising and no taking
apart at the next start.

A folder holds `params` (orbax), config.json and the tokenizer's files. It restores onto any mesh
whose parameters have the saved shapes: any stages and lanes, and any tp that neither repeats kv
heads differently nor pads the vocabulary differently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxserve.checkpoint.model_config import to_hf
from jaxserve.checkpoint.model_paths import CheckpointError
from jaxserve.checkpoint.zoo import ModelConfig
from jaxserve.models.decoder import Declared
from jaxserve.text import Tokenizer
from jaxserve.weights.safetensors_folder import read_config

_PARAMS = "params"


class OrbaxFolder:
    """A folder that `save` wrote. `load` restores it; it has no tensors under Hugging Face
    names."""

    def __init__(self, folder: Path, name: str = ""):
        self.folder = folder
        self.bytes_read = 0
        self.config = read_config(folder, name)
        self.tokenizer = folder if (folder / "tokenizer.json").exists() else None

    def tensors(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Parameter path -> shape and dtype."""
        return _stored(self.folder)


def is_orbax(folder: Path) -> bool:
    return (folder / _PARAMS / "_METADATA").exists()


def save(
    folder: Path | str,
    params: Mapping[str, jax.Array],
    config: ModelConfig,
    tokenizer: Path | None = None,
) -> None:
    """Writes the parameters of all stages, by path, with the config before `with_tp` and the
    tokenizer of `tokenizer` (file or folder).

    Errors: CheckpointError where the folder holds parameters already.
    """
    import orbax.checkpoint as ocp

    folder = Path(folder).absolute()
    if (folder / _PARAMS).exists():
        raise CheckpointError(f"{folder} holds saved parameters already")
    folder.mkdir(parents=True, exist_ok=True)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(folder / _PARAMS, dict(params))
    if jax.process_index() == 0:
        (folder / "config.json").write_text(json.dumps(to_hf(config), indent=1))
        if tokenizer is not None:
            Tokenizer.load(tokenizer).save(folder)


def restore(
    folder: Path | str,
    declared: Mapping[str, Declared],
    shardings: Mapping[str, jax.sharding.Sharding],
    dtype: jnp.dtype | str,
) -> dict[str, jax.Array]:
    """The declared parameters, of one stage or of all, each device reading its part.

    Errors: one CheckpointError with every missing and misshaped name, before anything is allocated.
    """
    import orbax.checkpoint as ocp

    folder = Path(folder).absolute()
    _check(folder, declared)
    target = {
        path: jax.ShapeDtypeStruct(d.shape, jnp.dtype(dtype), sharding=shardings[path])
        for path, d in declared.items()
    }
    arguments = ocp.args.PyTreeRestore(
        item=target,
        restore_args=ocp.checkpoint_utils.construct_restore_args(target),
        partial_restore=True,
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(folder / _PARAMS, args=arguments)


def _stored(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    import orbax.checkpoint as ocp

    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            tree = checkpointer.metadata(folder.absolute() / _PARAMS).item_metadata.tree
        return {path: (tuple(entry.shape), str(entry.dtype)) for path, entry in tree.items()}
    except Exception as error:  # orbax and tensorstore raise many kinds
        raise CheckpointError(
            f"{folder}: not readable as an orbax checkpoint ({type(error).__name__}: {error})"
        ) from None


def _check(folder: Path, declared: Mapping[str, Declared]) -> None:
    stored = _stored(folder)
    faults = [f"{path} is missing" for path in declared if path not in stored]
    both = [(path, stored[path][0], d.shape) for path, d in declared.items() if path in stored]
    if misshaped := [
        f"{path} is {list(shape)}, should be {list(right)}"
        for path, shape, right in both
        if shape != right
    ]:
        faults += [
            *misshaped,
            "a tp that repeats kv heads or pads the vocabulary differently changes shapes: load the original checkpoint",
        ]
    if faults:
        raise CheckpointError(f"{folder} does not hold these parameters: {'; '.join(faults)}")
