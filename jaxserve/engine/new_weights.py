"""New weights for a running replica: where they come from, and whether they can take the place of
those that it serves."""

from __future__ import annotations

import dataclasses
import functools
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxserve.api.errors import RequestError
from jaxserve.checkpoint.fingerprint import fingerprint
from jaxserve.checkpoint.model import ModelConfig, declare
from jaxserve.checkpoint.model_paths import CheckpointError
from jaxserve.engine.sizing import kept_parameters, kept_weights
from jaxserve.engine.stage_plan import StagePlan
from jaxserve.engine.stages import Loader
from jaxserve.replica.weights import MODEL_PATH, WeightSource
from jaxserve.settings.schema import ConfigError, EngineConfig
from jaxserve.weights import check, load, open_checkpoint
from jaxserve.weights.array_weights import ArrayWeights
from jaxserve.weights.checkpoint import Checkpoint
from jaxserve.weights.kept import KeptParameter, tree_of
from jaxserve.weights.store import OrbaxFolder, check_saved

# of a config, what may differ: weights of a training run come with other files beside them
_FREE = ("name", "max_len", "eos_ids", "bos_id", "sampling", "stored", "gguf")


@dataclasses.dataclass(frozen=True)
class NewWeights:
    """Weights that can take the place of those that are served. fingerprint: equal for equal ones.
    load: reads them."""

    fingerprint: str
    load: Loader


OpenWeights = Callable[[WeightSource], NewWeights]


def open_new_weights(
    config: EngineConfig, served: ModelConfig, plan: StagePlan, source: WeightSource
) -> NewWeights:
    """Opens weights for a replica with these settings. served: the model, as its checkpoint says.
    source: a path, or arrays by their Hugging Face names. Only headers and configs are read.
    Errors: RequestError where they are not of the same model, or not quantised alike."""
    try:
        if not isinstance(source, Mapping) and not Path(source).exists():
            raise RequestError(MODEL_PATH, f"there is no {str(source)[:200]!r}", "NOT_FOUND")
        if isinstance(source, Mapping):
            arrays = ArrayWeights(source, dataclasses.replace(served, gguf=False))
            return _checked(config, served, plan, arrays, f"arrays {secrets.token_hex(16)}")
        path = Path(source)
        return _checked(config, served, plan, open_checkpoint(path), fingerprint(path))
    except RequestError:
        raise
    except (ConfigError, OSError, ValueError) as error:
        fault = error.message if isinstance(error, CheckpointError) else str(error)
        raise RequestError(MODEL_PATH, fault) from None


def _checked(
    config: EngineConfig,
    served: ModelConfig,
    plan: StagePlan,
    checkpoint: Checkpoint | OrbaxFolder,
    name: str,
) -> NewWeights:
    """Returns the weights of a checkpoint, after all checks that need no tensor. Errors:
    CheckpointError."""
    same = {field: getattr(served, field) for field in _FREE}
    found = dataclasses.replace(checkpoint.config, **same)
    differs = [
        field.name
        for field in dataclasses.fields(served)
        if getattr(found, field.name) != getattr(served, field.name)
    ]
    if differs:
        some = ", ".join(
            f"{name} is {getattr(found, name)!r:.80}, and {getattr(served, name)!r:.80} is served"
            for name in differs[:5]
        )
        raise CheckpointError(f"{checkpoint.config.name} is of another model: {some}")
    if isinstance(checkpoint, OrbaxFolder):
        check_saved(checkpoint, declare(plan.model, range(plan.model.layers), plan.mesh.tp))
    check(checkpoint, plan.model)
    kept = kept_parameters(kept_weights(config, checkpoint), plan.model, plan.mesh)
    _check_kept(plan.kept, kept)
    return NewWeights(name, functools.partial(_load, checkpoint, plan, kept))


def _check_kept(served: Mapping[str, KeptParameter], new: Mapping[str, KeptParameter]) -> None:
    """Checks that the same parameters stay quantised, in the same way. Errors: CheckpointError."""
    for path in sorted({*served, *new}):
        trees = [tree_of(kept[path]) if path in kept else None for kept in (served, new)]
        if trees[0] != trees[1]:
            raise CheckpointError(
                f"{path} is quantised in another way than the one that is served: give weights "
                "quantised alike, or serve the model with quantization=none"
            )


def _load(
    checkpoint: Checkpoint | OrbaxFolder,
    plan: StagePlan,
    kept: Mapping[str, KeptParameter],
    declared: Mapping[str, Any],
    shardings: Mapping[str, Any],
) -> dict[str, jax.Array]:
    own = {path: kept.get(path, parameter) for path, parameter in declared.items()}
    return load(checkpoint, plan.model, own, shardings, plan.dtype, progress=False)
