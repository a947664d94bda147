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

from jaxserve.kernels.table import below

LOG2E = math.log2(math.e)
TILE, ROW = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)          # of registers: [rows, columns], [rows]
LOWEST = -1e30                                       # stands for -inf where a difference with -inf would give NaN
ROWS = 64                                            # of a warpgroup: what one wgmma has
SHARED = 220 * 1024                                  # bytes of shared memory for tiles: a block has 227 KiB, and some for barriers
NEVER = 2**31 - 512                                    # a position after all others


@dataclasses.dataclass(frozen=True)
class Tiles:
    """`keys` of a key tile, `warpgroups` that compute (1 or 2), `stages` of key tiles in flight, `blocks` that the device runs at once."""

    keys: int
    warpgroups: int
    stages: int
    blocks: int = 132                                # H100 SXM, H200

    def shared_bytes(self, head_dim: int) -> int:
        """Shared memory of a block, without barriers, where results are of the pages' type."""
        return 2 * head_dim * (self.warpgroups * ROWS + 2 * self.stages * self.keys)


def default_tiles(rows: int, head_dim: int, blocks: int = 132) -> Tiles:
    """For so many query rows of a kv head: one warpgroup and deep buffers where one tile holds them, since bytes are what takes time."""
    tiles = Tiles(keys=128 if head_dim <= 128 else 64, warpgroups=1 if rows <= ROWS else 2, stages=2, blocks=blocks)
    deeper = (dataclasses.replace(tiles, stages=stages) for stages in (6, 5, 4, 3))
    return next((tiles for tiles in deeper if tiles.warpgroups == 1 and tiles.shared_bytes(head_dim) <= SHARED), tiles)


class Packing(NamedTuple):
    """How queries [R, T, K, G, H] become rows [R, M, heads, H]; a kv head has `group` of these heads. Of a block's warpgroups `side` take
    different heads, and the others different rows."""

    packed: bool                                     # the G heads of a kv head are rows, token by token
    rows: int                                        # M, whole tiles, or whole eights where that is less than one
    heads: int
    group: int
    side: int


