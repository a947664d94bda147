"""The kernel: each warpgroup of a block has its part. Here is what those that compute do: online
softmax over what the others supply."""

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
from jaxserve.kernels.mosaic.config import ROW, TILE, Setting
from jaxserve.kernels.mosaic.keys import Keys
from jaxserve.kernels.mosaic.loader import Buffers, fetch, widen
from jaxserve.kernels.mosaic.ring_send import send_on
from jaxserve.kernels.mosaic.tiles import ROWS
from jaxserve.kernels.mosaic.work_split import SEEN, Stretch, WorkPart, WorkSplit

LOG2E = math.log2(math.e)


def attention(
    q_g,
    pos_g,
    table_g,
    tile_g,
    block_g,
    total_g,
    *rest: Any,
    setting: Setting,
    pools: int,
    continues: bool,
    **shared: Any,
) -> None:
    """One block. rest: arrays of the pool of pages, `before`, results, and where pages that are
    sent here arrive."""
    received_g, results = (rest[-1], rest[-5:-1]) if setting.senders else (None, rest[-4:])
    pools_g, before, (out_g, lse_g, piece_g, piece_lse_g) = (
        rest[:pools],
        rest[pools : pools + 2 * continues],
        results,
    )
    wg: Any = lax.axis_index("wg")
    block: Any = lax.axis_index("block")
    computing = setting.tiles.warpgroups
    blocks = setting.tiles.blocks
    line = WorkSplit(tile_g, block_g, total_g)
    buffers = Buffers(**shared)
    stretch = Stretch(setting, line, jnp.minimum(block, blocks - 1))
    attends = block < blocks

    @pl.when(attends & (wg < computing))
    def _() -> None:
        if setting.registers:
            plgpu.set_max_registers(setting.registers[0], action="increase")

        def one(index: Any, _: Any) -> tuple:
            part = stretch.part(index)
            keys, (row, row0, head) = (
                Keys(setting, table_g, line, part.row_tile),
                stretch.where(part, wg),
            )
            rows = (
                (row, pl.ds(row0, setting.stored), head),
                (row, head, pl.ds(row0, setting.stored)),
            )
            plgpu.copy_gmem_to_smem(
                q_g.at[rows[0]], buffers.q.at[wg, pl.ds(0, setting.stored)], buffers.q_here.at[wg]
            )
            pos = setting.load(pos_g.at[row, pl.ds(row0, ROWS)], ROW)
            begin = _begin(
                setting,
                [ref.at[place] for ref, place in zip(before, rows)],
                part,
                buffers.v.shape[2],
            )
            plgpu.barrier_wait(buffers.q_here.at[wg])
            acc, lse = _softmax(
                setting, stretch, part, keys, buffers, pos, wg, tile_g[part.row_tile, SEEN], begin
            )
            done = (part.begin == 0) & (part.end == part.number)

            @pl.when(done)
            def whole() -> None:
                # the queries have been used
                setting.store(acc, out_g.at[rows[0]], buffers.q.at[wg])
                setting.store(lse, lse_g.at[rows[1]], buffers.lse)

            @pl.when(~done)
            def part_of_it() -> None:
                # 0 goes on with what others began
                piece = stretch.block, jnp.where(part.begin > 0, 0, 1), wg
                piece_g.at[piece][...] = acc
                piece_lse_g.at[piece][...] = lse

            return ()

        pl.when(wg == 1)(buffers.take_turn)  # one step behind
        lax.fori_loop(0, stretch.number, one, ())
        pl.when(wg == computing - 2)(buffers.take_turn)

    @pl.when(attends & (wg == computing))
    def _() -> None:
        if setting.registers:
            plgpu.set_max_registers(setting.registers[1], action="decrease")
        fetch(setting, stretch, line, table_g, pools_g, buffers)

    if setting.tiles.narrow:

        @pl.when(attends & (wg == computing + 1))
        def _() -> None:
            if setting.registers:
                plgpu.set_max_registers(setting.registers[2], action="decrease")
            widen(setting, stretch, buffers)

    if setting.senders:

        @pl.when((block >= blocks) & (wg == computing))
        def send() -> None:
            send_on(setting, block - blocks, pools_g[0], received_g, **buffers.sent)


