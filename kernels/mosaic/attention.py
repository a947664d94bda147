"""The kernel: keys and values are fetched by one warpgroup, online softmax by the others."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.kernels.merge import LOWEST
from jaxserve.kernels.mosaic.line import BEGIN, ENTRIES, LAST, SEEN, SLOT, Line, Part, Stretch
from jaxserve.kernels.mosaic.setting import ROW, TILE, Setting
from jaxserve.kernels.mosaic.tiles import ROWS

LOG2E = math.log2(math.e)
NEVER = 2**31 - 512                                  # a position after all others


class Keys:
    """Where the keys of a query tile are."""

    def __init__(self, setting: Setting, table: Any, line: Line, row_tile: Any):
        self.setting, self.table = setting, table
        self.slot, self.first, self.entries, self.last = (line.tile[row_tile, i] for i in (SLOT, BEGIN, ENTRIES, LAST))

    def entry(self, tile: Any, copy: int) -> tuple[Any, Any]:
        """Index of the table entry that a copy of a key tile reads, and the token of its page at which it begins."""
        tile, setting = self.first + tile, self.setting
        if setting.parts > 1:
            return lax.div(tile, setting.parts), lax.rem(tile, setting.parts) * setting.tiles.keys
        return tile * setting.per + copy, 0

    def held(self, which: int, entry: Any) -> Any:
        """Page (0) or block (1) of an entry; of the last one where it is beyond the table."""
        return self.table[which, self.slot, jnp.minimum(entry, self.table.shape[2] - 1)]

    def pages(self, tile: Any, count: int) -> tuple[Any, ...]:
        """Per copy of a key tile: its page, out of `count`; entries that do not hold have one too."""
        held = [self.held(0, self.entry(tile, copy)[0]) for copy in range(self.setting.per)]
        return tuple(jnp.clip(page, 0, count - 1) for page in held)

    def origins(self, tile: Any) -> list[Any]:
        """Per copy of a key tile: the position that column 0 would have; beyond all others where the entry does not hold."""
        out = []
        for copy in range(self.setting.per):
            entry, inside = self.entry(tile, copy)
            origin = self.held(1, entry) * self.setting.size + inside - copy * self.setting.size
            out.append(jnp.where(entry < self.entries, origin, NEVER))
        return out

    def positions(self, columns: jax.Array, origins: list[Any]) -> jax.Array:
        """Of the keys in these columns."""
        out = columns + origins[0]
        for copy, origin in enumerate(origins[1:], 1):
            out = jnp.where(columns >= copy * self.setting.size, columns + origin, out)
        return out

    def sees(self, query: jax.Array, key: jax.Array) -> jax.Array:
        window = self.setting.window
        return (key <= query) if window is None else (key <= query) & (query - key < window)


class Buffers(NamedTuple):
    """What the warpgroups of a block share."""

    q: Any                                           # [warpgroups, ROWS, H]
    k: Any                                           # [stages, keys, H]
    v: Any
    p: Any                                           # [warpgroups, ROWS, keys], or None: in registers
    lse: Any                                         # [ROWS], or None
    q_here: Any                                      # barriers
    k_here: Any
    v_here: Any
    k_free: Any
    v_free: Any
    turn: Any                                        # two warpgroups multiply by turns: one does while the other is at its softmax

    def take_turn(self) -> None:
        plgpu.barrier_arrive(self.turn)
        plgpu.barrier_wait(self.turn)


def attention(q_g, pos_g, pages_g, table_g, tile_g, block_g, total_g, *rest: Any, setting: Setting, **shared: Any) -> None:
    """One block: a warpgroup fetches keys and values, the others compute."""
    *before, out_g, lse_g, piece_g, piece_lse_g = rest
    wg, computing = lax.axis_index("wg"), setting.tiles.warpgroups
    line, buffers = Line(tile_g, block_g, total_g), Buffers(**{"p": None, "lse": None, **shared})
    stretch = Stretch(setting, line, lax.axis_index("block"))

    @pl.when(wg < computing)
    def _() -> None:
        if computing > 1 and not setting.interpret:                                  # with one there are enough for all
            plgpu.set_max_registers(240, action="increase")

        def one(index: Any, _: Any) -> tuple:
            part = stretch.part(index)
            keys, (row, row0, head) = Keys(setting, table_g, line, part.row_tile), stretch.where(part, wg)
            rows = (row, pl.ds(row0, setting.stored), head), (row, head, pl.ds(row0, setting.stored))
            plgpu.copy_gmem_to_smem(q_g.at[rows[0]], buffers.q.at[wg, pl.ds(0, setting.stored)], buffers.q_here.at[wg])
            pos = setting.load(pos_g.at[row, pl.ds(row0, ROWS)], ROW)
            begin = _begin(setting, [ref.at[place] for ref, place in zip(before, rows)], part, buffers.v.shape[2])
            plgpu.barrier_wait(buffers.q_here.at[wg])
            acc, lse = _softmax(setting, stretch, part, keys, buffers, pos, wg, tile_g[part.row_tile, SEEN], begin)
            done = (part.begin == 0) & (part.end == part.number)

            @pl.when(done)
            def whole() -> None:
                setting.store(acc, out_g.at[rows[0]], buffers.q.at[wg])                    # the queries have been used
                setting.store(lse, lse_g.at[rows[1]], buffers.lse)

            @pl.when(~done)
            def part_of_it() -> None:
                piece = stretch.block, jnp.where(part.begin > 0, 0, 1), wg           # 0 goes on with what others began
                piece_g.at[piece][...], piece_lse_g.at[piece][...] = acc, lse
            return ()

        pl.when(wg == 1)(buffers.take_turn)                                          # one step behind
        lax.fori_loop(0, stretch.number, one, ())
        pl.when(wg == computing - 2)(buffers.take_turn)

    @pl.when(wg == computing)
    def _() -> None:
        if computing > 1 and not setting.interpret:
            plgpu.set_max_registers(24, action="decrease")
        _fetch(setting, stretch, line, table_g, pages_g, buffers)


def _fetch(setting: Setting, stretch: Stretch, line: Line, table_g: Any, pages_g: Any, buffers: Buffers) -> None:
    """Keys and values of all of the stretch, as buffers become free."""
    stages, per, size, total = setting.tiles.stages, setting.per, setting.size, pages_g.shape[0]

    def one(index: Any, _: Any) -> tuple:
        part = stretch.part(index)
        keys, head = Keys(setting, table_g, line, part.row_tile), lax.div(part.heads * setting.packing.side, setting.packing.group)

        def fetch(tile: Any, ids: tuple[Any, ...]) -> tuple[Any, ...]:
            later = keys.pages(jnp.minimum(tile + 1, part.end - 1), total)            # read while this tile waits for its buffers
            at = part.place + tile - stretch.low
            stage = lax.rem(at, stages)
            inside = keys.entry(tile, 0)[1]
            for which, (buffer, here, free) in enumerate(((buffers.k, buffers.k_here, buffers.k_free),
                                                          (buffers.v, buffers.v_here, buffers.v_free))):
                @pl.when(at >= stages)
                def _() -> None:
                    plgpu.barrier_wait(free.at[stage])                               # noqa: B023 (runs at once)
                for copy, id in enumerate(ids):
                    page = pages_g.at[id, head, which]
                    source = page.at[pl.ds(inside, setting.tiles.keys)] if setting.parts > 1 else page
                    target = buffer.at[stage, pl.ds(copy * size, size)] if per > 1 else buffer.at[stage]
                    plgpu.copy_gmem_to_smem(source, target, here.at[stage])
            return later

        lax.fori_loop(part.begin, part.end, fetch, keys.pages(part.begin, total))
        return ()

    def drain(at: Any, _: Any) -> tuple:                                             # no barrier is left with arrivals that nobody saw
        plgpu.barrier_wait(buffers.k_free.at[lax.rem(at, stages)])
        plgpu.barrier_wait(buffers.v_free.at[lax.rem(at, stages)])
        return ()

    units = stretch.high - stretch.low
    lax.fori_loop(0, stretch.number, one, ())
    lax.fori_loop(jnp.maximum(units - stages, 0), units, drain, ())


def _begin(setting: Setting, before: list[Any], part: Part, head_dim: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Weighted values [ROWS, H], greatest score and sum of weights [ROWS] of no keys, or of those before the query tile's first part."""
    if not before:
        return (setting.cast(jnp.zeros((ROWS, head_dim), jnp.float32), TILE), setting.cast(jnp.full((ROWS,), LOWEST, jnp.float32), ROW),
                setting.cast(jnp.zeros((ROWS,), jnp.float32), ROW))
    acc, lse = setting.load(before[0], TILE), setting.load(before[1], ROW)
    some = (lse > LOWEST) & (part.begin == 0)
    total = jnp.where(some, 1.0, jnp.zeros_like(lse))
    return acc * lax.broadcast_in_dim(total, acc.shape, [0]), jnp.where(some, lse * LOG2E, jnp.full_like(lse, LOWEST)), total