def pack(T: int, K: int, G: int, warpgroups: int, thin: bool) -> Packing:
    """`thin`: less than a tile may be less than ROWS; results are of the queries' type then, and go through their buffer."""
    if thin and T * G <= ROWS - 8:
        return Packing(True, -(-T * G // 8) * 8, K, 1, 1)
    if T < ROWS:
        return Packing(True, -(-T * G // (ROWS * warpgroups)) * ROWS * warpgroups, K, 1, 1)
    side = math.gcd(G, warpgroups)
    step = ROWS * (warpgroups // side)
    return Packing(False, -(-T // step) * step, K * G, G, side)


def attend(
    q: jax.Array, q_pos: jax.Array, pages: jax.Array, table: jax.Array, rows: jax.Array, count: jax.Array,
    *, scale: float, window: int | None = None, dtype: Any = jnp.float32, before: tuple[jax.Array, jax.Array] | None = None,
    tiles: Tiles | None = None, interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """As `reference.attend`, but for `out`, which is of type `dtype`; merged with `before`, an (out, lse) over other keys, where there is
    one: a hop of a ring. Errors: NotImplementedError, with the reason."""
    R, T, K, G, H = q.shape
    P, size = pages.shape[0], pages.shape[3]
    tiles = default_tiles(T * G, H) if tiles is None else tiles
    check(pages, tiles)
    packing = pack(T, K, G, tiles.warpgroups, thin=before is None and jnp.dtype(dtype) == pages.dtype)
    tall = packing._replace(rows=max(packing.rows, ROWS * tiles.warpgroups // packing.side))
    q_rows, pos = _to_rows(q.astype(pages.dtype), packing), _to_rows(q_pos[..., None, None, None], tall, -1, G)[..., 0, 0]
    earlier = () if before is None else (_to_rows(before[0].astype(jnp.float32), packing),
                                         _to_rows(before[1][..., None], packing, -jnp.inf)[..., 0].transpose(0, 2, 1))
    line = _line(pos, table, rows, count, P, size, window, packing, tiles)
    setting = Setting(scale * LOG2E, window, packing, tiles, R, size, bool(interpret))
    return _from_rows(*_launch(q_rows, pos, pages, table, line, earlier, setting, dtype, interpret), q.shape, packing)


def check(pages: jax.Array | jax.ShapeDtypeStruct, tiles: Tiles | None = None) -> None:
    """Errors: NotImplementedError where the kernel lacks these types or shapes."""
    H, size = pages.shape[4], pages.shape[3]
    tiles = default_tiles(ROWS, H) if tiles is None else tiles
    if pages.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"pages of {pages.dtype}; the kernel multiplies bfloat16 and float16")
    if H not in (64, 128, 256):
        raise NotImplementedError(f"a head dim of {H}; the kernel has 64, 128 and 256")
    if size % 8 or (tiles.keys % size and size % tiles.keys):
        raise NotImplementedError(f"pages of {size} tokens; they must be whole eights that divide key tiles of {tiles.keys}, or multiples")


SLOT, BEGIN, NUMBER, ENTRIES, SEEN, LAST, START = range(7)          # of a query tile: row of the table, first key tile, key tiles, entries
#                                                      that hold, key tiles that all its rows see whole, last position, place in the line


class Line(NamedTuple):
    """The line of key tiles. Query tiles are numbered row tile by row tile for the first kv head (or `side` heads), then for the next."""

    tile: jax.Array                                  # [n, 7] by row tile, see below
    block: jax.Array                                 # [blocks, 4]: first unit, unit after the last, first query tile, query tiles
    total: jax.Array                                 # [1] key tiles of one kv head


def _to_rows(x: jax.Array, packing: Packing, fill: float = 0, repeat: int = 1) -> jax.Array:
    """x [R, T, K, G, H] -> [R, M, heads, H]. What all heads have alike has K = G = 1, and where they are rows is repeated for each."""
    R, T, K, G, H = x.shape
    if packing.packed:
        x = jnp.repeat(x, repeat, 3).transpose(0, 1, 3, 2, 4).reshape(R, -1, K, H)
    else:
        x = x.reshape(R, T, K * G, H)
    lack = packing.rows - x.shape[1]
    return jnp.pad(x, ((0, 0), (0, lack), (0, 0), (0, 0)), constant_values=fill) if lack else x


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
    before = lambda pos: below(table[1], rows, entries, jnp.maximum(pos, 0) // size) // per * parts    # key tiles wholly before a position
    if window is None:
        seen = before(jnp.minimum(first, last) + 1)
    else:
        begin = jnp.minimum(before(jnp.minimum(first, last) - window + 1), jnp.maximum(end - 1, 0))
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


def _launch(q: jax.Array, pos: jax.Array, pages: jax.Array, table: jax.Array, line: Line, before: tuple[jax.Array, ...], setting: Setting,
            dtype: Any, interpret: Any) -> tuple[jax.Array, jax.Array]:
    """out [R, M, heads, H], lse [R, heads, M], as those of `before`, if any."""
    R, M, heads, H = q.shape
    tiles, blocks = setting.tiles, setting.tiles.blocks
    wgs, keys, stages = tiles.warpgroups, tiles.keys, tiles.stages
    smem = functools.partial(plgpu.SMEM, dtype=pages.dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))
    here = plgpu.Barrier(num_barriers=stages, num_arrivals=setting.per)
    free = plgpu.Barrier(num_barriers=stages, num_arrivals=wgs)
    shared = dict(q=smem((wgs, ROWS, H)), k=smem((stages, keys, H)), v=smem((stages, keys, H)), q_here=plgpu.Barrier(num_barriers=wgs),
                  k_here=here, v_here=here, k_free=free, v_free=free, turn=plgpu.Barrier(num_arrivals=wgs))
    if setting.interpret:
        shared["p"] = smem((wgs, ROWS, keys))
    if setting.thin:
        shared["lse"] = plgpu.SMEM((ROWS,), jnp.float32)
    out_type = [jax.ShapeDtypeStruct(shape, type) for shape, type in (
        ((R, M, heads, H), dtype), ((R, heads, M), jnp.float32), ((blocks, 2, wgs, ROWS, H), jnp.float32),
        ((blocks, 2, wgs, ROWS), jnp.float32))]
    run = _kernel(functools.partial(_attention, setting=setting), out_type, shared, {"block": blocks}, wgs + 1, interpret)
    out, lse, *pieces = run(q, pos, pages, table, *line, *before)
    out, lse = jax.new_ref(out), jax.new_ref(lse)
    staging = dict(out=plgpu.SMEM((ROWS, 64), dtype), lse=plgpu.SMEM((ROWS,), jnp.float32)) if setting.thin else {}
    join = _kernel(functools.partial(_join, setting=setting), (), staging, {"block": blocks, "of": wgs, "column": H // 64}, 1, interpret)
    join(*pieces, *line, out, lse)
    return jax.freeze(out), jax.freeze(lse)


def _kernel(body: Any, out_type: Any, scratch: dict[str, Any], grid: dict[str, int], threads: int, interpret: Any) -> Any:
    """A Mosaic kernel; unlike plgpu.kernel it takes refs among its arguments, which it may write in place."""
    mesh = plgpu.Mesh(grid=tuple(grid.values()), grid_names=tuple(grid), num_threads=threads, thread_name="wg")

    def scoped(*refs: Any) -> None:
        pl.run_scoped(functools.partial(body, *refs), collective_axes="wg", **scratch)

    return pl.kernel(scoped, out_type=out_type, mesh=mesh, compiler_params=plgpu.CompilerParams(approx_math=True),
                     interpret=interpret or False)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a kernel is compiled for."""

    scale: float                                     # of scores, times log2 e
    window: int | None
    packing: Packing
    tiles: Tiles
    rows: int                                        # R
    size: int                                        # C
    interpret: bool

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

    # What the interpreter lacks: layouts, and products of registers.

    def cast(self, x: jax.Array, layout: Any) -> jax.Array:
        return x if self.interpret else plgpu.layout_cast(x, layout)

    def iota(self, shape: tuple[int, ...], axis: int) -> jax.Array:
        if self.interpret:
            return lax.broadcasted_iota(jnp.int32, shape, axis)
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=TILE)

    def load(self, ref: Any, layout: Any) -> jax.Array:
        return ref[...] if self.interpret else plgpu.load(ref, layout=layout, optimized=False)    # type: ignore[call-arg]


class Stretch:
    """The stretch of the line that block `block` takes, as the kernels see it. Units are key tiles of one query tile."""

    def __init__(self, setting: Setting, line: Line, block: Any):
        self.setting, self.line, self.block = setting, line, block
        self.low, self.high, self.first, self.number = (line.block[block, i] for i in range(4))

    def part(self, index: Any) -> Part:
        """Of query tile `index` of this block."""
        setting, at = self.setting, self.first + index
        tiles = setting.rows * setting.across
        row_tile, heads = lax.rem(at, tiles), lax.div(at, tiles)
        place = heads * self.line.total[0] + self.line.tile[row_tile, START]
        number = self.line.tile[row_tile, NUMBER]
        return Part(row_tile, heads, place, number, jnp.maximum(self.low - place, 0), jnp.minimum(self.high - place, number))

    def where(self, part: Part, wg: Any) -> tuple[Any, Any, Any]:
        """Row of R, first of the M rows, and head, of a warpgroup."""
        across, side = self.setting.across, self.setting.packing.side
        row0 = lax.rem(part.row_tile, across) * self.setting.height + lax.div(wg, side) * ROWS
        return lax.div(part.row_tile, across), row0, part.heads * side + lax.rem(wg, side)


class Part(NamedTuple):
    """A query tile's part in a stretch: which row tile, of which heads; its place in the line and its key tiles; those from `begin` to
    before `end` belong to the stretch."""

    row_tile: Any
    heads: Any
    place: Any
    number: Any
    begin: Any
    end: Any


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


def _attention(q_g, pos_g, pages_g, table_g, tile_g, block_g, total_g, *rest: Any, setting: Setting, **shared: Any) -> None:
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
                _store(setting, acc, out_g.at[rows[0]], buffers.q.at[wg])                    # the queries have been used
                _store(setting, lse, lse_g.at[rows[1]], buffers.lse)

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
    stages, per, size = setting.tiles.stages, setting.per, setting.size

    def one(index: Any, _: Any) -> tuple:
        part = stretch.part(index)
        keys, head = Keys(setting, table_g, line, part.row_tile), lax.div(part.heads * setting.packing.side, setting.packing.group)

        def fetch(tile: Any, _: Any) -> tuple:
            at = part.place + tile - stretch.low
            stage = lax.rem(at, stages)
            for which, (buffer, here, free) in enumerate(((buffers.k, buffers.k_here, buffers.k_free),
                                                          (buffers.v, buffers.v_here, buffers.v_free))):
                @pl.when(at >= stages)
                def _() -> None:
                    plgpu.barrier_wait(free.at[stage])                               # noqa: B023 (runs at once)
                for copy in range(per):
                    entry, inside = keys.entry(tile, copy)
                    page = pages_g.at[jnp.clip(keys.held(0, entry), 0, pages_g.shape[0] - 1), head, which]
                    source = page.at[pl.ds(inside, setting.tiles.keys)] if setting.parts > 1 else page
                    target = buffer.at[stage, pl.ds(copy * size, size)] if per > 1 else buffer.at[stage]
                    plgpu.copy_gmem_to_smem(source, target, here.at[stage])
            return ()
        lax.fori_loop(part.begin, part.end, fetch, ())
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


def _store(setting: Setting, x: jax.Array, to: Any, staging: Any) -> None:
    """Registers [ROWS, ...] to device memory, as many rows as there are."""
    if not setting.thin:
        to[...] = x.astype(to.dtype)
        return
    staging[...] = x.astype(to.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staging.at[pl.ds(0, setting.stored)], to)
    plgpu.wait_smem_to_gmem(0)


def _join(piece_g, piece_lse_g, tile_g, block_g, total_g, out_g, lse_g, *, setting: Setting, out: Any = None, lse: Any = None) -> None:
    """The query tile with which a block's stretch ends, where others go on with it: its pieces are merged and put in their place."""
    line, wg, column = Line(tile_g, block_g, total_g), lax.axis_index("of"), lax.axis_index("column")
    stretch = Stretch(setting, line, lax.axis_index("block"))

    @pl.when(stretch.number > 0)
    def _() -> None:
        part = stretch.part(stretch.number - 1)

        @pl.when((part.begin == 0) & (part.end < part.number))
        def _() -> None:
            share = block_g[0, 1] - block_g[0, 0]
            last = lax.div(part.place + part.number - 1, share)

            def piece(block: Any, which: int) -> tuple[jax.Array, jax.Array]:
                at = block, which, wg
                return setting.load(piece_g.at[(*at, slice(None), pl.ds(column * 64, 64))], TILE), setting.load(piece_lse_g.at[at], ROW)

            def more(block: Any, carry: Any) -> Any:
                acc, top, total = carry
                more, score = piece(block, 0)
                new = jnp.maximum(top, score)
                shrink, weight = jnp.exp(top - new), jnp.exp(score - new)
                acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0]) + more * lax.broadcast_in_dim(weight, acc.shape, [0])
                return acc, new, total * shrink + weight

            acc, score = piece(stretch.block, 1)
            top = jnp.maximum(score, LOWEST)
            acc, top, total = lax.fori_loop(stretch.block + 1, last + 1, more, (acc, top, jnp.exp(score - top)))
            safe = jnp.where(total > 0, total, 1.0)
            row, row0, head = stretch.where(part, wg)
            acc = acc * lax.broadcast_in_dim(1.0 / safe, acc.shape, [0])
            _store(setting, acc, out_g.at[row, pl.ds(row0, setting.stored), head, pl.ds(column * 64, 64)], out)

            @pl.when(column == 0)
            def _() -> None:
                merged = jnp.where(total > 0, top + jnp.log(safe), -jnp.inf)
                _store(setting, merged, lse_g.at[row, head, pl.ds(row0, setting.stored)], lse)
