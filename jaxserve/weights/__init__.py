"""Loads weights from a checkpoint (safetensors folder, GGUF file, saved folder, random) onto a
mesh.

`open_checkpoint` reads headers and the model's config; `check` compares tensor names and shapes
with the model; `load` gives each device its shard, assembled as `names` says. `save` and `restore`
keep sharded parameters on disk. Nothing here executes or unpickles what a checkpoint holds.
"""

from jaxserve.checkpoint.model_paths import CheckpointError
from jaxserve.weights.checkpoint import Checkpoint, check, open_checkpoint
from jaxserve.weights.load import load
from jaxserve.weights.store import restore, save

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "check",
    "load",
    "open_checkpoint",
    "restore",
    "save",
]