def _softmax(setting: Setting, stretch: Stretch, part: Part, keys: Keys, buffers: Buffers, pos: jax.Array, wg: Any, seen: Any,
             start: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """Online softmax of a warpgroup's rows over its part's key tiles: out [ROWS, H] and natural-log lse [ROWS], f32."""
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
            visible = keys.sees(lax.broadcast_in_dim(pos, s.shape, [0]), keys.positions(setting.iota(s.shape, 1), origins))
            s = jnp.where(visible, s, -jnp.inf)
        new = jnp.maximum(top, s.max(axis=1) * setting.scale)
        shrink = jnp.exp2(top - new)
        p = jnp.exp2(s * setting.scale - lax.broadcast_in_dim(new, s.shape, [0]))
        total = total * shrink + p.sum(axis=1)
        acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0])
        p = p.astype(buffers.q.dtype)
        if not setting.interpret:                                                    # the softmax ends before the turn does
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


def _accumulate(setting: Setting, acc: jax.Array, p: jax.Array, buffers: Buffers, stage: Any, wg: Any) -> jax.Array:
    """acc + p v."""
    if not setting.interpret:
        return pl.run_state(lambda ref: plgpu.wgmma(ref, p, buffers.v.at[stage]))(plgpu.ACC.init(acc))
    buffers.p.at[wg][...] = p
    plgpu.commit_smem()

    def product(ref: Any) -> jax.Array:
        plgpu.wgmma(ref, buffers.p.at[wg], buffers.v.at[stage])
        return ref[...]
    return acc + pl.run_scoped(product, plgpu.ACC((ROWS, buffers.v.shape[2]), jnp.float32))


def _forget(setting: Setting, keys: Keys, values: Any, origins: list[Any], wg: Any) -> None:
    """What pages hold behind the last position may be NaN, and 0 x NaN is NaN: such values [keys, H] become 0. The first warpgroup does
    it, whose turn comes first."""
    @pl.when((wg == 0) & (origins[-1] + setting.tiles.keys - 1 > keys.last))
    def _() -> None:
        for row in range(0, setting.tiles.keys, ROWS):
            some = values.at[pl.ds(row, ROWS)]
            x = setting.load(some, TILE)
            some[...] = jnp.where(keys.positions(setting.iota(x.shape, 0) + row, origins) <= keys.last, x, jnp.zeros_like(x))
        plgpu.commit_smem()
