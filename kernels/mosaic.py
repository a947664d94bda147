"""Attention over pages on NVIDIA Hopper, written in Mosaic GPU (jax >= 0.11.2).

One kernel serves prefill and decode. A *tile* is 64 query rows of one head for each computing warpgroup of a block; the warpgroups of a
block share a kv head, and so the keys and values that another warpgroup fetches for them, page by page. Rows are the tokens of a head
where there are many of them, else tokens by query heads of one kv head (`Packing`).

Work is dealt by key tiles, not by query tiles: the key tiles of all query tiles stand in one line, and each of as many blocks as the
device runs at once takes an equal stretch of it (stream-K). So 32 new tokens against a million cached ones, and a batch of decodes of
which one has ten million, fill the machine alike. A query tile whose keys lie in one stretch is written at once; the others are written as
pieces, at most two per block, and merged afterwards.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

LOG2E = math.log2(math.e)
LOWEST = -1e30                                       # stands for -inf where a difference with -inf would give NaN
ROWS = 64                                            # of a warpgroup: what one wgmma has
NEVER = 2**30                                        # a position after all others


@dataclasses.dataclass(frozen=True)
class Tiles:
    """`keys` of a key tile, `warpgroups` that compute, `stages` of keys and values in flight, `blocks` that the device runs at once."""

    keys: int = 128
    warpgroups: int = 2
    stages: int = 2
    blocks: int = 132


class Packing(NamedTuple):
    """How queries [R, T, K, G, H] become rows [R, M, heads, H]; a kv head has `group` of these heads. Of a block's warpgroups `side` take
    different heads, and the others different rows."""

    packed: bool                                     # the G heads of a kv head are rows, token by token
    rows: int                                        # M, whole tiles
    heads: int
    group: int
    side: int


def pack(T: int, K: int, G: int, warpgroups: int) -> Packing:
    if T * G <= ROWS * warpgroups or T < ROWS:
        return Packing(True, -(-T * G // (ROWS * warpgroups)) * ROWS * warpgroups, K, 1, 1)
    side = math.gcd(G, warpgroups)
    step = ROWS * (warpgroups // side)
    return Packing(False, -(-T // step) * step, K * G, G, side)


def attend(
    q: jax.Array, q_pos: jax.Array, pages: jax.Array, table: jax.Array, rows: jax.Array, count: jax.Array,
    *, scale: float, window: int | None = None, dtype: Any = jnp.float32, tiles: Tiles | None = None, interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """As `reference.attend`, but for `out`, which is of type `dtype`. Errors: NotImplementedError, with the reason."""
    R, T, K, G, H = q.shape
    P, size = pages.shape[0], pages.shape[3]
    if tiles is None:
        tiles = Tiles(warpgroups=1, stages=4) if T * G <= ROWS else Tiles()
    check(q, pages, tiles)
    packing = pack(T, K, G, tiles.warpgroups)
    q_rows, pos = _to_rows(q.astype(pages.dtype), q_pos, packing)
    line = _line(pos, table, rows, count, P, size, window, packing, tiles)
    out, lse, pieces, piece_lse = _launch(q_rows, pos, pages, table, line, scale=scale, window=window, dtype=dtype, packing=packing,
                                          tiles=tiles, interpret=interpret)
    out, lse = _merge(out, lse, pieces, piece_lse, line, packing, tiles)
    return _from_rows(out, lse, q.shape, packing)


def check(q: jax.Array, pages: jax.Array, tiles: Tiles) -> None:
    """Errors: NotImplementedError where the kernel lacks these types or shapes."""
    H, size = pages.shape[4], pages.shape[3]
    if pages.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"pages of {pages.dtype}; the kernel multiplies bfloat16 and float16")
    if H not in (64, 128, 256):
        raise NotImplementedError(f"a head dim of {H}; the kernel has 64, 128 and 256")
    if size % 8 or (tiles.keys % size and size % tiles.keys):
        raise NotImplementedError(f"pages of {size} tokens; with key tiles of {tiles.keys} the size is a divisor or a multiple, and whole eights")


SLOT, BEGIN, NUMBER, ENTRIES, SEEN, LAST, START = range(7)          # of a query tile: row of the table, first key tile, key tiles, entries
#                                                      that hold, key tiles that all its rows see whole, last position, place in the line


class Line(NamedTuple):
    """The line of key tiles. Query tiles are numbered row tile by row tile for the first kv head (or `side` heads), then for the next."""

    tile: jax.Array                                  # [n, 7] by row tile, see below
    block: jax.Array                                 # [blocks, 4]: first unit, unit after the last, first query tile, query tiles
    total: jax.Array                                 # [1] key tiles of one kv head


def _to_rows(q: jax.Array, q_pos: jax.Array, packing: Packing) -> tuple[jax.Array, jax.Array]:
    """q [R, M, heads, H], positions [R, M] int32, -1 where there is no token."""
    R, T, K, G, H = q.shape
    if packing.packed:
        q, q_pos = q.transpose(0, 1, 3, 2, 4).reshape(R, T * G, K, H), jnp.repeat(q_pos, G, 1)
    else:
        q = q.reshape(R, T, K * G, H)
    lack = packing.rows - q.shape[1]
    return (jnp.pad(q, ((0, 0), (0, lack), (0, 0), (0, 0))), jnp.pad(q_pos, ((0, 0), (0, lack)), constant_values=-1)) if lack else (q, q_pos)


def _from_rows(out: jax.Array, lse: jax.Array, shape: tuple[int, ...], packing: Packing) -> tuple[jax.Array, jax.Array]:
    """out [R, M, heads, H], lse [R, heads, M] -> as the queries were."""
    R, T, K, G, H = shape
    lse = lse.transpose(0, 2, 1)
    if packing.packed:
        out, lse = out[:, : T * G].reshape(R, T, G, K, H), lse[:, : T * G].reshape(R, T, G, K)
        return out.transpose(0, 1, 3, 2, 4), lse.transpose(0, 1, 3, 2)
    return out[:, :T].reshape(shape), lse[:, :T].reshape(shape[:-1])


def _line(pos: jax.Array, table: jax.Array, rows: jax.Array, count: jax.Array, pages: int, size: int, window: int | None,
          packing: Packing, tiles: Tiles) -> Line:
    R, M = pos.shape
    height = ROWS * tiles.warpgroups // packing.side
    pos = pos.reshape(R, M // height, height)
    last = pos.max(2)
    first = jnp.where(pos < 0, jnp.iinfo(jnp.int32).max, pos).min(2)
    entries = jnp.where(last < 0, 0, jnp.minimum(count[:, None], last // size + 1))         # of the table that any of these rows sees
    per = max(1, tiles.keys // size)                                                 # entries of a key tile, key tiles of an entry
    parts = max(1, size // tiles.keys)
    end = -(-entries // per) * parts
    begin, seen = jnp.zeros_like(end), jnp.zeros_like(end)
    blocks = table[1][rows][:, None]                                                 # [R, 1, W]
    held = jnp.arange(table.shape[2]) < entries[..., None]
    if window is None:
        seen = (held & ((blocks + 1) * size - 1 <= first[..., None])).sum(2) // per * parts
    else:
        before = (held & ((blocks + 1) * size - 1 <= first[..., None] - window)).sum(2)
        begin = jnp.minimum(before // per * parts, jnp.maximum(end - 1, 0))
    number = jnp.maximum(end - begin, 1)                                             # one without keys is written too
    start = jnp.cumsum(number.reshape(-1)) - number.reshape(-1)
    slot = jnp.broadcast_to(rows[:, None], end.shape)
    tile = jnp.stack([x.reshape(-1) for x in (slot, begin, number, entries, seen, last)] + [start], 1).astype(jnp.int32)
    total = number.sum(dtype=jnp.int32)
    units = total * (packing.heads // packing.side)
    share = -(-units // tiles.blocks)
    low = jnp.minimum(jnp.arange(tiles.blocks, dtype=jnp.int32) * share, units)
    high = jnp.minimum(low + share, units)
    of = lambda unit: unit // total * len(tile) + jnp.searchsorted(start, unit % total, side="right", method="compare_all") - 1
    first_tile = of(low)
    tiles_of = jnp.where(high > low, of(high - 1) - first_tile + 1, 0)
    return Line(tile, jnp.stack([low, high, first_tile, tiles_of], 1).astype(jnp.int32), total[None])


def _launch(q: jax.Array, pos: jax.Array, pages: jax.Array, table: jax.Array, line: Line, *, scale: float, window: int | None, dtype: Any,
            packing: Packing, tiles: Tiles, interpret: Any) -> tuple[jax.Array, ...]:
    R, M, heads, H = q.shape
    K, size = pages.shape[1], pages.shape[3]
    wgs, keys, stages = tiles.warpgroups, tiles.keys, tiles.stages
    wide = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    smem = functools.partial(plgpu.SMEM, dtype=pages.dtype, transforms=wide)
    out_type = [
        jax.ShapeDtypeStruct((R, M, heads, H), dtype), jax.ShapeDtypeStruct((R, heads, M), jnp.float32),
        jax.ShapeDtypeStruct((tiles.blocks, 2, wgs, ROWS, H), jnp.float32), jax.ShapeDtypeStruct((tiles.blocks, 2, wgs, ROWS), jnp.float32),
    ]
    scratch = dict(
        q_s=smem((wgs, ROWS, H)), k_s=smem((stages, keys, H)), v_s=smem((stages, keys, H)),
        q_bar=plgpu.Barrier(num_barriers=wgs), k_bar=plgpu.Barrier(num_barriers=stages, num_arrivals=max(1, keys // size)),
        v_bar=plgpu.Barrier(num_barriers=stages, num_arrivals=max(1, keys // size)),
        clean=plgpu.Barrier(num_arrivals=wgs), k_free=plgpu.Barrier(num_arrivals=wgs, num_barriers=stages), v_free=plgpu.Barrier(num_arrivals=wgs, num_barriers=stages),
    )
    if interpret:
        scratch["p_s"] = smem((wgs, ROWS, keys))
    body = functools.partial(_body, scale=scale * LOG2E, window=window, packing=packing, tiles=tiles, shape=(R, M, K, H, size),
                             interpret=bool(interpret))
    return plgpu.kernel(body, out_type=out_type, grid=(tiles.blocks,), grid_names=("block",), num_threads=wgs + 1, thread_name="wg",
                        scratch_types=scratch, compiler_params=plgpu.CompilerParams(approx_math=True), interpret=interpret or None)(
        q, pos, pages, table, *line)


def _body(q_g, pos_g, pages_g, table_g, tile_g, block_g, total_g, out_g, lse_g, piece_g, piece_lse_g, *, q_s, k_s, v_s, q_bar, k_bar, v_bar,
          clean, k_free, v_free, p_s=None, scale, window, packing, tiles, shape, interpret):
    R, M, K, H, size = shape
    wgs, keys, stages, side = tiles.warpgroups, tiles.keys, tiles.stages, packing.side
    per, parts, height = max(1, keys // size), max(1, size // keys), ROWS * wgs // packing.side
    n_tiles = R * (M // height)
    block, wg = lax.axis_index("block"), lax.axis_index("wg")
    low, high, first, number, total = block_g[block, 0], block_g[block, 1], block_g[block, 2], block_g[block, 3], total_g[0]
    TILE, ROW = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)
    cast = (lambda x, _: x) if interpret else plgpu.layout_cast                      # the interpreter has no layouts
    iota = (lambda shape, axis: lax.broadcasted_iota(jnp.int32, shape, axis)) if interpret else (
        lambda shape, axis: plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=TILE))
    load = (lambda ref, _: ref[...]) if interpret else (lambda ref, layout: plgpu.load(ref, layout=layout, optimized=False))

    def segment(index):
        """One query tile's part in this block: its number among row tiles, its heads' number, its place, and its key tiles from and to."""
        at = first + index
        row_tile, heads = lax.rem(at, n_tiles), lax.div(at, n_tiles)
        place = heads * total + tile_g[row_tile, START]
        return row_tile, heads, place, jnp.maximum(low - place, 0), jnp.minimum(high - place, tile_g[row_tile, NUMBER])

    def entry(row_tile, t, i):
        """Index of the table entry of part i of a key tile, and where in its page the part begins."""
        t = tile_g[row_tile, BEGIN] + t
        return (lax.div(t, parts), lax.rem(t, parts) * keys) if parts > 1 else (t * per + i, 0)

    def positions(row_tile, t, slot, entries):
        """Per part of a key tile: position of its first key, less the part's first column; beyond all others where it does not hold."""
        out = []
        for i in range(per):
            at, inside = entry(row_tile, t, i)
            held = table_g[1, slot, jnp.minimum(at, table_g.shape[2] - 1)] * size + inside - i * size
            out.append(jnp.where(at < entries, held, NEVER))
        return out

    def spread(column, ends):
        """Positions of keys by column."""
        out = column + ends[0]
        for i in range(1, per):
            out = jnp.where(column >= i * size, column + ends[i], out)
        return out

    def seen(query, key):
        return (key <= query) if window is None else (key <= query) & (query - key < window)

    def forget(values, ends, last):
        """What pages hold behind the last position may be NaN, and 0 x NaN is NaN: such rows become 0."""
        @pl.when(ends[-1] + keys - 1 > last)
        def _():
            mine = values.at[pl.ds(wg * (keys // wgs), keys // wgs)]
            x = load(mine, TILE)
            at = spread(iota(x.shape, 0) + wg * (keys // wgs), ends)
            mine[...] = jnp.where(at <= last, x, jnp.zeros_like(x))
            plgpu.commit_smem()
            plgpu.barrier_arrive(clean)
            plgpu.barrier_wait(clean)

    @pl.when(wg < wgs)
    def _compute():
        if not interpret:
            plgpu.set_max_registers(240 if wgs == 2 else 232, action="increase")

        def one(index, _):
            row_tile, heads, place, begin, end = segment(index)
            row = lax.div(row_tile, M // height)
            row0 = lax.rem(row_tile, M // height) * height + lax.div(wg, side) * ROWS
            head = heads * side + lax.rem(wg, side)
            plgpu.copy_gmem_to_smem(q_g.at[row, pl.ds(row0, ROWS), head], q_s.at[wg], q_bar.at[wg])
            pos = load(pos_g.at[row, pl.ds(row0, ROWS)], ROW)
            entries, last, slot = tile_g[row_tile, ENTRIES], tile_g[row_tile, LAST], tile_g[row_tile, SLOT]
            plgpu.barrier_wait(q_bar.at[wg])

            def step(t, carry, masked):
                acc, top, sum_ = carry
                stage = lax.rem(place + t - low, stages)
                plgpu.barrier_wait(k_bar.at[stage])

                def scores(ref):
                    plgpu.wgmma(ref, q_s.at[wg], k_s.at[stage].transpose((1, 0)))
                    return ref[...]
                s = pl.run_scoped(scores, plgpu.ACC((ROWS, keys), jnp.float32)) * scale
                plgpu.barrier_arrive(k_free.at[stage])
                plgpu.barrier_wait(v_bar.at[stage])
                if masked:
                    ends = positions(row_tile, t, slot, entries)
                    s = jnp.where(seen(lax.broadcast_in_dim(pos, s.shape, [0]), spread(iota(s.shape, 1), ends)), s, -jnp.inf)
                    forget(v_s.at[stage], ends, last)
                new = jnp.maximum(top, s.max(axis=1))
                shrink = jnp.exp2(top - new)
                p = jnp.exp2(s - lax.broadcast_in_dim(new, s.shape, [0]))
                sum_ = sum_ * shrink + p.sum(axis=1)
                p16 = p.astype(q_s.dtype)

                def values(ref):
                    if p_s is None:
                        plgpu.wgmma(ref, p16, v_s.at[stage])
                    else:                                                            # the interpreter multiplies from SMEM only
                        p_s.at[wg][...] = p16
                        plgpu.commit_smem()
                        plgpu.wgmma(ref, p_s.at[wg], v_s.at[stage])
                    return ref[...]
                piece = pl.run_scoped(values, plgpu.ACC((ROWS, H), jnp.float32))
                plgpu.barrier_arrive(v_free.at[stage])
                return acc * lax.broadcast_in_dim(shrink, acc.shape, [0]) + piece, new, sum_

            start = (cast(jnp.zeros((ROWS, H), jnp.float32), TILE), cast(jnp.full((ROWS,), LOWEST, jnp.float32), ROW),
                     cast(jnp.zeros((ROWS,), jnp.float32), ROW))
            whole = jnp.clip(tile_g[row_tile, SEEN], begin, end)
            carry = lax.fori_loop(begin, whole, functools.partial(step, masked=False), start)
            acc, top, sum_ = lax.fori_loop(whole, end, functools.partial(step, masked=True), carry)
            there = (pos >= 0) & (sum_ > 0)
            safe = jnp.where(there, sum_, 1.0)
            acc = acc * lax.broadcast_in_dim(jnp.where(there, 1.0 / safe, 0.0), acc.shape, [0])
            lse = jnp.where(there, top * (1 / LOG2E) + jnp.log(safe), -jnp.inf)
            done = (begin == 0) & (end == tile_g[row_tile, NUMBER])

            @pl.when(done)
            def _():
                out_g.at[row, pl.ds(row0, ROWS), head][...] = acc.astype(out_g.dtype)
                lse_g.at[row, head, pl.ds(row0, ROWS)][...] = lse

            @pl.when(~done)
            def _():
                which = jnp.where(begin > 0, 0, 1)
                piece_g.at[block, which, wg][...] = acc
                piece_lse_g.at[block, which, wg][...] = lse
            return ()

        lax.fori_loop(0, number, one, ())

    @pl.when(wg == wgs)
    def _fetch():
        if not interpret:
            plgpu.set_max_registers(24 if wgs == 2 else 40, action="decrease")

        def one(index, _):
            row_tile, heads, place, begin, end = segment(index)
            head = lax.div(heads * side, packing.group)
            slot = tile_g[row_tile, SLOT]

            def fetch(t, _):
                stage = lax.rem(place + t - low, stages)
                for which, free, bar, to in ((0, k_free, k_bar, k_s), (1, v_free, v_bar, v_s)):
                    @pl.when(place + t - low >= stages)
                    def _():
                        plgpu.barrier_wait(free.at[stage])
                    for i in range(per):
                        at, inside = entry(row_tile, t, i)
                        page = jnp.clip(table_g[0, slot, jnp.minimum(at, table_g.shape[2] - 1)], 0, pages_g.shape[0] - 1)
                        from_ = pages_g.at[page, head, which, pl.ds(inside, keys // per)] if parts > 1 else pages_g.at[page, head, which]
                        plgpu.copy_gmem_to_smem(from_, to.at[stage, pl.ds(i * size, size)] if per > 1 else to.at[stage], bar.at[stage])
                return ()
            lax.fori_loop(begin, end, fetch, ())
            return ()
        lax.fori_loop(0, number, one, ())

        def drain(at, _):                                                            # a barrier may not be left with arrivals nobody saw
            plgpu.barrier_wait(k_free.at[lax.rem(at, stages)])
            plgpu.barrier_wait(v_free.at[lax.rem(at, stages)])
            return ()
        lax.fori_loop(jnp.maximum(high - low - stages, 0), high - low, drain, ())


def _merge(out: jax.Array, lse: jax.Array, pieces: jax.Array, piece_lse: jax.Array, line: Line, packing: Packing,
           tiles: Tiles) -> tuple[jax.Array, jax.Array]:
    """The query tiles whose keys lie in several stretches of the line, merged and put where they belong."""
    R, M, heads, H = out.shape
    blocks, wgs, side = tiles.blocks, tiles.warpgroups, packing.side
    height = ROWS * wgs // side
    low, high, first, number = line.block.T
    share = jnp.maximum(high[0] - low[0], 1)

    def place(at):
        return at // len(line.tile) * line.total[0] + line.tile[at % len(line.tile), START]

    final = first + jnp.maximum(number, 1) - 1
    busy = number > 0
    head = busy & (place(first) < low)                                               # the block goes on with what others began
    tail = busy & (place(final) >= low) & (place(final) + line.tile[final % len(line.tile), NUMBER] > high)
    group = jnp.stack([jnp.where(head, place(first) // share, blocks), jnp.where(tail, jnp.arange(blocks), blocks)], 1).reshape(-1)
    weigh = piece_lse.reshape(blocks * 2, wgs, ROWS)
    top = jnp.maximum(jax.ops.segment_max(weigh, group, blocks), LOWEST)
    weight = jnp.exp(weigh - top[group])
    sum_ = jax.ops.segment_sum(weight, group, blocks)
    safe = jnp.where(sum_ > 0, sum_, 1)
    merged = jax.ops.segment_sum(pieces.reshape(blocks * 2, wgs, ROWS, H) * weight[..., None], group, blocks) / safe[..., None]
    row_tile, wg = final % len(line.tile), jnp.arange(wgs)
    row = jnp.where(tail, row_tile // (M // height), R)[:, None, None]
    at = (row_tile % (M // height) * height)[:, None, None] + (wg // side * ROWS)[None, :, None] + jnp.arange(ROWS)
    of = (final // len(line.tile) * side)[:, None, None] + (wg % side)[None, :, None]
    out = out.at[row, at, of].set(merged.astype(out.dtype), mode="drop", unique_indices=True)
    return out, lse.at[row, of, at].set(jnp.where(sum_ > 0, top + jnp.log(safe), -jnp.inf), mode="drop", unique_indices=True)
