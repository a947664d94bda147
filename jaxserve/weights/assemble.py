"""`TABLE`: of which parts each parameter of the decoder is assembled, and how.

An assembly builds any slice of its parameter and reads of each part only the rows and columns that
the slice needs. Parameters are [in, out], with heads and gate/up as dimensions of their own (see
`checkpoint.specs`); in a slice, dimensions that no mesh splits are whole. Of matrices, the table
says which rows of the parts are their outputs, also for those that stay quantised (`weights.kept`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from jaxserve.checkpoint.delta_net import DeltaNetSpec
from jaxserve.checkpoint.families import layout
from jaxserve.checkpoint.specs import AttentionSpec
from jaxserve.weights import delta_net
from jaxserve.weights.sources import Index, Rows, Sources, empty, places, transpose


class Assembly(Protocol):
    """The way a parameter is assembled of parts."""

    @property
    def parts(self) -> tuple[str, ...]: ...

    def build(self, sources: Sources, index: Index) -> np.ndarray:
        """Builds a slice of the parameter."""


@dataclass(frozen=True)
class Built:
    """A parameter that a function builds."""

    parts: tuple[str, ...]
    function: Callable[[Sources, Index], np.ndarray]

    def build(self, sources: Sources, index: Index) -> np.ndarray:
        """Builds a slice of the parameter."""
        return self.function(sources, index)


@dataclass(frozen=True)
class Matrix:
    """A matrix [*inputs, *outputs]. layout: gives the rows of each part that are outputs of a
    slice. axis: that of the outputs along which the parts lie side by side."""

    parts: tuple[str, ...]
    layout: Callable[[Sources, Index], list[Rows]]
    axis: int = 0

    def by_role(self, dimensions: Sequence, outputs: int) -> tuple[Sequence, Sequence, Sequence]:
        """Splits something that each dimension has into that of experts, outputs, and inputs.
        outputs: their number."""
        return (), dimensions[-outputs:], dimensions[:-outputs]

    def index(self, experts: Index, outputs: Index, inputs: Index) -> Index:
        """Puts together what `by_role` splits."""
        return (*experts, *inputs, *outputs)

    def rows(self, sources: Sources, index: Index) -> list[list[Rows]]:
        """Returns the rows of each part; of each expert by itself where there are some."""
        return [self.layout(sources, index)]

    def build(self, sources: Sources, index: Index) -> np.ndarray:
        """Builds a slice of the parameter."""
        return build_matrices(sources, self.rows(sources, index), self.axis, sizes(index))


class ExpertMatrices(Matrix):
    """Matrices [experts, inputs, *outputs]; `layout` has the index of one."""

    def by_role(self, dimensions: Sequence, outputs: int) -> tuple[Sequence, Sequence, Sequence]:
        """Splits as `Matrix.by_role`; the first dimension is that of experts."""
        return dimensions[:1], dimensions[-outputs:], dimensions[1:-outputs]

    def rows(self, sources: Sources, index: Index) -> list[list[Rows]]:
        """Returns the rows of each part of each expert."""
        one = self.layout(sources, index[1:])
        experts = range(index[0].start, index[0].stop)
        return [[replace(rows, expert=expert) for rows in one] for expert in experts]


class Table(Matrix):
    """A table [outputs, inputs], of which rows are looked up."""

    def by_role(self, dimensions: Sequence, outputs: int) -> tuple[Sequence, Sequence, Sequence]:
        """Splits as `Matrix.by_role`; outputs come first."""
        return (), dimensions[:outputs], dimensions[outputs:]

    def index(self, experts: Index, outputs: Index, inputs: Index) -> Index:
        """Puts together what `by_role` splits."""
        return (*outputs, *inputs)

    def build(self, sources: Sources, index: Index) -> np.ndarray:
        """Builds a slice of the parameter."""
        table = empty(sizes(index), sources.dtype)
        [[rows]] = self.rows(sources, index)
        table[:] = sources.take(rows)
        return table


def sizes(index: Index) -> tuple[int, ...]:
    """Shape of a slice."""
    return tuple(some.stop - some.start for some in index)


def build_matrices(
    sources: Sources, rows: list[list[Rows]], axis: int, shape: tuple[int, ...]
) -> np.ndarray:
    """Builds matrices of rows of their parts, one after another, in an array of this shape. axis:
    as of `Matrix`."""
    outputs = list(rows[0][0].numbers.shape)
    outputs[axis] = sum(part.numbers.shape[axis] for part in rows[0])
    built = empty((len(rows), rows[0][0].width, *outputs), sources.dtype)
    for matrix, parts in zip(built, rows):
        first = 0
        for part in parts:
            values = sources.take(part)  # [*outputs, inputs]
            last = first + part.numbers.shape[axis]
            for before in np.ndindex(part.numbers.shape[:axis]):
                target = matrix[(slice(None), *before, slice(first, last))]
                transpose(values[before].reshape(-1, len(matrix)), target.reshape(len(matrix), -1))
            first = last
    return built.reshape(shape)


def _norm(sources: Sources, index: Index) -> np.ndarray:
    """[D] or [H]."""
    weights = sources.read(sources.parts[0], index[0], None).astype(np.float32)
    return (weights + np.float32(sources.stored.norms.less_one)).astype(sources.dtype)


def _vocabulary(sources: Sources, tokens: slice, columns: slice) -> list[Rows]:
    """Rows of tokens; those past the vocabulary are zero."""
    return [Rows(sources.parts[0], _numbers(tokens), columns)]


def _embed(sources: Sources, index: Index) -> list[Rows]:
    """[padded vocabulary, D]."""
    return _vocabulary(sources, index[0], index[1])


def _head(sources: Sources, index: Index) -> list[Rows]:
    """[D, padded vocabulary]."""
    return _vocabulary(sources, index[1], index[0])


def _numbers(rows: slice) -> np.ndarray:
    return np.arange(rows.start, rows.stop)


def _qkv(sources: Sources, index: Index) -> list[Rows]:
    """[D, K, G + 2, H]: for each kv head its G query heads, its key, its value; with gates, those
    of its query heads follow these."""
    return _heads(sources, index[1], index[0])


def _qkv_bias(sources: Sources, index: Index) -> np.ndarray:
    """[K, G + 2, H]."""
    heads = [sources.take(rows) for rows in _heads(sources, index[0], None)]
    return np.concatenate(heads, 1).astype(sources.dtype)


def _heads(sources: Sources, kv: slice, columns: slice | None) -> list[Rows]:
    """Rows of queries and their gates [K, G or 2 G, H], keys and values [K, 1, H] for the kv heads
    `kv`."""
    assert isinstance(sources.mixer, AttentionSpec)
    queries = _query_heads(sources, kv, sources.mixer.query_rows)
    keys = values = _kv_heads(sources, kv)
    if layout(sources.stored).interleaved:
        dims = sources.rotated or sources.model.head_dim  # the order is that of all layers
        queries = _in_halves(queries, dims)
        keys = _in_halves(keys, dims)
    numbers = (queries, keys, values)[: len(sources.mixer.projected)]
    return [Rows(part, rows, columns) for part, rows in zip(sources.parts, numbers)]


def _in_halves(heads: np.ndarray, dims: int) -> np.ndarray:
    """Rows [K, n, H] of which the first `dims` of each head are rotated in pairs 2 i and 2 i + 1,
    in the order in which the pairs are i and i + dims / 2."""
    order = np.arange(heads.shape[2])
    order[:dims] = [*range(0, dims, 2), *range(1, dims, 2)]
    return heads[:, :, order]


def _query_heads(sources: Sources, kv: slice, rows: int = 1) -> np.ndarray:
    """Numbers of rows [K, rows * G, H]: of the G heads, then of what else each has, as gates."""
    G = sources.model.heads // sources.model.kv_heads
    H = sources.model.head_dim
    size = G * rows * H
    heads = np.arange(kv.start * size, kv.stop * size).reshape(-1, G, rows, H)
    return heads.swapaxes(1, 2).reshape(-1, rows * G, H)


def _kv_heads(sources: Sources, kv: slice) -> np.ndarray:
    """Numbers of rows [K, 1, H]. With more ranks than kv heads, several are copies of a stored
    one."""
    H = sources.model.head_dim
    stored = np.arange(kv.start, kv.stop) * sources.stored.kv_heads // sources.model.kv_heads
    return (stored[:, None] * H + np.arange(H))[:, None]


def _vector(sources: Sources, index: Index) -> np.ndarray:
    return sources.read(sources.parts[0], index[0], None).astype(sources.dtype)


def _sinks(sources: Sources, index: Index) -> np.ndarray:
    """[K, G]."""
    G = sources.model.heads // sources.model.kv_heads
    rows = slice(index[0].start * G, index[0].stop * G)
    return sources.read(sources.parts[0], rows, None).astype(sources.dtype).reshape(-1, G)


def _q_norm(sources: Sources, index: Index) -> np.ndarray:
    """[H], or [K, G, H] where heads have weights of their own."""
    if len(index) == 1:
        return _norm(sources, index)
    return sources.take(Rows("q_norm", _query_heads(sources, index[0]), None)).astype(sources.dtype)


def _k_norm(sources: Sources, index: Index) -> np.ndarray:
    """[H], or [K, 1, H] where heads have weights of their own."""
    if len(index) == 1:
        return _norm(sources, index)
    return sources.take(Rows("k_norm", _kv_heads(sources, index[0]), None)).astype(sources.dtype)


def _o_proj(sources: Sources, index: Index) -> list[Rows]:
    """[K, G, H, D]."""
    G = sources.model.heads // sources.model.kv_heads
    assert not isinstance(sources.mixer, DeltaNetSpec)
    H = sources.mixer.value_dim(sources.model)
    columns = slice(index[0].start * G * H, index[0].stop * G * H)
    return [Rows(sources.parts[0], _numbers(index[3]), columns)]


def _latent_queries(sources: Sources, index: Index) -> list[Rows]:
    """[inputs, K, G, plain + rotated], of `q_b`, or of `q` where queries have no latent."""
    part = "q"
    if sources.latent.q_rank is not None:
        part = "q_b"
    K = sources.model.kv_heads
    G = sources.model.heads // K
    plain = sources.latent.plain
    size = plain + sources.rotated
    heads = np.arange(index[1].start * G * size, index[1].stop * G * size).reshape(-1, G, size)
    return [Rows(part, _halves_after(heads, plain), index[0])]


def _halves_after(heads: np.ndarray, plain: int) -> np.ndarray:
    """Puts the rotated rows of heads [K, n, plain + rotated], stored in pairs 2 i and 2 i + 1, in
    the order of pairs i and i + half."""
    rotated = _in_halves(heads[:, :, plain:], heads.shape[2] - plain)
    return np.concatenate([heads[:, :, :plain], rotated], 2)


def _latent(sources: Sources, index: Index) -> list[Rows]:
    """[D, kv_rank + rotated]."""
    rows = np.arange(sources.latent.kv_rank + sources.rotated)
    rows = _halves_after(rows[None, None], sources.latent.kv_rank)[0, 0]
    return [Rows("kv_a", rows, index[0])]


def _k_up(sources: Sources, index: Index) -> np.ndarray:
    """[K, G, plain, kv_rank], of `kv_b`, or of `k_b`, which is stored transposed."""
    if "k_b" in places(sources.stored):
        keys = _of_heads(sources, "k_b", sources.latent.kv_rank, index[0]).swapaxes(2, 3)
    else:
        keys = _expansion(sources, index[0])[:, :, : sources.latent.plain]
    return keys.astype(sources.dtype)


def _v_up(sources: Sources, index: Index) -> np.ndarray:
    """[K, G, kv_rank, value], of `kv_b`, or of `v_b`."""
    if "v_b" in places(sources.stored):
        values = _of_heads(sources, "v_b", sources.latent.value, index[0])
    else:
        values = _expansion(sources, index[0])[:, :, sources.latent.plain :]
    return values.swapaxes(2, 3).astype(sources.dtype)


def _expansion(sources: Sources, kv: slice) -> np.ndarray:
    """Reads the weights that make keys and values of latents, [K, G, plain + value, kv_rank]."""
    return _of_heads(sources, "kv_b", sources.latent.plain + sources.latent.value, kv)


def _of_heads(sources: Sources, part: str, size: int, kv: slice) -> np.ndarray:
    """Reads a part with `size` rows for each query head, [K, G, size, ...]."""
    G = sources.model.heads // sources.model.kv_heads
    rows = sources.read(part, slice(kv.start * G * size, kv.stop * G * size), None)
    return rows.reshape(-1, G, size, rows.shape[-1])


def _gate_up(sources: Sources, index: Index) -> list[Rows]:
    """[D, 2, F]."""
    return [Rows(part, _numbers(index[2])[None], index[0]) for part in sources.parts]


def _plain(sources: Sources, index: Index) -> list[Rows]:
    """[in, out]."""
    return [Rows(sources.parts[0], _numbers(index[1]), index[0])]


def _inputs_proj(sources: Sources, index: Index) -> list[Rows]:
    """[D, layers, numbers of each]."""
    _, layers, numbers = index
    size = numbers.stop - numbers.start
    rows = np.arange(layers.start * size, layers.stop * size).reshape(-1, size)
    return [Rows("inputs_proj", rows, index[0])]


def _expert_gate_up_bias(sources: Sources, index: Index) -> np.ndarray:
    """[E, 2, F]."""
    some = range(index[0].start, index[0].stop)
    biases = [
        [sources.read(part, index[2], None, expert) for part in sources.parts] for expert in some
    ]
    return np.array(biases, sources.dtype)


def _expert_down_bias(sources: Sources, index: Index) -> np.ndarray:
    """[E, D]."""
    some = range(index[0].start, index[0].stop)
    biases = [sources.read(sources.parts[0], index[1], None, expert) for expert in some]
    return np.array(biases, sources.dtype)


TABLE: dict[str, Assembly] = {
    "embed": Table(("embed",), _embed),
    "layers.{layers}.attn_norm": Built(("attn_norm",), _norm),
    "layers.{layers}.attn_post_norm": Built(("attn_post_norm",), _norm),
    "layers.{layers}.attention.qkv": Matrix(("q", "k", "v"), _qkv, axis=1),
    "layers.{layers}.attention.qkv_bias": Built(("q_bias", "k_bias", "v_bias"), _qkv_bias),
    "layers.{layers}.attention.q_norm": Built(("q_norm",), _q_norm),
    "layers.{layers}.attention.k_norm": Built(("k_norm",), _k_norm),
    "layers.{layers}.attention.sinks": Built(("sinks",), _sinks),
    "layers.{layers}.attention.o_proj": Matrix(("o",), _o_proj),
    "layers.{layers}.attention.o_bias": Built(("o_bias",), _vector),
    "layers.{layers}.attention.q_a": Matrix(("q_a",), _plain),
    "layers.{layers}.attention.q_a_norm": Built(("q_a_norm",), _vector),
    "layers.{layers}.attention.q_b": Matrix(("q_b", "q"), _latent_queries),
    "layers.{layers}.attention.kv_a": Matrix(("kv_a",), _latent),
    "layers.{layers}.attention.kv_a_norm": Built(("kv_a_norm",), _vector),
    "layers.{layers}.attention.k_up": Built(("kv_b", "k_b"), _k_up),
    "layers.{layers}.attention.v_up": Built(("kv_b", "v_b"), _v_up),
    "layers.{layers}.attention.qkvz": Matrix(
        ("delta_qkvz", "delta_q", "delta_k", "delta_v", "delta_z"), delta_net.qkvz, axis=1
    ),
    "layers.{layers}.attention.ba": Matrix(
        ("delta_ba", "delta_b", "delta_a"), delta_net.ba, axis=1
    ),
    "layers.{layers}.attention.conv": Built(("conv_q", "conv_k", "conv_v"), delta_net.conv),
    "layers.{layers}.attention.a_log": Built(("a_log",), delta_net.a_log),
    "layers.{layers}.attention.dt_bias": Built(("dt_bias",), delta_net.of_value_heads),
    "layers.{layers}.attention.out_norm": Built(("delta_norm",), _vector),
    "layers.{layers}.attention.out_proj": Matrix(("delta_o",), delta_net.out_proj),
    "layers.{layers}.mlp_norm": Built(("mlp_norm",), _norm),
    "layers.{layers}.mlp_post_norm": Built(("mlp_post_norm",), _norm),
    "layers.{layers}.mlp.gate_up": Matrix(("gate", "up"), _gate_up),
    "layers.{layers}.mlp.down": Matrix(("down",), _plain),
    "layers.{layers}.layer_scalar": Built(("layer_scalar",), _vector),
    "layers.{layers}.input.gate": Matrix(("input_gate",), _plain),
    "layers.{layers}.input.proj": Matrix(("input_proj",), _plain),
    "layers.{layers}.input.norm": Built(("input_norm",), _vector),
    "layers.{layers}.mlp.router_scale": Built(("router_scale",), _vector),
    "layers.{layers}.mlp.expert_scale": Built(("expert_scale",), _vector),
    "layers.{layers}.mlp.mlp_out_norm": Built(("mlp_out_norm",), _vector),
    "layers.{layers}.mlp.experts_norm": Built(("experts_norm",), _vector),
    "layers.{layers}.mlp.experts_out_norm": Built(("experts_out_norm",), _vector),
    "layers.{layers}.mlp.router": Matrix(("router",), _plain),
    "layers.{layers}.mlp.router_bias": Built(("router_bias",), _vector),
    "layers.{layers}.mlp.correction": Built(("correction",), _vector),
    "layers.{layers}.mlp.expert_gate_up": ExpertMatrices(("expert_gate", "expert_up"), _gate_up),
    "layers.{layers}.mlp.expert_down": ExpertMatrices(("expert_down",), _plain),
    "layers.{layers}.mlp.expert_gate_up_bias": Built(
        ("expert_gate_bias", "expert_up_bias"), _expert_gate_up_bias
    ),
    "layers.{layers}.mlp.expert_down_bias": Built(("expert_down_bias",), _expert_down_bias),
    "layers.{layers}.mlp.shared_gate_up": Matrix(("shared_gate_proj", "shared_up_proj"), _gate_up),
    "layers.{layers}.mlp.shared_down": Matrix(("shared_down_proj",), _plain),
    "layers.{layers}.mlp.shared_gate": Matrix(("shared_gate",), _plain),
    "inputs.embed": Table(("inputs_embed",), _embed),
    "inputs.proj": Matrix(("inputs_proj",), _inputs_proj),
    "inputs.norm": Built(("inputs_norm",), _vector),
    "norm": Built(("norm",), _norm),
    "head": Matrix(("head",), _head),
}
