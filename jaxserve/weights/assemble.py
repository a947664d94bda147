"""`TABLE`: of which parts each parameter of the decoder is assembled, and how.

A function of the table builds any slice of its parameter and reads of each part only the rows and
columns that the slice needs. Parameters are [in, out], with heads and gate/up as dimensions of
their own (see `checkpoint.specs`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxserve.checkpoint.families import layout
from jaxserve.weights.sources import Index, Sources, empty, inputs_first, places, transpose


@dataclass(frozen=True)
class Assembly:
    """The parts of a parameter. build: builds a slice of it from them."""

    parts: tuple[str, ...]
    build: Callable[[Sources, Index], np.ndarray]


def _norm(sources: Sources, index: Index) -> np.ndarray:
    """[D] or [H]."""
    weights = sources.read(sources.parts[0], index[0], None).astype(np.float32)
    return (weights + np.float32(sources.stored.norms.less_one)).astype(sources.dtype)


def _embed(sources: Sources, index: Index) -> np.ndarray:
    """[padded vocabulary, D]: rows past the vocabulary are zero."""
    rows, columns = index
    vectors = _vocabulary(sources, rows, columns)
    padded = empty((rows.stop - rows.start, vectors.shape[1]), sources.dtype)
    padded[: len(vectors)] = vectors
    padded[len(vectors) :] = 0
    return padded


def _head(sources: Sources, index: Index) -> np.ndarray:
    """[D, padded vocabulary]: columns past the vocabulary are zero."""
    rows, columns = index
    vectors = _vocabulary(sources, columns, rows)
    padded = empty((vectors.shape[1], columns.stop - columns.start), sources.dtype)
    transpose(vectors, padded[:, : len(vectors)])
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
    return inputs_first(heads, sources.dtype)[:, :, index[2], index[3]]


def _qkv_bias(sources: Sources, index: Index) -> np.ndarray:
    return _heads(sources, index[0], None)[:, index[1], index[2]].astype(sources.dtype)


def _heads(sources: Sources, kv: slice, columns: slice | None) -> np.ndarray:
    """Rows of queries, keys and values, [K, G + 2, H, ...] for the kv heads `kv`."""
    query, key, value = sources.parts
    q = _query_heads(sources, query, kv, columns)
    k = _kv_heads(sources, key, kv, columns)
    v = _kv_heads(sources, value, kv, columns)
    if layout(sources.stored).interleaved:
        dims = sources.rotated or sources.model.head_dim  # the order is that of all layers
        q = _in_halves(q, dims)
        k = _in_halves(k, dims)
    return np.concatenate([q, k, v], 1)


def _in_halves(heads: np.ndarray, dims: int) -> np.ndarray:
    """Rows [K, n, H, ...] of which the first `dims` of each head are rotated in pairs 2 i and 2 i +
    1, in the order in which the pairs are i and i + dims / 2."""
    order = np.arange(heads.shape[2])
    order[:dims] = [*range(0, dims, 2), *range(1, dims, 2)]
    return heads[:, :, order]


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


def _vector(sources: Sources, index: Index) -> np.ndarray:
    return sources.read(sources.parts[0], index[0], None).astype(sources.dtype)


def _sinks(sources: Sources, index: Index) -> np.ndarray:
    """[K, G]."""
    G = sources.model.heads // sources.model.kv_heads
    rows = slice(index[0].start * G, index[0].stop * G)
    stored = sources.read(sources.parts[0], rows, None)
    return stored.astype(sources.dtype).reshape(-1, G)[:, index[1]]


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
    H = sources.mixer.value_dim(sources.model)
    outputs = sources.read(sources.parts[0], index[3], slice(kv.start * G * H, kv.stop * G * H))
    rows = inputs_first(outputs, sources.dtype)
    return rows.reshape(-1, G, H, len(outputs))[:, index[1], index[2]]


def _latent_queries(sources: Sources, index: Index) -> np.ndarray:
    """[inputs, K, G, plain + rotated], of `q_b`, or of `q` where queries have no latent."""
    part = "q"
    if sources.latent.q_rank is not None:
        part = "q_b"
    K = sources.model.kv_heads
    G = sources.model.heads // K
    plain = sources.latent.plain
    size = plain + sources.rotated
    some = slice(index[1].start * G * size, index[1].stop * G * size)
    rows = sources.read(part, some, index[0])
    heads = _halves_after(rows.reshape(-1, G, size, rows.shape[-1]), plain)
    return inputs_first(heads, sources.dtype)[:, :, index[2], index[3]]


def _halves_after(heads: np.ndarray, plain: int) -> np.ndarray:
    """Puts the rotated rows of heads [K, n, plain + rotated, ...], stored in pairs 2 i and 2 i + 1,
    in the order of pairs i and i + half."""
    rotated = _in_halves(heads[:, :, plain:], heads.shape[2] - plain)
    return np.concatenate([heads[:, :, :plain], rotated], 2)


def _latent(sources: Sources, index: Index) -> np.ndarray:
    """[D, kv_rank + rotated]."""
    size = sources.latent.kv_rank + sources.rotated
    rows = sources.read("kv_a", slice(0, size), index[0])
    rows = _halves_after(rows[None, None], sources.latent.kv_rank)[0, 0]
    return inputs_first(rows, sources.dtype)[:, index[1]]


def _k_up(sources: Sources, index: Index) -> np.ndarray:
    """[K, G, plain, kv_rank], of `kv_b`, or of `k_b`, which is stored transposed."""
    if "k_b" in places(sources.stored):
        keys = _of_heads(sources, "k_b", sources.latent.kv_rank, index[0]).swapaxes(2, 3)
    else:
        keys = _expansion(sources, index[0])[:, :, : sources.latent.plain]
    return keys[:, index[1], index[2], index[3]].astype(sources.dtype)


def _v_up(sources: Sources, index: Index) -> np.ndarray:
    """[K, G, kv_rank, value], of `kv_b`, or of `v_b`."""
    if "v_b" in places(sources.stored):
        values = _of_heads(sources, "v_b", sources.latent.value, index[0])
    else:
        values = _expansion(sources, index[0])[:, :, sources.latent.plain :]
    return values.swapaxes(2, 3)[:, index[1], index[2], index[3]].astype(sources.dtype)


def _expansion(sources: Sources, kv: slice) -> np.ndarray:
    """Reads the weights that make keys and values of latents, [K, G, plain + value, kv_rank]."""
    return _of_heads(sources, "kv_b", sources.latent.plain + sources.latent.value, kv)


def _of_heads(sources: Sources, part: str, size: int, kv: slice) -> np.ndarray:
    """Reads a part with `size` rows for each query head, [K, G, size, ...]."""
    G = sources.model.heads // sources.model.kv_heads
    rows = sources.read(part, slice(kv.start * G * size, kv.stop * G * size), None)
    return rows.reshape(-1, G, size, rows.shape[-1])


def _gate_up(sources: Sources, index: Index) -> np.ndarray:
    """[D, 2, F]."""
    parts = [sources.read(part, index[2], index[0]) for part in sources.parts[index[1]]]
    both = empty((parts[0].shape[1], len(parts), len(parts[0])), sources.dtype)
    for number, part in enumerate(parts):
        transpose(part, both[:, number])
    return both


def _expert_gate_up(sources: Sources, index: Index) -> np.ndarray:
    """[E, D, 2, F]."""
    return _experts(sources, sources.parts[index[2]], index[0], index[1], index[3])


def _expert_down(sources: Sources, index: Index) -> np.ndarray:
    """[E, F, D]."""
    return _experts(sources, sources.parts, *index)[:, :, 0]


def _experts(
    sources: Sources, parts: tuple[str, ...], experts: slice, inputs: slice, outputs: slice
) -> np.ndarray:
    """Parts of some experts, [experts, inputs, parts, outputs]."""
    some = range(experts.start, experts.stop)
    shape = (len(some), inputs.stop - inputs.start, len(parts), outputs.stop - outputs.start)
    found = empty(shape, sources.dtype)
    for number, expert in enumerate(some):
        for i, part in enumerate(parts):
            transpose(sources.read(part, outputs, inputs, expert), found[number, :, i])
    return found


def _expert_gate_up_bias(sources: Sources, index: Index) -> np.ndarray:
    """[E, 2, F]."""
    parts = sources.parts[index[1]]
    some = range(index[0].start, index[0].stop)
    biases = [[sources.read(part, index[2], None, expert) for part in parts] for expert in some]
    return np.array(biases, sources.dtype)


def _expert_down_bias(sources: Sources, index: Index) -> np.ndarray:
    """[E, D]."""
    some = range(index[0].start, index[0].stop)
    biases = [sources.read(sources.parts[0], index[1], None, expert) for expert in some]
    return np.array(biases, sources.dtype)


def _down(sources: Sources, index: Index) -> np.ndarray:
    return inputs_first(sources.read(sources.parts[0], index[1], index[0]), sources.dtype)


TABLE: dict[str, Assembly] = {
    "embed": Assembly(("embed",), _embed),
    "layers.{layers}.attn_norm": Assembly(("attn_norm",), _norm),
    "layers.{layers}.attn_post_norm": Assembly(("attn_post_norm",), _norm),
    "layers.{layers}.attention.qkv": Assembly(("q", "k", "v"), _qkv),
    "layers.{layers}.attention.qkv_bias": Assembly(("q_bias", "k_bias", "v_bias"), _qkv_bias),
    "layers.{layers}.attention.q_norm": Assembly(("q_norm",), _q_norm),
    "layers.{layers}.attention.k_norm": Assembly(("k_norm",), _k_norm),
    "layers.{layers}.attention.sinks": Assembly(("sinks",), _sinks),
    "layers.{layers}.attention.o_proj": Assembly(("o",), _o_proj),
    "layers.{layers}.attention.o_bias": Assembly(("o_bias",), _vector),
    "layers.{layers}.attention.q_a": Assembly(("q_a",), _down),
    "layers.{layers}.attention.q_a_norm": Assembly(("q_a_norm",), _vector),
    "layers.{layers}.attention.q_b": Assembly(("q_b", "q"), _latent_queries),
    "layers.{layers}.attention.kv_a": Assembly(("kv_a",), _latent),
    "layers.{layers}.attention.kv_a_norm": Assembly(("kv_a_norm",), _vector),
    "layers.{layers}.attention.k_up": Assembly(("kv_b", "k_b"), _k_up),
    "layers.{layers}.attention.v_up": Assembly(("kv_b", "v_b"), _v_up),
    "layers.{layers}.mlp_norm": Assembly(("mlp_norm",), _norm),
    "layers.{layers}.mlp_post_norm": Assembly(("mlp_post_norm",), _norm),
    "layers.{layers}.mlp.gate_up": Assembly(("gate", "up"), _gate_up),
    "layers.{layers}.mlp.down": Assembly(("down",), _down),
    "layers.{layers}.mlp.router": Assembly(("router",), _down),
    "layers.{layers}.mlp.router_bias": Assembly(("router_bias",), _vector),
    "layers.{layers}.mlp.correction": Assembly(("correction",), _vector),
    "layers.{layers}.mlp.expert_gate_up": Assembly(("expert_gate", "expert_up"), _expert_gate_up),
    "layers.{layers}.mlp.expert_down": Assembly(("expert_down",), _expert_down),
    "layers.{layers}.mlp.expert_gate_up_bias": Assembly(
        ("expert_gate_bias", "expert_up_bias"), _expert_gate_up_bias
    ),
    "layers.{layers}.mlp.expert_down_bias": Assembly(("expert_down_bias",), _expert_down_bias),
    "layers.{layers}.mlp.shared_gate_up": Assembly(
        ("shared_gate_proj", "shared_up_proj"), _gate_up
    ),
    "layers.{layers}.mlp.shared_down": Assembly(("shared_down_proj",), _down),
    "layers.{layers}.mlp.shared_gate": Assembly(("shared_gate",), _down),
    "norm": Assembly(("norm",), _norm),
    "head": Assembly(("head",), _head),
}
