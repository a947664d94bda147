"""How keys and values come: one warpgroup fetches them, page by page; where pages are of 8 bits
another widens them to 16, which is what the tensor cores multiply with queries of 16."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.kernels.mosaic.config import EIGHT, EIGHT_ROW, Setting
from jaxserve.kernels.mosaic.keys import Keys
from jaxserve.kernels.mosaic.tiles import ROWS
from jaxserve.kernels.mosaic.work_split import Stretch, WorkSplit


class Buffers(NamedTuple):
    """What the warpgroups of a block share: shared memory, and barriers that say what is here and
    what is free."""

    q: Any  # [warpgroups, ROWS, H]
    k: Any  # [stages, keys, H]
    v: Any
    q_here: Any
    k_here: Any
    v_here: Any
    k_free: Any
    v_free: Any
    turn: Any  # two warpgroups multiply by turns: one does while the other is at its softmax
    narrow: Any = None  # [narrow, keys, H] of 8 bits, keys and values in turn
    scales: Any = None  # [narrow, keys]
    narrow_here: Any = None
    narrow_free: Any = None
    p: Any = None  # [warpgroups, ROWS, keys] in the interpreter; else in registers
    lse: Any = None  # [ROWS], where rows are thin
    sent: Any = None  # of a block that sends pages on: see `hop`

    @property
    def wide(self) -> tuple[Any, ...]:
        """Of keys and of values: buffers, and their barriers."""
        return ((self.k,), self.k_here, self.k_free), ((self.v,), self.v_here, self.v_free)

    def take_turn(self) -> None:
        plgpu.barrier_arrive(self.turn)
        plgpu.barrier_wait(self.turn)


def fetch(
    setting: Setting,
    stretch: Stretch,
    line: WorkSplit,
    table_g: Any,
    pools: tuple[Any, ...],
    buffers: Buffers,
) -> None:
    """Keys and values of all of the stretch, as buffers become free. pools: pages, and where they
    are of 8 bits their scales."""
    tiles = setting.tiles
    per = setting.per
    size = setting.size
    total = pools[0].shape[0]
    narrow = bool(tiles.narrow)
    deep = tiles.narrow or tiles.stages
    kinds = (
        (((buffers.narrow, buffers.scales), buffers.narrow_here, buffers.narrow_free),) * 2
        if narrow
        else buffers.wide
    )

    def one(index: Any, _: Any) -> tuple:
        part = stretch.part(index)
        keys = Keys(setting, table_g, line, part.row_tile)
        head = lax.div(part.heads * setting.packing.side, setting.packing.group)

        def key_tile(tile: Any, ids: tuple[Any, ...]) -> tuple[Any, ...]:
            # read while this tile waits for its buffers
            later = keys.pages(jnp.minimum(tile + 1, part.end - 1), total)
            at = part.place + tile - stretch.low
            inside = keys.entry(tile, 0)[1]
            for which, (targets, here, free) in enumerate(kinds):
                place = 2 * at + which if narrow else at
                slot = lax.rem(place, deep)
                pl.when(place >= deep)(lambda: plgpu.barrier_wait(free.at[slot]))  # noqa: B023 (runs at once)
                for copy, id in enumerate(ids):
                    for pool, target in zip(pools, targets):
                        page = pool.at[id, head, which]
                        source = page.at[pl.ds(inside, tiles.keys)] if setting.parts > 1 else page
                        room = (
                            target.at[slot, pl.ds(copy * size, size)]
                            if per > 1
                            else target.at[slot]
                        )
                        plgpu.copy_gmem_to_smem(source, room, here.at[slot])
            return later

        lax.fori_loop(part.begin, part.end, key_tile, keys.pages(part.begin, total))
        return ()

    units = stretch.high - stretch.low
    lax.fori_loop(0, stretch.number, one, ())
    _drain(
        2 * units if narrow else units,
        deep,
        (buffers.narrow_free,) if narrow else (buffers.k_free, buffers.v_free),
    )


def widen(setting: Setting, stretch: Stretch, buffers: Buffers) -> None:
    """Keys and values of all of the stretch, as they come in 8 bits: exactly what they say, in the
    queries' type."""
    tiles = setting.tiles
    units = stretch.high - stretch.low

    def key_tile(at: Any, _: Any) -> tuple:
        stage = lax.rem(at, tiles.stages)
        for which, ((wide,), here, free) in enumerate(buffers.wide):
            slot = lax.rem(2 * at + which, tiles.narrow)
            plgpu.barrier_wait(buffers.narrow_here.at[slot])
            pl.when(at >= tiles.stages)(lambda: plgpu.barrier_wait(free.at[stage]))  # noqa: B023 (runs at once)
            for row in range(0, tiles.keys, ROWS):
                rows = pl.ds(row, ROWS)
                x = setting.load(buffers.narrow.at[slot, rows], EIGHT).astype(jnp.float32)
                scale = setting.load(buffers.scales.at[slot, rows], EIGHT_ROW).astype(jnp.float32)
                wide.at[stage, rows][...] = (x * lax.broadcast_in_dim(scale, x.shape, [0])).astype(
                    wide.dtype
                )
            plgpu.commit_smem()
            plgpu.barrier_arrive(here.at[stage])
            plgpu.barrier_arrive(buffers.narrow_free.at[slot])
        return ()

    lax.fori_loop(0, units, key_tile, ())
    _drain(units, tiles.stages, (buffers.k_free, buffers.v_free))


def _drain(places: Any, deep: int, barriers: tuple[Any, ...]) -> None:
    """No barrier is left with arrivals that nobody saw."""

    def one(at: Any, _: Any) -> tuple:
        for barrier in barriers:
            plgpu.barrier_wait(barrier.at[lax.rem(at, deep)])
        return ()

    lax.fori_loop(jnp.maximum(places - deep, 0), places, one, ())
