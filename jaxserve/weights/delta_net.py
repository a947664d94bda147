"""Assembles the parameters of Gated DeltaNet layers, of parts that a checkpoint stores by key head
or by themselves."""

from __future__ import annotations

import numpy as np

from jaxserve.weights.sources import Index, Rows, Sources, places


def qkvz(sources: Sources, index: Index) -> list[Rows]:
    """[D, K, outputs]: of each key head its query, key, values and output gates."""
    spec = sources.delta_net
    values = spec.group * spec.value
    sizes = {"delta_q": spec.key, "delta_k": spec.key, "delta_v": values, "delta_z": values}
    if "delta_qkvz" in places(sources.stored):
        sizes = {"delta_qkvz": spec.channels + values}
    return [Rows(part, _by_head(index[1], size), index[0]) for part, size in sizes.items()]


def ba(sources: Sources, index: Index) -> list[Rows]:
    """[D, K, 2, G]: what makes beta, and what makes the decay, of each value head."""
    group = sources.delta_net.group
    if "delta_ba" in places(sources.stored):
        both = _by_head(index[1], 2 * group)
        return [Rows("delta_ba", both.reshape(-1, 2, group), index[0])]
    heads = _by_head(index[1], group)[:, None]
    return [Rows(part, heads, index[0]) for part in ("delta_b", "delta_a")]


def conv(sources: Sources, index: Index) -> np.ndarray:
    """[K, channels, taps]."""
    spec = sources.delta_net
    sizes = (spec.key, spec.key, spec.group * spec.value)
    rows = [Rows(part, _by_head(index[0], size), None) for part, size in zip(sources.parts, sizes)]
    return np.concatenate([sources.take(some)[:, :, 0] for some in rows], 1).astype(sources.dtype)


def a_log(sources: Sources, index: Index) -> np.ndarray:
    """[K, G]: the logarithm of each value head's decay, of which GGUF files hold the negative."""
    if not sources.stored.gguf:
        return of_value_heads(sources, index)
    return np.log(-of_value_heads(sources, index))


def of_value_heads(sources: Sources, index: Index) -> np.ndarray:
    """[K, G]: a number of each value head."""
    rows = Rows(sources.parts[0], _by_head(index[0], sources.delta_net.group), None)
    return sources.take(rows).astype(sources.dtype)


def out_proj(sources: Sources, index: Index) -> list[Rows]:
    """[K, G, value, D]."""
    size = sources.delta_net.group * sources.delta_net.value
    columns = slice(index[0].start * size, index[0].stop * size)
    return [Rows(sources.parts[0], np.arange(index[3].start, index[3].stop), columns)]


def _by_head(heads: slice, size: int) -> np.ndarray:
    """Numbers of rows [heads, size] of a part with `size` rows for each head."""
    return np.arange(heads.start * size, heads.stop * size).reshape(-1, size)
