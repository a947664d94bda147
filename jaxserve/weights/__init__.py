"""Weights: from a source (fetched name, folder, GGUF file, hub id, random) to arrays on a mesh.

`open_checkpoint` reads headers and the model's description; `check` compares names and shapes with
the model; `load` reads each device's part. `save` and `restore` keep parameters as they lie on the
mesh. `fetch` fills the cache folder. Nothing here executes or unpickles what a checkpoint holds.
"""

from jaxserve.checkpoint.fetch import fetch
from jaxserve.checkpoint.model_paths import CheckpointError
from jaxserve.weights.checkpoint import Checkpoint, check, open_checkpoint
from jaxserve.weights.load import load
from jaxserve.weights.store import restore, save

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "check",
    "fetch",
    "load",
    "open_checkpoint",
    "restore",
    "save",
]
