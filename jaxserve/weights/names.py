"""One table from parameter paths to the Hugging Face tensors they are made of, and how these are
put together.

A row's function builds any slice of its parameter and reads from each tensor only the rows and
columns which that slice needs. Tensors of linear layers are [out, in]; parameters are [in, out]
with heads and halves taken apart (see `models.decoder`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxserve.checkpoint.zoo import ModelConfig

Index = tuple[slice, ...]  # of a parameter, with start and stop
Read = Callable[[str, slice, slice | None], np.ndarray]
_ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class Parts:
    """What a row's function works with: a reader, the names of its tensors, and the model as stored
    and as split."""

    read: Read
    names: tuple[str, ...]
    stored: ModelConfig
    config: ModelConfig


@dataclass(frozen=True)
class Row:
    tensors: dict[str, tuple[str, ...]]  # name -> sizes, as letters
    build: Callable[[Parts, Index], np.ndarray]
    when: Callable[[ModelConfig], bool] = lambda config: True


def tensors_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of `config` must hold."""
    sizes = {
        "V": config.vocab,
        "D": config.d_model,
        "F": config.d_ff,
        "H": config.head_dim,
        "NH": config.heads * config.head_dim,
        "KH": config.kv_heads * config.head_dim,
    }
    found: dict[str, tuple[int, ...]] = {}
    for path, row in TABLE.items():
        for i in range(config.layers if "{i}" in path else 1):
            if row.when(config):
                found |= {
                    name.format(i=i): tuple(sizes[s] for s in shape)
                    for name, shape in row.tensors.items()
                }
    if config.tied:
        del found[_HEAD]
    return found


def ignored(name: str, config: ModelConfig) -> bool:
    """Whether a checkpoint may hold this tensor though nothing is made of it: derived values, and
    the second copy of a tied head."""
    return name.endswith("rotary_emb.inv_freq") or (config.tied and name == _HEAD)


def build(
    path: str, index: Index, read: Read, stored: ModelConfig, config: ModelConfig
) -> np.ndarray:
    """The slice `index` of the parameter `path`, in the dtype of `read`. `stored`: the checkpoint's
    config; `config`: after `with_tp`."""
    number = re.search(r"\d+", path)
    row = TABLE[re.sub(r"\d+", "{i}", path, count=1)]
    names = tuple(name.format(i=number and number.group()) for name in row.tensors)
    if stored.tied and names == (_HEAD,):
        names = (_EMBED,)
    return row.build(Parts(read, names, stored, config), index)


def _vector(parts: Parts, index: Index) -> np.ndarray:
    # a copy: the file must not back device memory
    return np.array(parts.read(parts.names[0], index[0], None))


def _embed(parts: Parts, index: Index) -> np.ndarray:
    """[V', D]: rows past the vocabulary are zero."""
    rows, columns = index
    real = slice(min(rows.start, parts.stored.vocab), min(rows.stop, parts.stored.vocab))
    found = parts.read(parts.names[0], real, columns)
    return np.pad(found, ((0, rows.stop - rows.start - len(found)), (0, 0)))


def _head(parts: Parts, index: Index) -> np.ndarray:
    return _inputs_first(_embed(parts, index[::-1]))


def _qkv(parts: Parts, index: Index) -> np.ndarray:
    """[D, K, G + 2, H]: per kv head its queries, then its key, then its value. Where kv heads are
    repeated, several read the same one."""
    heads = _per_head(parts, index[1], index[0])  # [K, G + 2, H, D]
    return _inputs_first(heads)[:, :, index[2], index[3]]


def _qkv_bias(parts: Parts, index: Index) -> np.ndarray:
    return _per_head(parts, index[0], None)[:, index[1], index[2]]


