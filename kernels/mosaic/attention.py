"""The attention kernel: starts the warpgroups of a thread block in their roles, and what the
computing ones do: online softmax over the key tiles that `loader` supplies."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.kernels.merge import LOWEST
from jaxserve.kernels.mosaic.config import ACC_LAYOUT, ROW_LAYOUT, KernelConfig
from jaxserve.kernels.mosaic.keys import Keys
from jaxserve.kernels.mosaic.loader import SharedBuffers, dequantize_tiles, load_tiles
from jaxserve.kernels.mosaic.ring_send import send_pages
from jaxserve.kernels.mosaic.tiles import ROWS
from jaxserve.kernels.work_split import UNMASKED, TileSlice, WorkRange, WorkSplit

LOG2E = math.log2(math.e)


def attention(
    q_g: Any,
    pos_g: Any,
    table_g: Any,
    tiles_g: Any,
    blocks_g: Any,
    total_g: Any,
    *rest: Any,
    config: KernelConfig,
    pools: int,
    continues: bool,
    **shared: Any,
) -> None:
    """Kernel body of one thread block.

    Arguments ending in _g are refs to device memory: packed queries and their positions, the page
    table, and the arrays of `WorkSplit`. rest: `pools` arrays of the KV pages; out and lse of
    `before` if `continues`; results (out, lse, partial out, partial lse); and, with senders, where
    pages from the previous device arrive. shared: the fields of `SharedBuffers`.
    """
    received_g = None
    if config.senders:
        *rest, received_g = rest  # type: ignore[assignment]
    pools_g = rest[:pools]
    before = rest[pools : pools + 2 * continues]
    out_g, lse_g, partial_g, partial_lse_g = rest[-4:]
    wg: Any = lax.axis_index("wg")
    block: Any = lax.axis_index("block")
    computing = config.tiles.warpgroups
    blocks = config.tiles.blocks
    split = WorkSplit(tiles_g, blocks_g, total_g)
    buffers = SharedBuffers(**shared)
    work = WorkRange(split, jnp.minimum(block, blocks - 1))
    attends = block < blocks

    @pl.when(attends & (wg < computing))
    def compute() -> None:
        if config.registers:
            plgpu.set_max_registers(config.registers[0], action="increase")

        def query_tile(index: Any, _: Any) -> tuple:
            part = work.tile(index)
            keys = Keys(config, table_g, split, part.place)
            row, row0, head = config.place(split, part, wg)
            by_head = (row, head, pl.ds(row0, config.stored_rows))
            rows = (config.rows_at(row, row0, head), by_head)
            q = buffers.q.at[wg, pl.ds(0, config.stored_rows)]
            plgpu.copy_gmem_to_smem(q_g.at[rows[0]], q, buffers.q_ready.at[wg])
            pos = config.load(pos_g.at[row, pl.ds(row0, ROWS)], ROW_LAYOUT)
            begin = _initial(
                config,
                [ref.at[place] for ref, place in zip(before, rows)],
                part,
                buffers.v.shape[2],
            )
            plgpu.barrier_wait(buffers.q_ready.at[wg])
            unmasked = tiles_g[part.place, UNMASKED]
            acc, lse = _softmax(config, work, part, keys, buffers, pos, wg, unmasked, begin)
            complete = (part.begin == 0) & (part.end == part.key_tiles)

            @pl.when(complete)
            def store_result() -> None:
                # the queries' buffer is free now
                config.store(acc, out_g.at[rows[0]], buffers.q.at[wg])
                config.store(lse, lse_g.at[rows[1]], buffers.lse)

            @pl.when(~complete)
            def store_partial() -> None:
                # 0: a tile that an earlier block began; 1: one that a later block ends
                place = work.block, jnp.where(part.begin > 0, 0, 1), wg
                partial_g.at[place][...] = acc
                partial_lse_g.at[place][...] = lse

            return ()

        pl.when(wg == 1)(buffers.alternate)  # starts one step behind the other
        lax.fori_loop(0, work.query_tiles, query_tile, ())
        pl.when(wg == computing - 2)(buffers.alternate)

    @pl.when(attends & (wg == computing))
    def load() -> None:
        if config.registers:
            plgpu.set_max_registers(config.registers[1], action="decrease")
        load_tiles(config, work, split, table_g, pools_g, buffers)

    if config.tiles.narrow:

        @pl.when(attends & (wg == computing + 1))
        def dequantize() -> None:
            if config.registers:
                plgpu.set_max_registers(config.registers[2], action="decrease")
            dequantize_tiles(config, work, buffers)

    if config.senders:

        @pl.when((block >= blocks) & (wg == computing))
        def send() -> None:
            send_pages(config, block - blocks, pools_g[0], received_g, **buffers.sent)


def _initial(
    config: KernelConfig, before: list[Any], part: TileSlice, head_dim: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Initial accumulator [ROWS, H], maximum score (times log2 e) [ROWS] and sum of weights [ROWS]:
    those of no keys, or of `before` (out, lse) in the block that begins the query tile."""
    if not before:
        return (
            config.cast(jnp.zeros((ROWS, head_dim), jnp.float32), ACC_LAYOUT),
            config.cast(jnp.full((ROWS,), LOWEST, jnp.float32), ROW_LAYOUT),
            config.cast(jnp.zeros((ROWS,), jnp.float32), ROW_LAYOUT),
        )
    acc = config.load(before[0], ACC_LAYOUT)
    lse = config.load(before[1], ROW_LAYOUT)
    some = (lse > LOWEST) & (part.begin == 0)
    total = jnp.where(some, 1.0, jnp.zeros_like(lse))
    return (
        acc * lax.broadcast_in_dim(total, acc.shape, [0]),
        jnp.where(some, lse * LOG2E, jnp.full_like(lse, LOWEST)),
        total,
    )


