"""A draft head with random weights: written as a folder, and in dense f64 numpy, written after the
paper (EAGLE-3, Li et al., 2025)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jaxserve.checkpoint.model import ModelConfig
from tests.models import reference

DRAFT_VOCAB = 200
CAPTURED = [0, 3, 6]  # of six layers: before the first, and behind the last, too


def head_config(model: ModelConfig, **fields) -> dict:
    """The config.json of a head of a model, in the authors' layout."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "hidden_size": model.d_model,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": 96,
        "vocab_size": model.vocab,
        "draft_vocab_size": DRAFT_VOCAB,
        "max_position_embeddings": 4096,
        "rms_norm_eps": model.norms.eps,
        "rope_theta": model.ropes[0].theta,
        "hidden_act": "silu",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": CAPTURED},
        **fields,
    }


def head_tensors(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights with which every part matters."""
    random = np.random.default_rng(seed)
    D, F = config["hidden_size"], config["intermediate_size"]
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    H = config["head_dim"]
    shapes = {
        "fc.weight": (D, 3 * D),
        "midlayer.input_layernorm.weight": (D,),
        "midlayer.hidden_norm.weight": (D,),
        "midlayer.self_attn.q_proj.weight": (heads * H, 2 * D),
        "midlayer.self_attn.k_proj.weight": (keys * H, 2 * D),
        "midlayer.self_attn.v_proj.weight": (keys * H, 2 * D),
        "midlayer.self_attn.o_proj.weight": (D, heads * H),
        "midlayer.post_attention_layernorm.weight": (D,),
        "midlayer.mlp.gate_proj.weight": (F, D),
        "midlayer.mlp.up_proj.weight": (F, D),
        "midlayer.mlp.down_proj.weight": (D, F),
        "norm.weight": (D,),
        "lm_head.weight": (config["draft_vocab_size"], D),
    }
    found = {}
    for name, shape in shapes.items():
        value = random.standard_normal(shape, np.float32)
        found[name] = value * 2 / np.sqrt(shape[-1]) if len(shape) > 1 else 1 + value * 0.3
    ids = np.sort(random.permutation(config["vocab_size"])[: config["draft_vocab_size"]])
    found["d2t"] = ids - np.arange(len(ids))
    return found


def write_head(folder: Path, config: dict, tensors: dict[str, np.ndarray]) -> Path:
    """Writes a head as its authors do."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


class DenseHead:
    """A head that computes each proposal from the whole text. model, tensors: of the model whose
    hidden states it takes."""

    def __init__(
        self,
        config: dict,
        weights: dict[str, np.ndarray],
        model: ModelConfig,
        tensors: dict[str, np.ndarray],
        norm_first: bool = False,
    ):
        self._w = {name: value.astype(np.float64) for name, value in weights.items()}
        self._config = config
        self._model = model
        self._tensors = tensors
        self._norm_first = norm_first

    def propose(self, text: Sequence[int], count: int, first: int = 1) -> list[int]:
        """Proposes tokens greedily. first: position of the first token that it sees."""
        every = list(reference.states_by_layer(self._model, self._tensors, list(text[:-1])))
        captured = np.concatenate([every[layer] for layer in CAPTURED], -1)
        features = captured @ self._w["fc.weight"].T
        tokens = list(text[first:])
        rows = list(features[first - 1 :])
        ids = np.arange(len(self._w["d2t"])) + self._w["d2t"].astype(int)
        embed = self._tensors["model.embed_tokens.weight"]
        proposed = []
        for _ in range(count):
            out = self._layer(embed[tokens].astype(np.float64), np.stack(rows))[-1]
            normed = self._norm(out, "norm.weight")
            proposed.append(int(ids[np.argmax(self._w["lm_head.weight"] @ normed)]))
            tokens.append(proposed[-1])
            rows.append(out)
        return proposed

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return reference.norm(x, self._w[name], self._config["rms_norm_eps"])

    def _layer(self, embedded: np.ndarray, features: np.ndarray) -> np.ndarray:
        w = {name.removeprefix("midlayer."): value for name, value in self._w.items()}
        model = self._model
        normed = self._norm(features, "midlayer.hidden_norm.weight")
        both = np.concatenate([self._norm(embedded, "midlayer.input_layernorm.weight"), normed], -1)
        x = normed if self._norm_first else features
        x = x + reference.attended(model, w, both, None, len(both))
        y = self._norm(x, "midlayer.post_attention_layernorm.weight")
        gate, up = (y @ w[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return x + (gate / (1 + np.exp(-gate)) * up) @ w["mlp.down_proj.weight"].T