def _per_head(parts: Parts, kv: slice, columns: slice | None) -> np.ndarray:
    K = parts.config.kv_heads
    G = parts.config.heads // parts.config.kv_heads
    H = parts.config.head_dim
    source = np.arange(kv.start, kv.stop) * parts.stored.kv_heads // K  # stored head of each
    rows = slice(source[0] * H, (source[-1] + 1) * H)

    def split(values: np.ndarray) -> np.ndarray:
        return values.reshape(-1, 1, H, *values.shape[1:])[source - source[0]]

    query, key, value = parts.names
    q = parts.read(query, slice(kv.start * G * H, kv.stop * G * H), columns)
    q = q.reshape(kv.stop - kv.start, G, H, *q.shape[1:])
    return np.concatenate(
        [q, split(parts.read(key, rows, columns)), split(parts.read(value, rows, columns))], 1
    )


def _o_proj(parts: Parts, index: Index) -> np.ndarray:
    """[K, G, H, D]."""
    kv = index[0]
    G = parts.config.heads // parts.config.kv_heads
    H = parts.config.head_dim
    found = parts.read(parts.names[0], index[3], slice(kv.start * G * H, kv.stop * G * H))
    return _inputs_first(found).reshape(-1, G, H, len(found))[:, index[1], index[2]]


def _gate_up(parts: Parts, index: Index) -> np.ndarray:
    """[D, 2, F]."""
    gate, up = (parts.read(name, index[2], index[0]) for name in parts.names)
    return _inputs_first(np.stack([gate, up]))[:, index[1]]


def _down(parts: Parts, index: Index) -> np.ndarray:
    return _inputs_first(parts.read(parts.names[0], index[1], index[0]))


def _inputs_first(rows: np.ndarray) -> np.ndarray:
    """[..., in] -> [in, ...], copied by a few rows at a time, which is three times faster on large
    matrices than all at once."""
    flat = rows.reshape(-1, rows.shape[-1])
    turned = np.empty(flat.shape[::-1], flat.dtype)
    for first in range(0, len(flat), _ROWS_AT_ONCE):
        turned[:, first : first + _ROWS_AT_ONCE] = flat[first : first + _ROWS_AT_ONCE].T
    return turned.reshape(-1, *rows.shape[:-1])


_EMBED = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_LAYER = "model.layers.{i}."
_ATTENTION = _LAYER + "self_attn."
_MLP = _LAYER + "mlp."
TABLE: dict[str, Row] = {
    "embed": Row({_EMBED: ("V", "D")}, _embed),
    "layers.{i}.attn_norm": Row({_LAYER + "input_layernorm.weight": ("D",)}, _vector),
    "layers.{i}.qkv": Row(
        {
            _ATTENTION + "q_proj.weight": ("NH", "D"),
            _ATTENTION + "k_proj.weight": ("KH", "D"),
            _ATTENTION + "v_proj.weight": ("KH", "D"),
        },
        _qkv,
    ),
    "layers.{i}.qkv_bias": Row(
        {
            _ATTENTION + "q_proj.bias": ("NH",),
            _ATTENTION + "k_proj.bias": ("KH",),
            _ATTENTION + "v_proj.bias": ("KH",),
        },
        _qkv_bias,
        lambda config: config.qkv_bias,
    ),
    "layers.{i}.q_norm": Row(
        {_ATTENTION + "q_norm.weight": ("H",)}, _vector, lambda config: config.qk_norm
    ),
    "layers.{i}.k_norm": Row(
        {_ATTENTION + "k_norm.weight": ("H",)}, _vector, lambda config: config.qk_norm
    ),
    "layers.{i}.o_proj": Row({_ATTENTION + "o_proj.weight": ("D", "NH")}, _o_proj),
    "layers.{i}.mlp_norm": Row({_LAYER + "post_attention_layernorm.weight": ("D",)}, _vector),
    "layers.{i}.gate_up": Row(
        {_MLP + "gate_proj.weight": ("F", "D"), _MLP + "up_proj.weight": ("F", "D")}, _gate_up
    ),
    "layers.{i}.down": Row({_MLP + "down_proj.weight": ("D", "F")}, _down),
    "norm": Row({"model.norm.weight": ("D",)}, _vector),
    "head": Row({_HEAD: ("V", "D")}, _head),
}
