"""Maps parameters of the decoder to Hugging Face tensors: which tensors, and how they are
assembled.

A parameter is assembled of parts, such as the query projection. Where a part is stored, by itself
or in rows of a larger tensor, the table of the model's family says. A function of `TABLE` builds
any slice of its parameter and reads from each tensor only the rows and columns that the slice
needs. Tensors of linear layers are [out, in]; parameters are [in, out] with heads and gate/up as
dimensions of their own (see `checkpoint.model`).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxserve.checkpoint.families import FAMILIES
from jaxserve.checkpoint.model import ModelConfig, declare

Index = tuple[slice, ...]  # of a parameter; slices with start and stop
Read = Callable[[str, slice, slice | None], np.ndarray]  # tensor name, rows, columns (None: all)
_ROWS_AT_ONCE = 64  # converted and transposed together: faster than all rows, and less memory
_ALIGNMENT = 64  # bytes: JAX's CPU devices take over arrays at such addresses, and copy others
_NUMBER = re.compile(r"(\w+)\.(\d+)(?=\.|$)")  # in a path: of a layer


@dataclass(frozen=True)
class Place:
    """The place of a part in a checkpoint: rows from `row` on of a tensor. tensor, shape: its name,
    with fields for numbers, and its whole shape."""

    tensor: str
    row: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Sources:
    """Sources of a parameter. reader: reads tensors. numbers: those in the parameter's
    path, by what they number. parts: see `Assembly`. stored, model: the config of the checkpoint,
    and the one after `with_tp`. dtype: to convert to."""

    reader: Read
    numbers: dict[str, str]
    parts: tuple[str, ...]
    stored: ModelConfig
    model: ModelConfig
    dtype: np.dtype

    def read(self, part: str, rows: slice, columns: slice | None) -> np.ndarray:
        """Reads a slice of a part."""
        place = places(self.stored)[part]
        name = place.tensor.format(**self.numbers)
        return self.reader(name, slice(place.row + rows.start, place.row + rows.stop), columns)


@dataclass(frozen=True)
class Assembly:
    """The parts of a parameter. build: builds a slice of it from them."""

    parts: tuple[str, ...]
    build: Callable[[Sources, Index], np.ndarray]


def part_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of all parts that a model can have."""
    D = model.d_model
    F = model.d_ff
    NH = model.heads * model.head_dim
    KH = model.kv_heads * model.head_dim
    over_heads = model.attention.qk_norm == "all"
    return {
        "embed": (model.vocab, D),
        "head": (model.vocab, D),
        **dict.fromkeys(("norm", "attn_norm", "mlp_norm", "attn_post_norm", "mlp_post_norm"), (D,)),
        "q": (NH, D),
        "k": (KH, D),
        "v": (KH, D),
        "o": (D, NH),
        "q_bias": (NH,),
        "k_bias": (KH,),
        "v_bias": (KH,),
        "q_norm": (NH if over_heads else model.head_dim,),
        "k_norm": (KH if over_heads else model.head_dim,),
        "gate": (F, D),
        "up": (F, D),
        "down": (D, F),
    }


@functools.lru_cache(maxsize=16)
def places(model: ModelConfig) -> dict[str, Place]:
    """Returns the places of a model's parts by name. model: before `with_tp`."""
    shapes = part_shapes(model)
    places = {}
    for tensor, parts in FAMILIES[model.family].tensors.items():
        rows = sum(shapes[part][0] for part in parts)
        row = 0
        for part in parts:
            places[part] = Place(tensor, row, (rows, *shapes[part][1:]))
            row += shapes[part][0]
    if model.tied:
        places["head"] = places["embed"]
    return places