def _begin(
    setting: Setting, before: list[Any], part: WorkPart, head_dim: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Weighted values [ROWS, H], greatest score and sum of weights [ROWS] of no keys, or of those
    before the query tile's first part."""
    if not before:
        return (
            setting.cast(jnp.zeros((ROWS, head_dim), jnp.float32), TILE),
            setting.cast(jnp.full((ROWS,), LOWEST, jnp.float32), ROW),
            setting.cast(jnp.zeros((ROWS,), jnp.float32), ROW),
        )
    acc = setting.load(before[0], TILE)
    lse = setting.load(before[1], ROW)
    some = (lse > LOWEST) & (part.begin == 0)
    total = jnp.where(some, 1.0, jnp.zeros_like(lse))
    return (
        acc * lax.broadcast_in_dim(total, acc.shape, [0]),
        jnp.where(some, lse * LOG2E, jnp.full_like(lse, LOWEST)),
        total,
    )


def _softmax(
    setting: Setting,
    stretch: Stretch,
    part: WorkPart,
    keys: Keys,
    buffers: Buffers,
    pos: jax.Array,
    wg: Any,
    seen: Any,
    start: tuple[jax.Array, ...],
) -> tuple[jax.Array, jax.Array]:
    """Online softmax of a warpgroup's rows over its part's key tiles: out [ROWS, H] and natural-log
    lse [ROWS], f32."""
    width = setting.tiles.keys

    def step(tile: Any, carry: Any, masked: bool) -> Any:
        acc, top, total = carry
        stage = lax.rem(part.place + tile - stretch.low, setting.tiles.stages)
        plgpu.barrier_wait(buffers.k_here.at[stage])

        def score(ref: Any) -> jax.Array:
            plgpu.wgmma(ref, buffers.q.at[wg], buffers.k.at[stage].transpose((1, 0)))
            buffers.take_turn()
            return ref[...]

        s = pl.run_scoped(score, plgpu.ACC((ROWS, width), jnp.float32))
        plgpu.barrier_arrive(buffers.k_free.at[stage])
        if masked:
            origins = keys.origins(tile)
            visible = keys.sees(
                lax.broadcast_in_dim(pos, s.shape, [0]),
                keys.positions(setting.iota(s.shape, 1), origins),
            )
            s = jnp.where(visible, s, -jnp.inf)
        new = jnp.maximum(top, s.max(axis=1) * setting.scale)
        shrink = jnp.exp2(top - new)
        p = jnp.exp2(s * setting.scale - lax.broadcast_in_dim(new, s.shape, [0]))
        total = total * shrink + p.sum(axis=1)
        acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0])
        p = p.astype(buffers.q.dtype)
        if not setting.interpret:  # the softmax ends before the turn does
            acc, new, total, p = lax.optimization_barrier((acc, new, total, p))
        plgpu.barrier_arrive(buffers.turn)
        plgpu.barrier_wait(buffers.v_here.at[stage])
        plgpu.barrier_wait(buffers.turn)
        if masked:
            _forget(setting, keys, buffers.v.at[stage], origins, wg)
        acc = _accumulate(setting, acc, p, buffers, stage, wg)
        plgpu.barrier_arrive(buffers.v_free.at[stage])
        return acc, new, total

    whole = jnp.clip(seen, part.begin, part.end)
    carry = lax.fori_loop(part.begin, whole, functools.partial(step, masked=False), start)
    acc, top, total = lax.fori_loop(whole, part.end, functools.partial(step, masked=True), carry)
    some = (pos >= 0) & (total > 0)
    safe = jnp.where(some, total, 1.0)
    acc = acc * lax.broadcast_in_dim(jnp.where(some, 1.0 / safe, 0.0), acc.shape, [0])
    return acc, jnp.where(some, top * (1 / LOG2E) + jnp.log(safe), -jnp.inf)


def _accumulate(
    setting: Setting, acc: jax.Array, p: jax.Array, buffers: Buffers, stage: Any, wg: Any
) -> jax.Array:
    """acc + p v."""
    if not setting.interpret:
        return pl.run_state(lambda ref: plgpu.wgmma(ref, p, buffers.v.at[stage]))(
            plgpu.ACC.init(acc)
        )
    buffers.p.at[wg][...] = p
    plgpu.commit_smem()

    def product(ref: Any) -> jax.Array:
        plgpu.wgmma(ref, buffers.p.at[wg], buffers.v.at[stage])
        return ref[...]

    return acc + pl.run_scoped(product, plgpu.ACC((ROWS, buffers.v.shape[2]), jnp.float32))


def _forget(setting: Setting, keys: Keys, values: Any, origins: list[Any], wg: Any) -> None:
    """What pages hold behind the last position may be NaN, and 0 x NaN is NaN: such values [keys,
    H] become 0. The first warpgroup does it, whose turn comes first."""

    @pl.when((wg == 0) & (origins[-1] + setting.tiles.keys - 1 > keys.last))
    def _() -> None:
        for row in range(0, setting.tiles.keys, ROWS):
            some = values.at[pl.ds(row, ROWS)]
            x = setting.load(some, TILE)
            some[...] = jnp.where(
                keys.positions(setting.iota(x.shape, 0) + row, origins) <= keys.last,
                x,
                jnp.zeros_like(x),
            )
        plgpu.commit_smem()
