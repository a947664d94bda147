"""Maps parameters of the decoder to stored tensors: which tensors a model has, and slices of its
parameters built from them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from jaxserve.checkpoint.families import FAMILIES, layout
from jaxserve.checkpoint.model import ModelConfig, declare
from jaxserve.weights.assemble import TABLE, Assembly
from jaxserve.weights.sources import Index, Reader, Sources, places

_UNUSED = (
    "rotary_emb.inv_freq",
    ".input_scale",
    ".input_zero_point",
    ".input_global_scale",
    ".k_scale",
    ".v_scale",
)
_STORED = (".k_proj.weight", ".v_proj.weight", ".k_norm.weight")  # of what layers store
_ROTATED = ("q", "k", "q_bias", "k_bias")  # parts whose rows RoPE pairs
_FOLDER_LAYER = re.compile(r"(?<=\.layers\.)\d+")
_LAYER = re.compile(r"(?:model\.layers|blk)\.(\d+)\.")
_NUMBER = re.compile(r"(\w+)\.(\d+)(?=\.|$)")  # in a path: of a layer


def tensors_of(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors that a checkpoint of `model` must hold."""
    tensors: dict[str, tuple[int, ...]] = {}
    for path in declare(model, range(model.layers)):
        assembly, numbers = _assembly(path)
        sizes = _at(model, numbers)
        for part in assembly.parts:
            place = places(sizes).get(part)
            if place is None:
                continue  # the parameter is assembled of other parts in this layer
            several = range(sizes.experts) if "{experts}" in place.tensor else (None,)
            for expert in several:
                tensors[place.tensor.format(**numbers, experts=expert)] = place.shape
    return tensors


def folder_tensor(name: str, reader: Reader, model: ModelConfig) -> np.ndarray:
    """Reads a tensor of a dense model from a checkpoint of any format, f32, as a Hugging Face
    folder has it. name: that of the folder. model: the checkpoint's config. Errors: KeyError for a
    name that the model's family does not have."""
    folder = layout(replace(model, gguf=False))
    layer = _FOLDER_LAYER.search(name)
    numbers = {"layers": layer[0]} if layer else {}
    model = _at(model, numbers)
    sources = Sources(reader, numbers, (), model, model, np.dtype(np.float32))
    parts = []
    for part in folder.tensors[_FOLDER_LAYER.sub("{layers}", name)]:
        rows = sources.read(part, slice(0, model.parts()[part][0]), None)
        if layout(model).interleaved and not folder.interleaved and part in _ROTATED:
            pairs = rows.reshape(-1, model.head_dim // 2, 2, *rows.shape[1:])
            rows = pairs.swapaxes(1, 2).reshape(rows.shape)
        parts.append(rows)
    return np.concatenate(parts).astype(np.float32)


def family_names(stored: Iterable[str], model: ModelConfig) -> dict[str, str]:
    """Maps the names of stored tensors to those that the model's family gives them. Embedding
    checkpoints leave the prefix of the body (`model.`) out; wrappers put another before all names.
    Tensors that are neither in the body nor in the head are left out.
    """
    embed = places(model)["embed"].tensor
    layer, kind = embed.split(".")[-2:]
    body = embed.removesuffix(f"{layer}.{kind}")
    tensors = FAMILIES[model.family].tensors
    heads = tuple(name.split(".")[0] + "." for name in tensors if not name.startswith(body))
    found = next((name for name in stored if f".{name}".endswith(f".{layer}.{kind}")), embed)
    prefix = found.removesuffix(f"{layer}.{kind}")
    wrapper = prefix.removesuffix(body)
    names = {}
    for name in stored:
        if not name.startswith((wrapper, *heads)):
            continue
        inner = name.removeprefix(wrapper)
        if not prefix.endswith(body) and not inner.startswith(heads):
            inner = body + inner
        if inner.startswith((body, *heads)):
            names[name] = inner
    return names


def ignored(name: str, model: ModelConfig) -> bool:
    """Returns True for a tensor that a checkpoint may hold without need: RoPE frequencies, scales
    of activations and KV, the copy of the embedding as the head of a tied model, layers that
    predict further tokens, and keys and values of layers that read those of others."""
    if name.endswith(_UNUSED) or (model.tied and name == "lm_head.weight"):
        return True
    layer = _LAYER.match(name)
    if layer is None:
        return False
    number = int(layer[1])
    if number >= model.layers:
        return FAMILIES[model.family].further_layers
    mixer = model.mixer(number)
    return mixer.has_pages and not mixer.stores and name.endswith(_STORED)


def build(
    path: str,
    index: Index,
    reader: Reader,
    stored: ModelConfig,
    model: ModelConfig,
    dtype: np.dtype,
) -> np.ndarray:
    """Builds slice `index` of parameter `path` in a dtype.

    stored: the checkpoint's config. model: the config after `with_tp`. Errors: KeyError for a path
    that the decoder does not have.
    """
    assembly, sources = sources_of(path, reader, stored, model, dtype)
    return assembly.build(sources, index)


def modules_of(path: str, model: ModelConfig) -> list[str]:
    """Names of the modules of a Hugging Face folder that parameter `path` is made of, in the order
    of its parts. model: before `with_tp`."""
    assembly, numbers = _assembly(path)
    found = places(_at(model, numbers))
    names = [found[part].tensor.format(**numbers) for part in assembly.parts if part in found]
    return [name.removesuffix(".weight") for name in dict.fromkeys(names)]


def sources_of(
    path: str, reader: Reader, stored: ModelConfig, model: ModelConfig, dtype: np.dtype
) -> tuple[Assembly, Sources]:
    """Returns the assembly of a parameter, and what it reads; arguments as of `build`."""
    assembly, numbers = _assembly(path)
    both = _at(stored, numbers), _at(model, numbers)
    return assembly, Sources(reader, numbers, assembly.parts, *both, dtype)


def _at(model: ModelConfig, numbers: Mapping[str, str]) -> ModelConfig:
    """Returns the model that the parameters with these numbers see, see `ModelConfig.at`."""
    if "layers" not in numbers:
        return model
    return model.at(int(numbers["layers"]))


def _assembly(path: str) -> tuple[Assembly, dict[str, str]]:
    """The assembly of a parameter, and the numbers in its path by what they number: 'layers'."""
    numbers = {match[1]: match[2] for match in _NUMBER.finditer(path)}
    return TABLE[_NUMBER.sub(r"\1.{\1}", path)], numbers