def _softmax(
    config: KernelConfig,
    work: WorkRange,
    part: TileSlice,
    keys: Keys,
    buffers: SharedBuffers,
    pos: jax.Array,
    wg: Any,
    unmasked: Any,
    start: tuple[jax.Array, ...],
) -> tuple[jax.Array, jax.Array]:
    """Online softmax of a warpgroup's rows over the key tiles of its part of a query tile; of
    those, the first `unmasked` need no mask. Returns out [ROWS, H] and lse (natural log) [ROWS],
    f32."""
    width = config.tiles.keys

    def step(tile: Any, carry: Any, masked: bool) -> Any:
        acc, top, total = carry
        stage = lax.rem(part.offset + tile - work.low, config.tiles.stages)
        plgpu.barrier_wait(buffers.k_ready.at[stage])

        def score(ref: Any) -> jax.Array:
            plgpu.wgmma(ref, buffers.q.at[wg], buffers.k.at[stage].transpose((1, 0)))
            buffers.alternate()
            return ref[...]

        s = pl.run_scoped(score, plgpu.ACC((ROWS, width), jnp.float32))
        plgpu.barrier_arrive(buffers.k_consumed.at[stage])
        if config.inner:
            s = _tanh(s * config.inner)
        if masked:
            origins = keys.origins(tile)
            visible = keys.visible(
                lax.broadcast_in_dim(pos, s.shape, [0]),
                keys.positions(config.iota(s.shape, 1), origins),
            )
            s = jnp.where(visible, s, -jnp.inf)
        new = jnp.maximum(top, s.max(axis=1) * config.scale)
        shrink = jnp.exp2(top - new)
        p = jnp.exp2(s * config.scale - lax.broadcast_in_dim(new, s.shape, [0]))
        total = total * shrink + p.sum(axis=1)
        acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0])
        p = p.astype(buffers.q.dtype)
        if not config.interpret:  # finish the softmax before letting go of the tensor cores
            acc, new, total, p = lax.optimization_barrier((acc, new, total, p))
        plgpu.barrier_arrive(buffers.tensor_cores)
        plgpu.barrier_wait(buffers.v_ready.at[stage])
        plgpu.barrier_wait(buffers.tensor_cores)
        if masked:
            _zero_invalid(config, keys, buffers.v.at[stage], origins, wg)
        acc = _accumulate(config, acc, p, buffers, stage, wg)
        plgpu.barrier_arrive(buffers.v_consumed.at[stage])
        return acc, new, total

    whole = jnp.clip(unmasked, part.begin, part.end)
    carry = lax.fori_loop(part.begin, whole, functools.partial(step, masked=False), start)
    acc, top, total = lax.fori_loop(whole, part.end, functools.partial(step, masked=True), carry)
    some = (pos >= 0) & (total > 0)
    safe = jnp.where(some, total, 1.0)
    acc = acc * lax.broadcast_in_dim(jnp.where(some, 1.0 / safe, 0.0), acc.shape, [0])
    return acc, jnp.where(some, top * (1 / LOG2E) + jnp.log(safe), -jnp.inf)


def _tanh(x: jax.Array) -> jax.Array:
    """Computes tanh by the exponential: the device's own keeps 11 bits."""
    return 1 - 2 / (1 + jnp.exp2(x * (2 * LOG2E)))


def _accumulate(
    config: KernelConfig, acc: jax.Array, p: jax.Array, buffers: SharedBuffers, stage: Any, wg: Any
) -> jax.Array:
    """acc + p @ v on the tensor cores."""
    if not config.interpret:
        return pl.run_state(lambda ref: plgpu.wgmma(ref, p, buffers.v.at[stage]))(
            plgpu.ACC.init(acc)
        )
    buffers.p.at[wg][...] = p
    plgpu.commit_smem()

    def product(ref: Any) -> jax.Array:
        plgpu.wgmma(ref, buffers.p.at[wg], buffers.v.at[stage])
        return ref[...]

    return acc + pl.run_scoped(product, plgpu.ACC((ROWS, buffers.v.shape[2]), jnp.float32))


def _zero_invalid(
    config: KernelConfig, keys: Keys, values: Any, origins: list[Any], wg: Any
) -> None:
    """Zeroes values [keys, H] before the first position that is seen and after the last one, which
    may be another sequence's, or NaN, in memory (0 x NaN is NaN). The first warpgroup does it,
    since it multiplies first."""
    beyond = origins[-1] + config.tiles.keys - 1 > keys.last
    if config.window is not None:
        beyond |= origins[0] < keys.since

    @pl.when((wg == 0) & beyond)
    def zero() -> None:
        for row in range(0, config.tiles.keys, ROWS):
            part = values.at[pl.ds(row, ROWS)]
            x = config.load(part, ACC_LAYOUT)
            at = keys.positions(config.iota(x.shape, 0) + row, origins)
            used = at <= keys.last
            if config.window is not None:
                used &= at >= keys.since
            part[...] = jnp.where(used, x, jnp.zeros_like(x))
        plgpu.commit_smem()
