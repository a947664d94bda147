"""Reads the weights of an EAGLE-3 draft head from a folder of safetensors files."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from jaxserve.checkpoint.eagle import FEATURES, EagleConfig, eagle_config
from jaxserve.checkpoint.model_files import read_object
from jaxserve.checkpoint.model_paths import CheckpointError
from jaxserve.weights.checkpoint import Checkpoint
from jaxserve.weights.safetensors_files import FLOATS, MappedTensors
from jaxserve.weights.safetensors_folder import placed_tensors
from jaxserve.weights.sources import places
from jaxserve.weights.store import OrbaxFolder

EMBED = "embed_tokens.weight"
TO_TARGET = "d2t"  # what is added to an id of the head to have the model's
TO_DRAFT = "t2d"  # which ids of the model the head has: the same once more
_LAYER = "layer"
_LAYERS = ("midlayer.", "layers.0.")  # what names of the layer begin with


def read_eagle_config(folder: Path) -> EagleConfig:
    """Reads what a head's config.json says. Errors: CheckpointError."""
    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{folder}: has no config.json, so it is no draft head")
    try:
        return eagle_config(read_object(file))
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from None


def eagle_weights(
    folder: Path, config: EagleConfig, model: Checkpoint | OrbaxFolder
) -> dict[str, np.ndarray]:
    """Reads the weights of a head by the names of `models.eagle.EagleWeights`, matrices [in, out].
    config: as `read_eagle_config` returns. model: whose embedding it shares where it has none.
    Errors: one CheckpointError with all that is missing or misshaped."""
    stored = {_short(name): place for name, place in placed_tensors(folder).items()}
    files = MappedTensors(stored)
    wanted = _shapes(config)
    faults = [
        f"{name} is {list(files.types[name][0])}, should be {list(shape)}"
        for name, shape in wanted.items()
        if name in stored and files.types[name][0] != shape
    ]
    faults += [f"{name} is missing" for name in wanted.keys() - stored.keys() - {EMBED, TO_TARGET}]
    types = {name: kind for name, (_, kind) in files.types.items() if name in wanted}
    faults += [
        f"{name} is {kind}"
        for name, kind in types.items()
        if kind not in (("I64",) if name == TO_TARGET else FLOATS)
    ]
    faults += [f"{name} is not known" for name in stored.keys() - wanted.keys() - {TO_DRAFT}]
    if TO_TARGET not in stored and config.draft_vocab != config.vocab:
        faults.append(f"{TO_TARGET} is missing")
    if faults:
        raise CheckpointError(f"{folder}: {'; '.join(sorted(faults))}")
    read = lambda *names: np.concatenate([files.read(f"{_LAYER}.{name}") for name in names]).T
    ids = np.arange(config.draft_vocab, dtype=np.int64)
    if TO_TARGET in stored:
        ids = ids + files.read(TO_TARGET)
    if ids.min() < 0 or ids.max() >= config.vocab:
        raise CheckpointError(f"{folder}: {TO_TARGET} has ids that are not below {config.vocab}")
    return {
        "embed": files.read(EMBED) if EMBED in stored else _shared_embed(model),
        "fc": files.read("fc.weight").T,
        "embed_norm": files.read(f"{_LAYER}.input_layernorm.weight"),
        "feature_norm": files.read(f"{_LAYER}.hidden_norm.weight"),
        "qkv": read(*(f"self_attn.{part}_proj.weight" for part in "qkv")),
        "o": read("self_attn.o_proj.weight"),
        "mlp_norm": files.read(f"{_LAYER}.post_attention_layernorm.weight"),
        "gate_up": read("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "down": read("mlp.down_proj.weight"),
        "norm": files.read("norm.weight"),
        "head": files.read("lm_head.weight").T,
        "ids": ids.astype(np.int32),
    }


def _short(name: str) -> str:
    """Returns a tensor's name without what differs between the layouts."""
    name = name.removeprefix("model.")
    for prefix in _LAYERS:
        if name.startswith(prefix):
            return f"{_LAYER}.{name.removeprefix(prefix)}"
    return name


def eagle_elements(config: EagleConfig) -> int:
    """Counts the weights of a head, with an embedding."""
    return sum(math.prod(shape) for shape in _shapes(config).values())


def _shapes(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a head."""
    D, F, H = config.d_model, config.d_ff, config.head_dim
    layer = {
        "input_layernorm": (D,),
        "hidden_norm": (D,),
        "self_attn.q_proj": (config.heads * H, 2 * D),
        "self_attn.k_proj": (config.kv_heads * H, 2 * D),
        "self_attn.v_proj": (config.kv_heads * H, 2 * D),
        "self_attn.o_proj": (D, config.heads * H),
        "post_attention_layernorm": (D,),
        "mlp.gate_proj": (F, D),
        "mlp.up_proj": (F, D),
        "mlp.down_proj": (D, F),
    }
    return {f"{_LAYER}.{name}.weight": shape for name, shape in layer.items()} | {
        EMBED: (config.vocab, D),
        "fc.weight": (D, FEATURES * D),
        "norm.weight": (D,),
        "lm_head.weight": (config.draft_vocab, D),
        TO_TARGET: (config.draft_vocab,),
    }


def _shared_embed(model: Checkpoint | OrbaxFolder) -> np.ndarray:
    """Reads the embedding of a model. Errors: CheckpointError where it has been laid out for
    devices."""
    if isinstance(model, OrbaxFolder):
        raise CheckpointError(
            f"{EMBED}: the head has none, and shares that of the original checkpoint, not of a "
            "saved folder"
        )
    place = places(model.config)["embed"]
    return model.read(place.tensor)[: model.config.vocab]
