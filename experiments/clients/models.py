"""The first layer of SmolLM2-135M as a model of its own: for clients that ask much, need a
tokenizer and read no text."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path

from experiments.benchmarks.model_files import hugging_face_tensors
from jaxserve import weights
from jaxserve.checkpoint.model_config import to_hf
from jaxserve.text import Tokenizer


def first_layer(source: str, folder: Path) -> Path:
    """Writes the model as a Hugging Face folder, where it is not there; returns the folder. Errors:
    ModuleNotFoundError without safetensors."""
    from safetensors.numpy import save_file

    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        fresh = Path(work, "model")
        fresh.mkdir()
        checkpoint = weights.open_checkpoint(source)
        config = replace(checkpoint.config, layers=1)
        save_file(hugging_face_tensors(checkpoint, config), fresh / "model.safetensors")
        (fresh / "config.json").write_text(json.dumps(to_hf(config)))
        Tokenizer.load(source).save(fresh)
        os.rename(fresh, folder)  # whole or not at all
    return folder
