"""What a kernel is compiled for, and what differs in the interpreter, which has neither layouts nor
products of registers."""

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

# of registers: [rows, columns], [rows]
TILE = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)
# the same, of numbers that were of 8 bits
EIGHT = plgpu.Layout.WGMMA_UPCAST_2X
EIGHT_ROW = plgpu.Layout.WGMMA_UPCAST_2X.reduce(1)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a kernel is compiled for."""

    scale: float  # of scores, times log2 e
    window: int | None
    packing: Packing
    tiles: Tiles
    rows: int  # R
    size: int  # C
    interpret: bool
    senders: int = 0  # blocks that send the pages on, beside those that attend: see `hop`
    ring: str | None = None  # the mesh axis to whose next lane; None: to this one

    @property
    def per(self) -> int:
        """Pages of a key tile, and copies."""
        return max(1, self.tiles.keys // self.size)

    @property
    def parts(self) -> int:
        """Key tiles of a page."""
        return max(1, self.size // self.tiles.keys)

    @property
    def height(self) -> int:
        """Rows of a query tile."""
        return ROWS * self.tiles.warpgroups // self.packing.side

    @property
    def across(self) -> int:
        """Query tiles of the M rows of one of R."""
        return max(1, self.packing.rows // self.height)

    @property
    def thin(self) -> bool:
        return self.packing.rows < ROWS

    @property
    def stored(self) -> int:
        """Rows of a warpgroup that there are."""
        return min(ROWS, self.packing.rows)

    @property
    def registers(self) -> tuple[int, int, int] | None:
        """Of a thread that computes, fetches, widens; they share 65,536. None: as many as all can
        have, which is enough."""
        two = self.tiles.warpgroups > 1
        narrow = bool(self.tiles.narrow)
        shares = {
            (True, False): (240, 24, 0),
            (True, True): (216, 24, 56),
            (False, True): (240, 24, 160),
        }
        return None if self.interpret else shares.get((two, narrow))

    def cast(self, x: jax.Array, layout: Any) -> jax.Array:
        return x if self.interpret else plgpu.layout_cast(x, layout)

    def iota(self, shape: tuple[int, ...], axis: int) -> jax.Array:
        if self.interpret:
            return lax.broadcasted_iota(jnp.int32, shape, axis)
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=TILE)

    def load(self, ref: Any, layout: Any) -> jax.Array:
        return ref[...] if self.interpret else plgpu.load(ref, layout=layout, optimized=False)  # type: ignore[call-arg]

    def store(self, x: jax.Array, to: Any, staging: Any) -> None:
        """Registers [ROWS, ...] to device memory, as many rows as there are: by way of shared
        memory, unless whole sectors are written."""
        if not self.thin and to.dtype.itemsize == 4:
            to[...] = x
            return
        staging[...] = x.astype(to.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staging.at[pl.ds(0, self.stored)], to)
        plgpu.wait_smem_to_gmem(0)


def kernel(
    body: Any,
    out_type: Any,
    scratch: dict[str, Any],
    grid: dict[str, int],
    threads: int,
    interpret: Any,
) -> Any:
    """A Mosaic kernel; unlike plgpu.kernel it takes refs among its arguments, which it may write in
    place."""
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
