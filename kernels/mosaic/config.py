"""Compile-time configuration of the attention kernels, with loads and stores that also work in the
Pallas interpreter, which has no register layouts."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.kernels.mosaic.tiles import ROWS, Packing, Tiles
from jaxserve.kernels.work_split import ROW_TILE, TileSlice, WorkShape, WorkSplit

# register layouts of [rows, columns] and of [rows]
ACC_LAYOUT = plgpu.Layout.WGMMA
ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(1)
# the same for numbers converted from 8 bits
FP8_LAYOUT = plgpu.Layout.WGMMA_UPCAST_2X
FP8_ROW_LAYOUT = plgpu.Layout.WGMMA_UPCAST_2X.reduce(1)


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """Parameters that a kernel is compiled for.

    scale: of scores, times log2 e. inner: scores are tanh(q k inner), and `scale` is their soft cap
    times log2 e; 0: scores are q k. window: sliding window in tokens. rows: R. page_size: C.
    senders: thread blocks that send pages to the next device while the others attend (`ring_send`).
    ring_axis: the mesh axis of the ring; None: send to this device.
    """

    scale: float
    window: int | None
    packing: Packing
    tiles: Tiles
    rows: int
    page_size: int
    interpret: bool
    senders: int = 0
    ring_axis: str | None = None
    inner: float = 0

    @property
    def work(self) -> WorkShape:
        """Sizes that the work is split by."""
        packing = self.packing
        return WorkShape(
            self.rows,
            self.tiles_per_row,
            self.tile_rows,
            packing.heads // packing.side,
            self.tiles.keys,
            self.page_size,
            self.window,
            self.tiles.blocks,
        )

    @property
    def tile_rows(self) -> int:
        """Rows of a query tile, all warpgroups of one head together."""
        return ROWS * self.tiles.warpgroups // self.packing.side

    @property
    def tiles_per_row(self) -> int:
        """Query tiles that cover the M packed rows of one of the R rows of queries."""
        return max(1, self.packing.rows // self.tile_rows)

    def place(self, split: WorkSplit, part: TileSlice, wg: Any) -> tuple[Any, Any, Any]:
        """Finds the rows of queries of warpgroup `wg` in a query tile: row of R, first of the M
        packed rows, and head."""
        side = self.packing.side
        row_tile = split.tiles[part.place, ROW_TILE]
        row0 = lax.rem(row_tile, self.tiles_per_row) * self.tile_rows + lax.div(wg, side) * ROWS
        return lax.div(row_tile, self.tiles_per_row), row0, part.heads * side + lax.rem(wg, side)

    @property
    def partial_tile(self) -> bool:
        """Returns True if there are fewer rows than one warpgroup computes."""
        return self.packing.rows < ROWS

    @property
    def stored_rows(self) -> int:
        """Rows of a warpgroup that exist in memory."""
        return min(ROWS, self.packing.rows)

    def rows_at(self, row: Any, row0: Any, head: Any) -> tuple[Any, ...]:
        """Index of a warpgroup's rows of queries or results, from `row0` on."""
        rows = pl.ds(row0, self.stored_rows)
        return (row, head, rows) if self.packing.by_head else (row, rows, head)

    @property
    def registers(self) -> tuple[int, int, int] | None:
        """Registers per thread of warpgroups that compute, load and dequantise; a block has 65,536.
        None: the compiler's equal shares are enough."""
        two = self.tiles.warpgroups > 1
        fp8 = bool(self.tiles.narrow)
        shares = {
            (True, False): (240, 24, 0),
            (True, True): (216, 24, 56),
            (False, True): (240, 24, 160),
        }
        return None if self.interpret else shares.get((two, fp8))

    def cast(self, x: jax.Array, layout: Any) -> jax.Array:
        """x in a register layout."""
        return x if self.interpret else plgpu.layout_cast(x, layout)

    def iota(self, shape: tuple[int, ...], axis: int) -> jax.Array:
        """int32 indices along `axis`, in the layout of accumulators."""
        if self.interpret:
            return lax.broadcasted_iota(jnp.int32, shape, axis)
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=ACC_LAYOUT)

    def load(self, ref: Any, layout: Any) -> jax.Array:
        """Loads a ref into registers with a layout."""
        if self.interpret:
            return ref[...]
        return plgpu.load(ref, layout=layout, optimized=False)  # type: ignore[call-arg]

    def store(self, x: jax.Array, to: Any, staging: Any) -> None:
        """Stores registers [ROWS, ...] to device memory, only the rows that exist; through shared
        memory (`staging`) unless f32 rows fill whole memory sectors."""
        if not self.partial_tile and to.dtype.itemsize == 4:
            to[...] = x
            return
        staging[...] = x.astype(to.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staging.at[pl.ds(0, self.stored_rows)], to)
        plgpu.wait_smem_to_gmem(0)


def kernel(
    body: Any,
    out_type: Any,
    scratch: dict[str, Any],
    grid: dict[str, int],
    threads: int,
    interpret: Any,
) -> Any:
    """Builds a Mosaic GPU kernel. Unlike plgpu.kernel, it accepts mutable refs as arguments and may
    write to them.

    out_type: ShapeDtypeStructs of the results. scratch: shared memory and barriers, passed to
    `body` by name. grid: sizes of the grid axes by name. threads: warpgroups per block (axis "wg").
    interpret: False, or parameters of the interpreter.
    """
    mesh = plgpu.Mesh(
        grid=tuple(grid.values()), grid_names=tuple(grid), num_threads=threads, thread_name="wg"
    )

    def scoped(*refs: Any) -> None:
        pl.run_scoped(functools.partial(body, *refs), collective_axes="wg", **scratch)

    return pl.kernel(
        scoped,
        out_type=out_type,
        mesh=mesh,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret or False,
    )
