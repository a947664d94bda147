"""Producer warpgroups of the attention kernel: one loads keys and values page by page into shared
memory; with 8-bit pages, another dequantises them to the queries' 16-bit type for the tensor
cores."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.kernels.mosaic.config import FP8_LAYOUT, FP8_ROW_LAYOUT, KernelConfig
from jaxserve.kernels.mosaic.keys import Keys
from jaxserve.kernels.mosaic.tiles import ROWS
from jaxserve.kernels.work_split import WorkRange, WorkSplit


class SharedBuffers(NamedTuple):
    """Shared memory and barriers of a thread block.

    `*_ready` barriers say that a buffer is filled, `*_consumed` ones that it may be overwritten.
    `tensor_cores` is where computing warpgroups alternate: one multiplies while the other is at its
    softmax. The order of the names is the order in shared memory.
    """

    q: Any  # [warpgroups, ROWS, H]
    k: Any  # [stages, keys, H]
    v: Any  # [stages, keys, H]
    q_ready: Any
    k_ready: Any
    v_ready: Any
    k_consumed: Any
    v_consumed: Any
    tensor_cores: Any
    narrow: Any = None  # [narrow, keys, H] of 8 bits, keys and values alternating
    scales: Any = None  # [narrow, keys]
    narrow_ready: Any = None
    narrow_consumed: Any = None
    p: Any = None  # [warpgroups, ROWS, keys], in the interpreter only; else in registers
    lse: Any = None  # [ROWS], for partial tiles
    sent: Any = None  # of a block that sends pages: see `ring_send`

    @property
    def keys_and_values(self) -> tuple[Any, ...]:
        """For keys and for values: (buffers, ready, consumed)."""
        return (
            ((self.k,), self.k_ready, self.k_consumed),
            ((self.v,), self.v_ready, self.v_consumed),
        )

    def alternate(self) -> None:
        """Lets the other computing warpgroup use the tensor cores, and waits for it."""
        plgpu.barrier_arrive(self.tensor_cores)
        plgpu.barrier_wait(self.tensor_cores)


def load_tiles(
    config: KernelConfig,
    work: WorkRange,
    split: WorkSplit,
    table_g: Any,
    pools: tuple[Any, ...],
    buffers: SharedBuffers,
) -> None:
    """Loads the key tiles of a block's work, as buffers become free. pools: KV pages, and their
    scales if they are of 8 bits."""
    tiles = config.tiles
    size = config.page_size
    total = pools[0].shape[0]
    quantized = bool(tiles.narrow)
    stages = tiles.narrow or tiles.stages
    kinds = buffers.keys_and_values
    if quantized:
        kinds = (
            ((buffers.narrow, buffers.scales), buffers.narrow_ready, buffers.narrow_consumed),
        ) * 2

    def query_tile(index: Any, _: Any) -> tuple:
        part = work.tile(index)
        keys = Keys(config, table_g, split, part.place)
        head = lax.div(part.heads * config.packing.side, config.packing.group)

        def key_tile(tile: Any, ids: tuple[Any, ...]) -> tuple[Any, ...]:
            # look up the next tile's pages while this one waits for its buffers
            next_ids = keys.pages(jnp.minimum(tile + 1, part.end - 1), total)
            at = part.offset + tile - work.low
            inside = keys.entry(tile, 0)[1]
            for which, (targets, ready, consumed) in enumerate(kinds):
                place = 2 * at + which if quantized else at
                stage = lax.rem(place, stages)
                pl.when(place >= stages)(
                    lambda: plgpu.barrier_wait(consumed.at[stage])  # noqa: B023 (runs at once)
                )
                for copy, id in enumerate(ids):
                    for pool, target in zip(pools, targets):
                        source = pool.at[id, head, which]
                        if config.work.tiles_per_page > 1:
                            source = source.at[pl.ds(inside, tiles.keys)]
                        buffer = target.at[stage]
                        if config.work.copies_per_tile > 1:
                            buffer = target.at[stage, pl.ds(copy * size, size)]
                        plgpu.copy_gmem_to_smem(source, buffer, ready.at[stage])
            return next_ids

        lax.fori_loop(part.begin, part.end, key_tile, keys.pages(part.begin, total))
        return ()

    units = work.high - work.low
    lax.fori_loop(0, work.query_tiles, query_tile, ())
    if quantized:
        _drain(2 * units, stages, (buffers.narrow_consumed,))
    else:
        _drain(units, stages, (buffers.k_consumed, buffers.v_consumed))


def dequantize_tiles(config: KernelConfig, work: WorkRange, buffers: SharedBuffers) -> None:
    """Dequantises the key tiles of a block's work as they are loaded, exactly, to the queries'
    type."""
    tiles = config.tiles
    units = work.high - work.low

    def key_tile(at: Any, _: Any) -> tuple:
        stage = lax.rem(at, tiles.stages)
        for which, ((target,), ready, consumed) in enumerate(buffers.keys_and_values):
            narrow_stage = lax.rem(2 * at + which, tiles.narrow)
            plgpu.barrier_wait(buffers.narrow_ready.at[narrow_stage])
            pl.when(at >= tiles.stages)(
                lambda: plgpu.barrier_wait(consumed.at[stage])  # noqa: B023 (runs at once)
            )
            for row in range(0, tiles.keys, ROWS):
                rows = pl.ds(row, ROWS)
                x = config.load(buffers.narrow.at[narrow_stage, rows], FP8_LAYOUT).astype(
                    jnp.float32
                )
                scale = config.load(buffers.scales.at[narrow_stage, rows], FP8_ROW_LAYOUT)
                scale = lax.broadcast_in_dim(scale.astype(jnp.float32), x.shape, [0])
                target.at[stage, rows][...] = (x * scale).astype(target.dtype)
            plgpu.commit_smem()
            plgpu.barrier_arrive(ready.at[stage])
            plgpu.barrier_arrive(buffers.narrow_consumed.at[narrow_stage])
        return ()

    lax.fori_loop(0, units, key_tile, ())
    _drain(units, tiles.stages, (buffers.k_consumed, buffers.v_consumed))


def _drain(loads: Any, stages: int, barriers: tuple[Any, ...]) -> None:
    """Waits for the last arrivals on these barriers, which must not end with any unseen."""

    def wait(at: Any, _: Any) -> tuple:
        for barrier in barriers:
            plgpu.barrier_wait(barrier.at[lax.rem(at, stages)])
        return ()

    lax.fori_loop(jnp.maximum(loads - stages, 0), loads, wait, ())
