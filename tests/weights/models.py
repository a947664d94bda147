"""Writes small checkpoints of every kind of model, as safetensors folders and GGUF files, with
random weights."""

import json
from dataclasses import replace
from pathlib import Path

import gguf
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
    path: Path, config: ModelConfig, values: dict[str, np.ndarray], kind: str = "F32"
) -> Path:
    """Writes a file as llama.cpp's converter does: q and k of the llama architecture with the rows
    of each head in pairs."""
    arch = FAMILIES[config.family].gguf
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {
        "block_count": config.layers,
        "embedding_length": config.d_model,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "feed_forward_length": config.d_ff,
        "vocab_size": config.vocab,
        "context_length": config.max_len,
    }.items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", config.norms.eps)
    writer.add_float32(f"{arch}.rope.freq_base", config.ropes[0].theta)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    writer.add_uint32("tokenizer.ggml.bos_token_id", 1)
    for name, value in values.items():
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            value = (
                value.reshape(-1, 2, config.head_dim // 2, *value.shape[1:])
                .swapaxes(1, 2)
                .reshape(value.shape)
            )
        quantised = gguf.GGMLQuantizationType[kind if value.ndim > 1 else "F32"]
        writer.add_tensor(
            gguf_name(name), gguf.quants.quantize(value, quantised), raw_dtype=quantised
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    stem, _, ending = name.rpartition(".")
    layer, prefix = (stem.split(".")[2], 3) if stem.startswith("model.layers.") else (None, 0)
    stem = ".".join(stem.split(".")[prefix:])
    return f"blk.{layer}.{names[stem]}.{ending}" if layer else f"{names[stem]}.{ending}"


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
    padded = -(-config.vocab // tp) * tp
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
