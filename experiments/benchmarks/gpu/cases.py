"""Random inputs of attention over pages, and their results in f64, for the checks on a GPU and for
the tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxserve.kernels.kv_pages import KVPages, quantize

SLOTS = 6  # rows of the page table
HUGE = 2**31 - 1


@dataclass
class Case:
    """Arguments of `reference.attend`, in f32. value_dim: numbers of a value; None: as of a key."""

    q: np.ndarray
    q_pos: np.ndarray
    pages: np.ndarray
    table: np.ndarray
    slot: np.ndarray
    entries: np.ndarray
    value_dim: int | None = None

    def arguments(self, dtype: Any = np.float32, quantized: bool = False) -> tuple[Any, ...]:
        """Arguments of an implementation: floats of this type; FP8 pages if `quantized`."""
        pool = (
            jax.tree.map(np.asarray, quantize(self.pages))
            if quantized
            else KVPages(self.pages.astype(dtype))
        )
        return self.q.astype(dtype), self.q_pos, pool, self.table, self.slot, self.entries

    def rounded(self, dtype: Any = np.float32, quantized: bool = False) -> Case:
        """This case in f32 with its numbers rounded as in those arguments."""
        pages = (
            quantize(self.pages).dequantize(np.float32) if quantized else self.pages.astype(dtype)
        )
        return dataclasses.replace(
            self, q=self.q.astype(dtype).astype(np.float32), pages=np.asarray(pages, np.float32)
        )


def draw(
    shape: Any,
    rng: np.random.Generator,
    span: Callable[[int], tuple[int, int]],
    keeps: Callable[[int], bool],
    first: int = 0,
) -> Case:
    """Draws rows on permuted pages. Tokens that were not written are NaN; invalid page-table
    entries are nonsense.

    shape: has R, T, K, G, H, C, W, vectors and value_dim. span: for a row, its number of query
    tokens and the length of its context up to the last of them. keeps: whether a block of a row is
    present. first: the block at which contexts begin.
    """
    T = shape.T
    C = shape.C
    W = shape.W
    total = shape.R * W + 3
    free = iter(rng.permutation(total).tolist())
    pages = np.full((total, shape.K, shape.vectors, C, shape.H), np.nan, np.float32)
    table = rng.choice(np.array([0, 1, total + 5, HUGE, -1, -HUGE], np.int32), (2, SLOTS, W))
    slot = rng.permutation(SLOTS)[: shape.R].astype(np.int32)
    entries = np.zeros(shape.R, np.int32)
    q_pos = np.full((shape.R, T), -1, np.int32)
    for row in range(shape.R):
        length, end = span(row)
        q_pos[row, :length] = first * C + np.arange(end - length, end)
        blocks = [block for block in range(-(-end // C)) if keeps(row)]
        entries[row] = len(blocks)
        for at, block in enumerate(blocks):
            page = next(free)
            tokens = min(C, end - block * C)
            table[:, slot[row], at] = page, first + block
            vectors = rng.standard_normal((shape.K, shape.vectors, tokens, shape.H))
            pages[page, :, :, :tokens] = vectors
    q = rng.standard_normal((shape.R, T, shape.K, shape.G, shape.H)).astype(np.float32)
    return Case(q, q_pos, pages, table, slot, entries, shape.value_dim)


def truth(
    case: Case, scale: float, window: int | None, softcap: float = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Attention in f64 by its definition: out and lse."""
    R, T, K, G, H = case.q.shape
    size = case.pages.shape[3]
    value_dim = case.value_dim or H
    out = np.zeros((R, T, K, G, value_dim))
    lse = np.full(case.q.shape[:-1], -np.inf)
    for row, slot in enumerate(case.slot):
        pages, blocks = case.table[:, slot, : case.entries[row]].astype(np.int64)
        k_pos = (blocks[:, None] * size + np.arange(size)).ravel()
        pos = case.q_pos[row]
        live = np.flatnonzero(k_pos <= pos.max())
        if not len(live):
            continue
        k_pos = k_pos[live]
        # [T, S]
        seen = (
            (k_pos <= pos[:, None])
            & (pos[:, None] - k_pos < (window or HUGE))
            & (pos >= 0)[:, None]
        )
        for head in range(K):
            vectors = case.pages[pages, head].astype(np.float64).swapaxes(0, 1)
            vectors = vectors.reshape(len(vectors), -1, H)[:, live]
            k = vectors[0]
            v = vectors[-1, :, :value_dim]
            q = case.q[row, :, head].astype(np.float64).reshape(T * G, H) * scale
            scores = (q @ k.T).reshape(T, G, -1)
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            scores = np.where(seen[:, None], scores, -np.inf)
            top = np.maximum(scores.max(-1, keepdims=True), -1e300)
            weights = np.exp(scores - top)
            total = weights.sum(-1)
            some = total > 0
            lse[row, :, head][some] = (top[..., 0] + np.log(np.where(some, total, 1)))[some]
            out[row, :, head] = (weights.reshape(T * G, -1) @ v).reshape(T, G, -1) / np.where(
                some, total, 1
            )[..., None]
    return out, lse