def tensors_of(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors that a checkpoint of `model` must hold."""
    tensors: dict[str, tuple[int, ...]] = {}
    for path in declare(model, range(model.layers)):
        assembly, numbers = _assembly(path)
        for part in assembly.parts:
            place = places(model)[part]
            tensors[place.tensor.format(**numbers)] = place.shape
    return tensors


def ignored(name: str, model: ModelConfig) -> bool:
    """Returns True for a tensor that a checkpoint may hold without need: RoPE frequencies, and the
    copy of the embedding as the head of a tied model."""
    return name.endswith("rotary_emb.inv_freq") or (model.tied and name == "lm_head.weight")


def build(
    path: str, index: Index, read: Read, stored: ModelConfig, model: ModelConfig, dtype: np.dtype
) -> np.ndarray:
    """Builds slice `index` of parameter `path` in a dtype.

    stored: the checkpoint's config. model: the config after `with_tp`. Errors: KeyError for a path
    that the decoder does not have.
    """
    assembly, numbers = _assembly(path)
    sources = Sources(read, numbers, assembly.parts, stored, model, dtype)
    return assembly.build(sources, index)


def _assembly(path: str) -> tuple[Assembly, dict[str, str]]:
    """The assembly of a parameter, and the numbers in its path by what they number: 'layers'."""
    numbers = {match[1]: match[2] for match in _NUMBER.finditer(path)}
    return TABLE[_NUMBER.sub(r"\1.{\1}", path)], numbers


def _norm(sources: Sources, index: Index) -> np.ndarray:
    """[D] or [H]."""
    weights = sources.read(sources.parts[0], index[0], None).astype(np.float32)
    return (weights + np.float32(sources.stored.norms.less_one)).astype(sources.dtype)


def _embed(sources: Sources, index: Index) -> np.ndarray:
    """[padded vocabulary, D]: rows past the vocabulary are zero."""
    rows, columns = index
    vectors = _vocabulary(sources, rows, columns)
    padded = _empty((rows.stop - rows.start, vectors.shape[1]), sources.dtype)
    padded[: len(vectors)] = vectors
    padded[len(vectors) :] = 0
    return padded


def _head(sources: Sources, index: Index) -> np.ndarray:
    """[D, padded vocabulary]: columns past the vocabulary are zero."""
    rows, columns = index
    vectors = _vocabulary(sources, columns, rows)
    padded = _empty((vectors.shape[1], columns.stop - columns.start), sources.dtype)
    _transpose(vectors, padded[:, : len(vectors)])
    padded[:, len(vectors) :] = 0
    return padded


def _vocabulary(sources: Sources, tokens: slice, columns: slice) -> np.ndarray:
    """Reads the rows of tokens, without those past the vocabulary."""
    vocab = sources.stored.vocab
    real = slice(min(tokens.start, vocab), min(tokens.stop, vocab))
    return sources.read(sources.parts[0], real, columns)


def _qkv(sources: Sources, index: Index) -> np.ndarray:
    """[D, K, G + 2, H]: for each kv head its G query heads, its key, its value."""
    heads = _heads(sources, index[1], index[0])  # [K, G + 2, H, D]
    return _inputs_first(heads, sources.dtype)[:, :, index[2], index[3]]


def _qkv_bias(sources: Sources, index: Index) -> np.ndarray:
    return _heads(sources, index[0], None)[:, index[1], index[2]].astype(sources.dtype)


def _heads(sources: Sources, kv: slice, columns: slice | None) -> np.ndarray:
    """Rows of queries, keys and values, [K, G + 2, H, ...] for the kv heads `kv`."""
    query, *others = sources.parts
    parts = [_query_heads(sources, query, kv, columns)]
    parts += [_kv_heads(sources, part, kv, columns) for part in others]
    return np.concatenate(parts, 1)


def _query_heads(sources: Sources, part: str, kv: slice, columns: slice | None) -> np.ndarray:
    """[K, G, H, ...]."""
    G = sources.model.heads // sources.model.kv_heads
    H = sources.model.head_dim
    rows = sources.read(part, slice(kv.start * G * H, kv.stop * G * H), columns)
    return rows.reshape(-1, G, H, *rows.shape[1:])


def _kv_heads(sources: Sources, part: str, kv: slice, columns: slice | None) -> np.ndarray:
    """[K, 1, H, ...]. With more ranks than kv heads, several are copies of a stored one."""
    H = sources.model.head_dim
    stored = np.arange(kv.start, kv.stop) * sources.stored.kv_heads // sources.model.kv_heads
    rows = sources.read(part, slice(stored[0] * H, (stored[-1] + 1) * H), columns)
    return rows.reshape(-1, 1, H, *rows.shape[1:])[stored - stored[0]]


def _q_norm(sources: Sources, index: Index) -> np.ndarray:
    """[H], or [K, G, H] where heads have weights of their own."""
    if len(index) == 1:
        return _norm(sources, index)
    return _query_heads(sources, "q_norm", index[0], None).astype(sources.dtype)


def _k_norm(sources: Sources, index: Index) -> np.ndarray:
    """[H], or [K, 1, H] where heads have weights of their own."""
    if len(index) == 1:
        return _norm(sources, index)
    return _kv_heads(sources, "k_norm", index[0], None).astype(sources.dtype)


def _o_proj(sources: Sources, index: Index) -> np.ndarray:
    """[K, G, H, D]."""
    kv = index[0]
    G = sources.model.heads // sources.model.kv_heads
    H = sources.model.head_dim
    outputs = sources.read(sources.parts[0], index[3], slice(kv.start * G * H, kv.stop * G * H))
    rows = _inputs_first(outputs, sources.dtype)
    return rows.reshape(-1, G, H, len(outputs))[:, index[1], index[2]]


def _gate_up(sources: Sources, index: Index) -> np.ndarray:
    """[D, 2, F]."""
    parts = [sources.read(part, index[2], index[0]) for part in sources.parts[index[1]]]
    both = _empty((parts[0].shape[1], len(parts), len(parts[0])), sources.dtype)
    for number, part in enumerate(parts):
        _transpose(part, both[:, number])
    return both


def _down(sources: Sources, index: Index) -> np.ndarray:
    return _inputs_first(sources.read(sources.parts[0], index[1], index[0]), sources.dtype)


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


TABLE: dict[str, Assembly] = {
    "embed": Assembly(("embed",), _embed),
    "layers.{layers}.attn_norm": Assembly(("attn_norm",), _norm),
    "layers.{layers}.attn_post_norm": Assembly(("attn_post_norm",), _norm),
    "layers.{layers}.attention.qkv": Assembly(("q", "k", "v"), _qkv),
    "layers.{layers}.attention.qkv_bias": Assembly(("q_bias", "k_bias", "v_bias"), _qkv_bias),
    "layers.{layers}.attention.q_norm": Assembly(("q_norm",), _q_norm),
    "layers.{layers}.attention.k_norm": Assembly(("k_norm",), _k_norm),
    "layers.{layers}.attention.o_proj": Assembly(("o",), _o_proj),
    "layers.{layers}.mlp_norm": Assembly(("mlp_norm",), _norm),
    "layers.{layers}.mlp_post_norm": Assembly(("mlp_post_norm",), _norm),
    "layers.{layers}.mlp.gate_up": Assembly(("gate", "up"), _gate_up),
    "layers.{layers}.mlp.down": Assembly(("down",), _down),
    "norm": Assembly(("norm",), _norm),
    "head": Assembly(("head",), _head),
}
