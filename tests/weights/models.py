"""Writes small checkpoints of every kind of model, as safetensors folders and GGUF files, with
random weights."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh
from safetensors.numpy import save_file

from jaxserve.checkpoint.families import FAMILIES
from jaxserve.checkpoint.model import ModelConfig, declare
from jaxserve.checkpoint.model_config import to_hf
from jaxserve.checkpoint.rope import Rope
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.sharding import rules
from jaxserve.weights.names import tensors_of
from tests.weights import gguf_files

TINY = replace(MODELS["tiny"], max_len=4096)


def of_family(family: str, **fields) -> ModelConfig:
    """The smallest model, of another family."""
    return replace(TINY, family=family, **FAMILIES[family].specs | fields)


KINDS = {
    "llama": TINY,
    "tied": replace(TINY, tied=True),
    "qwen2": of_family("qwen2", tied=True, vocab=509),
    "qwen3": of_family("qwen3", head_dim=32),
    "phi3": of_family("phi3", ropes=(Rope(share=0.5),)),
    "olmo2": of_family("olmo2"),
}
GGUF_KINDS = [kind for kind, config in KINDS.items() if FAMILIES[config.family].gguf]


def tensors(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(shape, np.float32) for name, shape in tensors_of(config).items()
    }


def write_folder(
    folder: Path, config: ModelConfig, values: dict[str, np.ndarray], shards: int = 1
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(to_hf(config)))
    names = list(values)
    files = {
        f"model-{s + 1:05}-of-{shards:05}.safetensors": names[s::shards] for s in range(shards)
    }
    for file, part in files.items():
        save_file({name: values[name] for name in part}, folder / file)
    if shards > 1:
        weight_map = {name: file for file, part in files.items() for name in part}
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": weight_map})
        )
    return folder


def write_gguf(
    path: Path,
    config: ModelConfig,
    values: dict[str, np.ndarray],
    kind: str | dict[str, str] = "F32",
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """Writes a file as llama.cpp's converter does. extra: more tensors, by its names."""
    return gguf_files.write_gguf(path, to_hf(config), values, kind, extra)


def placed(
    config: ModelConfig, kvp: int, tp: int, layers: range | None = None
) -> tuple[ModelConfig, dict, dict]:
    """Config after `with_tp`, declared parameters of the layers, and their shardings over lanes and
    ranks."""
    split = config.with_tp(tp)
    mesh = Mesh(np.array(jax.devices()[: kvp * tp]).reshape(kvp, tp), ("kvp", "tp"))
    declared = declare(split, layers or range(config.layers), tp)
    return split, declared, {path: rules.sharding(mesh, *d.axes) for path, d in declared.items()}


def assembled(config: ModelConfig, values: dict[str, np.ndarray], tp: int) -> dict[str, np.ndarray]:
    """The parameters that `load` should give, assembled head by head: slow, and easy to verify."""
    split = config.with_tp(tp)
    K = split.kv_heads
    G = split.heads // split.kv_heads
    H = config.head_dim
    D = config.d_model
    L = "model.layers.{}.{}"
    padded = -(-config.vocab // (16 * tp)) * 16 * tp
    embed = np.zeros((padded, D), np.float32)
    head = np.zeros((D, padded), np.float32)
    embed[: config.vocab] = values["model.embed_tokens.weight"]
    head[:, : config.vocab] = values[
        "model.embed_tokens.weight" if config.tied else "lm_head.weight"
    ].T
    found = {"embed": embed, "head": head, "norm": values["model.norm.weight"]}
    for i in range(config.layers):

        def get(name, i=i):
            return values[L.format(i, name)]

        projections = {
            p: get(f"self_attn.{p}_proj.weight") for p in "qkv" if config.family != "phi3"
        }
        if config.family == "phi3":
            ends = np.cumsum([config.heads * H, config.kv_heads * H])
            projections = dict(zip("qkv", np.split(get("self_attn.qkv_proj.weight"), ends)))
            gate, up = np.split(get("mlp.gate_up_proj.weight"), 2)
        else:
            gate, up = get("mlp.gate_proj.weight"), get("mlp.up_proj.weight")

        qkv = np.zeros((D, K, G + 2, H), np.float32)
        bias = np.zeros((K, G + 2, H), np.float32)
        for kind, array in (("weight", qkv), ("bias", bias)):
            if kind == "bias" and not config.mixer(0).qkv_bias:
                continue
            heads = {
                p: (
                    projections[p].T.reshape(D, -1, H)
                    if kind == "weight"
                    else get(f"self_attn.{p}_proj.bias").reshape(-1, H)
                )
                for p in "qkv"
            }
            for k in range(K):
                stored = k * config.kv_heads // K
                for g in range(G):
                    array[..., k, g, :] = heads["q"][..., k * G + g, :]
                array[..., k, G, :] = heads["k"][..., stored, :]
                array[..., k, G + 1, :] = heads["v"][..., stored, :]
        layer = {
            "attention.qkv": qkv,
            "attention.o_proj": get("self_attn.o_proj.weight").T.reshape(K, G, H, D),
            "mlp.down": get("mlp.down_proj.weight").T,
            "mlp.gate_up": np.stack([gate.T, up.T], 1),
        }
        if config.family == "olmo2":
            layer["attn_post_norm"] = get("post_attention_layernorm.weight")
            layer["mlp_post_norm"] = get("post_feedforward_layernorm.weight")
        else:
            layer["attn_norm"] = get("input_layernorm.weight")
            layer["mlp_norm"] = get("post_attention_layernorm.weight")
        if config.mixer(0).qkv_bias:
            layer["attention.qkv_bias"] = bias
        if config.mixer(0).qk_norm:
            norms = {p: get(f"self_attn.{p}_norm.weight") for p in "qk"}
            if config.mixer(0).qk_norm == "all":
                copies = np.arange(K) * config.kv_heads // K
                norms["q"] = norms["q"].reshape(K, G, H)
                norms["k"] = norms["k"].reshape(-1, 1, H)[copies]
            layer |= {f"attention.{p}_norm": value for p, value in norms.items()}
        found |= {f"layers.{i}.{name}": array for name, array in layer.items()}
    return found
