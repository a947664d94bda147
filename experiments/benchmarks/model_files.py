"""The model as the peers read it, written by jaxserve from what it reads itself: a Hugging Face
folder, and a GGUF file of plain f32."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize

from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.model_config import to_hf
from jaxserve.checkpoint.model_paths import model_file, resolve
from jaxserve.text import Tokenizer
from jaxserve.weights import open_checkpoint
from jaxserve.weights.checkpoint import Checkpoint
from jaxserve.weights.names import folder_tensor, tensors_of
from jaxserve.weights.store import OrbaxFolder


def folder_of(source: str, under: Path) -> Path:
    """Returns a folder with f32 safetensors, config and tokenizer of a model; writes it if it is
    not there."""
    folder = under / f"{_name(source)}-f32"
    if not folder.exists():
        under.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=under) as work:
            fresh = Path(work, "model")
            fresh.mkdir()
            _write_folder(source, fresh)
            os.rename(fresh, folder)  # whole or not at all
    return folder


def deepened(folder: Path, times: int) -> Path:
    """Returns a folder with a model of the Llama family that has `times` as many layers and says
    the same: those that are added add nothing to the hidden states. Writes it if it is not there.
    folder: of the model, as `folder_of` returns."""
    from safetensors.numpy import load_file, save_file

    deep = folder.with_name(f"{folder.name}-x{times}")
    if deep.exists():
        return deep
    config = json.loads((folder / "config.json").read_text())
    layers = config["num_hidden_layers"]
    tensors = load_file(folder / "model.safetensors")
    first = {name: one for name, one in tensors.items() if name.startswith("model.layers.0.")}
    for number in range(layers, times * layers):
        for name, one in first.items():
            writes = name.endswith(("o_proj.weight", "down_proj.weight"))
            new = name.replace("layers.0.", f"layers.{number}.")
            tensors[new] = np.zeros_like(one) if writes else one
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        fresh = Path(work, "model")
        shutil.copytree(folder, fresh, ignore=shutil.ignore_patterns("*.safetensors"))
        save_file(tensors, fresh / "model.safetensors", metadata={"format": "pt"})
        config["num_hidden_layers"] = times * layers
        (fresh / "config.json").write_text(json.dumps(config, indent=1))
        os.rename(fresh, deep)  # whole or not at all
    return deep


def gguf_of(source: str, under: Path) -> Path | None:
    """Returns a GGUF file with all tensors in f32, writes it if it is not there; None where the
    model's source is not a GGUF file."""
    original = model_file(resolve(source))
    if original.suffix != ".gguf":
        return None
    file = under / f"{_name(source)}-f32.gguf"
    if not file.exists():
        under.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=under) as work:
            _write_gguf(original, Path(work, "model.gguf"))
            shutil.move(Path(work, "model.gguf"), file)
    return file


def _name(source: str) -> str:
    return Path(source).stem if source.endswith(".gguf") else Path(source).name.replace(":", "-")


def _write_folder(source: str, folder: Path) -> None:
    """Writes a Hugging Face folder. Errors: ModuleNotFoundError without safetensors."""
    from safetensors.numpy import save_file

    checkpoint = open_checkpoint(source)
    assert not isinstance(checkpoint, OrbaxFolder)
    tensors = hugging_face_tensors(checkpoint, checkpoint.config)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = to_hf(checkpoint.config) | {"torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(
        json.dumps({name: config[name] for name in ("bos_token_id", "eos_token_id")})
    )
    if checkpoint.tokenizer is not None:
        Tokenizer.load(checkpoint.tokenizer).save(folder)


def hugging_face_tensors(checkpoint: Checkpoint, model: ModelConfig) -> dict[str, np.ndarray]:
    """Reads the tensors of a dense model from a checkpoint of any format, f32, by the names of a
    Hugging Face folder. model: the checkpoint's config, perhaps with fewer layers."""
    names = tensors_of(replace(model, gguf=False))
    return {name: folder_tensor(name, checkpoint, model) for name in names}


def _write_gguf(original: Path, file: Path) -> None:
    reader = gguf.GGUFReader(original)
    writer = gguf.GGUFWriter(file, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        inner = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        writer.add_tensor(
            tensor.name, dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
