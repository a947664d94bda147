"""Maps parameters of the decoder to Hugging Face tensors: which tensors, and how they are
assembled.

An entry's function builds any slice of its parameter and reads from each tensor only the rows and
columns that the slice needs. Tensors of linear layers are [out, in]; parameters are [in, out] with
heads and gate/up as dimensions of their own (see `models.decoder`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxserve.checkpoint.zoo import ModelConfig

Index = tuple[slice, ...]  # of a parameter; slices with start and stop
Read = Callable[[str, slice, slice | None], np.ndarray]  # tensor name, rows, columns (None: all)
_ROWS_AT_ONCE = 64  # converted and transposed together: faster than all rows, and less memory
_ALIGNMENT = 64  # bytes: JAX's CPU devices take over arrays at such addresses, and copy others


@dataclass(frozen=True)
class Sources:
    """What a parameter is built from: a reader, the names of its tensors, the config as stored, the
    config after `with_tp`, and the dtype to convert to."""

    read: Read
    names: tuple[str, ...]
    stored: ModelConfig
    config: ModelConfig
    dtype: np.dtype


@dataclass(frozen=True)
class Mapping:
    """How one parameter is made of tensors.

    tensors: names ({i}: the layer's number) and sizes, as letters of `tensors_of`. build: builds a
    slice. when: whether models of a config have this parameter.
    """

    tensors: dict[str, tuple[str, ...]]
    build: Callable[[Sources, Index], np.ndarray]
    when: Callable[[ModelConfig], bool] = lambda config: True


def tensors_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors that a checkpoint of `config` must hold."""
    sizes = {
        "V": config.vocab,
        "D": config.d_model,
        "F": config.d_ff,
        "H": config.head_dim,
        "NH": config.heads * config.head_dim,
        "KH": config.kv_heads * config.head_dim,
    }
    found: dict[str, tuple[int, ...]] = {}
    for path, mapping in TABLE.items():
        for i in range(config.layers if "{i}" in path else 1):
            if mapping.when(config):
                found |= {
                    name.format(i=i): tuple(sizes[s] for s in shape)
                    for name, shape in mapping.tensors.items()
                }
    if config.tied:
        del found[_HEAD]
    return found


def ignored(name: str, config: ModelConfig) -> bool:
    """Whether a checkpoint may hold this tensor without need: RoPE frequencies, and the copy of the
    embedding as the head of a tied model."""
    return name.endswith("rotary_emb.inv_freq") or (config.tied and name == _HEAD)


def build(
    path: str, index: Index, read: Read, stored: ModelConfig, config: ModelConfig, dtype: np.dtype
) -> np.ndarray:
    """Builds slice `index` of parameter `path` in a dtype.

    stored: the checkpoint's config. config: the config after `with_tp`. Errors: KeyError for a path
    that the decoder does not have.
    """
    number = re.search(r"\d+", path)
    mapping = TABLE[re.sub(r"\d+", "{i}", path, count=1)]
    names = tuple(name.format(i=number and number.group()) for name in mapping.tensors)
    if stored.tied and names == (_HEAD,):
        names = (_EMBED,)
    return mapping.build(Sources(read, names, stored, config, dtype), index)


def _vector(sources: Sources, index: Index) -> np.ndarray:
    # a copy, so that no device array is backed by the mapped file
    return np.array(sources.read(sources.names[0], index[0], None), sources.dtype)


def _embed(sources: Sources, index: Index) -> np.ndarray:
    """[padded vocabulary, D]: rows past the vocabulary are zero."""
    rows, columns = index
    found = _vocabulary(sources, rows, columns)
    padded = _empty((rows.stop - rows.start, found.shape[1]), sources.dtype)
    padded[: len(found)] = found
    padded[len(found) :] = 0
    return padded


def _head(sources: Sources, index: Index) -> np.ndarray:
    """[D, padded vocabulary]: columns past the vocabulary are zero."""
    rows, columns = index
    found = _vocabulary(sources, columns, rows)
    padded = _empty((found.shape[1], columns.stop - columns.start), sources.dtype)
    _transpose(found, padded[:, : len(found)])
    padded[:, len(found) :] = 0
    return padded


def _vocabulary(sources: Sources, tokens: slice, columns: slice) -> np.ndarray:
    """Rows of those of these tokens that are in the vocabulary."""
    vocab = sources.stored.vocab
    real = slice(min(tokens.start, vocab), min(tokens.stop, vocab))
    return sources.read(sources.names[0], real, columns)


def _qkv(sources: Sources, index: Index) -> np.ndarray:
    """[D, K, G + 2, H]: for each kv head its G query heads, its key, its value. With more ranks
    than kv heads, several kv heads are copies of a stored one."""
    heads = _per_head(sources, index[1], index[0])  # [K, G + 2, H, D]
    return _inputs_first(heads, sources.dtype)[:, :, index[2], index[3]]


def _qkv_bias(sources: Sources, index: Index) -> np.ndarray:
    return _per_head(sources, index[0], None)[:, index[1], index[2]].astype(sources.dtype)


def _per_head(sources: Sources, kv: slice, columns: slice | None) -> np.ndarray:
    K = sources.config.kv_heads
    G = sources.config.heads // sources.config.kv_heads
    H = sources.config.head_dim
    source = np.arange(kv.start, kv.stop) * sources.stored.kv_heads // K  # stored head of each
    rows = slice(source[0] * H, (source[-1] + 1) * H)

    def split(values: np.ndarray) -> np.ndarray:
        return values.reshape(-1, 1, H, *values.shape[1:])[source - source[0]]

    query, key, value = sources.names
    q = sources.read(query, slice(kv.start * G * H, kv.stop * G * H), columns)
    q = q.reshape(kv.stop - kv.start, G, H, *q.shape[1:])
    return np.concatenate(
        [q, split(sources.read(key, rows, columns)), split(sources.read(value, rows, columns))], 1
    )


def _o_proj(sources: Sources, index: Index) -> np.ndarray:
    """[K, G, H, D]."""
    kv = index[0]
    G = sources.config.heads // sources.config.kv_heads
    H = sources.config.head_dim
    found = sources.read(sources.names[0], index[3], slice(kv.start * G * H, kv.stop * G * H))
    rows = _inputs_first(found, sources.dtype)
    return rows.reshape(-1, G, H, len(found))[:, index[1], index[2]]


def _gate_up(sources: Sources, index: Index) -> np.ndarray:
    """[D, 2, F]."""
    names = sources.names[index[1]]
    parts = [sources.read(name, index[2], index[0]) for name in names]
    both = _empty((parts[0].shape[1], len(parts), len(parts[0])), sources.dtype)
    for number, part in enumerate(parts):
        _transpose(part, both[:, number])
    return both


def _down(sources: Sources, index: Index) -> np.ndarray:
    return _inputs_first(sources.read(sources.names[0], index[1], index[0]), sources.dtype)


def _inputs_first(rows: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Transposes [..., in] -> [in, ...] into a contiguous array of a dtype."""
    flat = rows.reshape(-1, rows.shape[-1])
    transposed = _empty(flat.shape[::-1], dtype)
    _transpose(flat, transposed)
    return transposed.reshape(-1, *rows.shape[:-1])


def _transpose(rows: np.ndarray, out: np.ndarray) -> None:
    """Writes the transpose of a matrix to `out`, in the dtype of `out`."""
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        block = rows[first : first + _ROWS_AT_ONCE].astype(out.dtype, copy=False)
        out[:, first : first + _ROWS_AT_ONCE] = block.T


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Allocates an array that JAX's CPU devices take over without a copy."""
    nbytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return memory[first : first + nbytes].view(dtype).reshape(shape)


_EMBED = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_LAYER = "model.layers.{i}."
_ATTENTION = _LAYER + "self_attn."
_MLP = _LAYER + "mlp."
TABLE: dict[str, Mapping] = {
    "embed": Mapping({_EMBED: ("V", "D")}, _embed),
    "layers.{i}.attn_norm": Mapping({_LAYER + "input_layernorm.weight": ("D",)}, _vector),
    "layers.{i}.qkv": Mapping(
        {
            _ATTENTION + "q_proj.weight": ("NH", "D"),
            _ATTENTION + "k_proj.weight": ("KH", "D"),
            _ATTENTION + "v_proj.weight": ("KH", "D"),
        },
        _qkv,
    ),
    "layers.{i}.qkv_bias": Mapping(
        {
            _ATTENTION + "q_proj.bias": ("NH",),
            _ATTENTION + "k_proj.bias": ("KH",),
            _ATTENTION + "v_proj.bias": ("KH",),
        },
        _qkv_bias,
        lambda config: config.qkv_bias,
    ),
    "layers.{i}.q_norm": Mapping(
        {_ATTENTION + "q_norm.weight": ("H",)}, _vector, lambda config: config.qk_norm
    ),
    "layers.{i}.k_norm": Mapping(
        {_ATTENTION + "k_norm.weight": ("H",)}, _vector, lambda config: config.qk_norm
    ),
    "layers.{i}.o_proj": Mapping({_ATTENTION + "o_proj.weight": ("D", "NH")}, _o_proj),
    "layers.{i}.mlp_norm": Mapping({_LAYER + "post_attention_layernorm.weight": ("D",)}, _vector),
    "layers.{i}.gate_up": Mapping(
        {_MLP + "gate_proj.weight": ("F", "D"), _MLP + "up_proj.weight": ("F", "D")}, _gate_up
    ),
    "layers.{i}.down": Mapping({_MLP + "down_proj.weight": ("D", "F")}, _down),
    "norm": Mapping({"model.norm.weight": ("D",)}, _vector),
    "head": Mapping({_HEAD: ("V", "D")}, _head),
}
