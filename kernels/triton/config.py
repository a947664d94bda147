"""Compile-time configuration of the Triton kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.kernels.triton.tiles import Tiles
from jaxserve.kernels.work_split import ROW_TILE, TileSlice, WorkShape, WorkSplit


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """Parameters that a kernel is compiled for.

    scale: of scores, times log2 e. inner: scores are tanh(q k inner), and `scale` is their soft cap
    times log2 e; 0: scores are q k. window: sliding window in tokens. shape: of queries, [R, T, K,
    G, H]. page_size: C.
    """

    scale: float
    inner: float
    window: int | None
    shape: tuple[int, ...]
    page_size: int
    tiles: Tiles

    @property
    def packed_rows(self) -> int:
        """Rows of one of the R rows of queries within a kv head: tokens times query heads."""
        return self.shape[1] * self.shape[3]

    @property
    def row_tiles(self) -> int:
        """Query tiles that cover the packed rows."""
        return -(-self.packed_rows // self.tiles.rows)

    @property
    def work(self) -> WorkShape:
        """Sizes that the work is split by."""
        return WorkShape(
            self.shape[0],
            self.row_tiles,
            self.tiles.rows,
            self.shape[2],
            self.tiles.keys,
            self.page_size,
            self.window,
            self.tiles.blocks,
        )

    def rows(self, split: WorkSplit, part: TileSlice, first: Any, count: int) -> Rows:
        """Finds `count` rows of a query tile from row `first` on."""
        row_tile = split.tiles[part.place, ROW_TILE]
        packed = lax.rem(row_tile, self.row_tiles) * self.tiles.rows + first
        packed += lax.iota(jnp.int32, count)
        group = self.shape[3]
        return Rows(
            lax.div(row_tile, self.row_tiles),
            lax.div(packed, group),
            part.heads,
            lax.rem(packed, group),
            packed < self.packed_rows,
        )


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a query tile. row: of R. token, group, exists: [n], indices of T and of G, and
    whether there is such a row. head: of K."""

    row: Any
    token: jax.Array
    head: Any
    group: jax.Array
    exists: jax.Array

    @property
    def scalars(self) -> tuple[Any, ...]:
        """Their index in arrays [R, T, K, G]."""
        return self.row, self.token, self.head, self.group

    def vectors(self, size: int) -> tuple[Any, ...]:
        """Their index in arrays [R, T, K, G, size]."""
        return vectors((self.row, self.token, self.head, self.group), size)


def vectors(index: tuple[Any, ...], size: int) -> tuple[Any, ...]:
    """Index of the vectors [n, size] behind an index of scalars and arrays [n]: arrays alone, for
    the interpreter does not mix them with slices."""
    columns = [jnp.expand_dims(at, 1) if jnp.ndim(at) else at for at in index]
    return *columns, lax.iota(jnp.int32, size)[None, :]
