"""The door: what the kernels have, and their launch."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.kernels.kv_pages import FP8, SCALE, KVPages
from jaxserve.kernels.mosaic import ring_send as hop
from jaxserve.kernels.mosaic.attention import LOG2E, attention
from jaxserve.kernels.mosaic.combine import join
from jaxserve.kernels.mosaic.config import Setting, kernel
from jaxserve.kernels.mosaic.tiles import (
    HEAD_DIMS,
    ROWS,
    WIDE,
    Tiles,
    column,
    default_tiles,
    from_rows,
    pack,
    to_rows,
)
from jaxserve.kernels.mosaic.work_split import WorkSplit, line_of


def attend(
    q: jax.Array,
    q_pos: jax.Array,
    pages: KVPages,
    table: jax.Array,
    rows: jax.Array,
    count: jax.Array,
    **settings: Any,
) -> tuple[jax.Array, jax.Array]:
    """As `reference.attend`, but for `out`, which is of type `dtype`; settings: of `_attend`.
    Errors: NotImplementedError, with the reason.
    """
    out, lse, _ = _attend(q, q_pos, pages, table, rows, count, **settings)
    return out, lse


def attend_and_send(
    q: jax.Array,
    q_pos: jax.Array,
    pages: KVPages,
    table: jax.Array,
    rows: jax.Array,
    count: jax.Array,
    *,
    ring: str | None,
    senders: int = 8,
    **settings: Any,
) -> tuple[jax.Array, jax.Array, KVPages]:
    """A hop of a ring in one launch: as `attend`, while `senders` blocks send the pages to the next
    lane of mesh axis `ring` (None: to this one); with the pages of the lane before. Needs NVLink
    between all lanes of the axis. Errors: NotImplementedError, with the reason."""
    if pages.scales is not None:
        raise NotImplementedError(f"pages of {pages.kv.dtype} that are sent on")
    return _attend(q, q_pos, pages, table, rows, count, ring=ring, senders=senders, **settings)


def _attend(
    q: jax.Array,
    q_pos: jax.Array,
    pages: KVPages,
    table: jax.Array,
    rows: jax.Array,
    count: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    dtype: Any = jnp.float32,
    before: tuple[jax.Array, jax.Array] | None = None,
    tiles: Tiles | None = None,
    ring: str | None = None,
    senders: int = 0,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, KVPages]:
    """Merged with `before`, an (out, lse) over other keys, where there is one: a hop of a ring."""
    R, T, K, G, H = q.shape
    tiles = default_tiles(T * G, H, pages.kv.dtype) if tiles is None else tiles
    if senders:
        tiles = dataclasses.replace(tiles, blocks=tiles.blocks - senders)  # all must run at once
    check(pages.kv, tiles)
    computed = pages.kv.dtype if pages.scales is None else q.dtype if q.dtype in WIDE else WIDE[0]
    own = jnp.dtype(dtype) == computed  # results go through the queries' buffer
    packing = pack(T, K, G, tiles.warpgroups, thin=before is None and own)
    setting = Setting(
        scale * LOG2E, window, packing, tiles, R, pages.kv.shape[3], bool(interpret), senders, ring
    )
    tall = packing._replace(rows=setting.across * setting.height)
    q_rows = to_rows(q.astype(computed), packing)
    pos = to_rows(q_pos[..., None, None, None], tall, -1, G)[..., 0, 0]
    earlier = (
        ()
        if before is None
        else (
            to_rows(before[0].astype(jnp.float32), packing),
            to_rows(before[1][..., None], packing, -jnp.inf)[..., 0].transpose(0, 2, 1),
        )
    )
    line = line_of(pos, table, rows, count, setting)
    type_ = dtype if own else jnp.float32
    out, lse, received = _launch(
        q_rows, pos, pages, table, line, earlier, setting, type_, interpret
    )
    out, lse = from_rows(out, lse, q.shape, packing)
    return out.astype(dtype), lse, received


def check(kv: jax.Array | jax.ShapeDtypeStruct, tiles: Tiles | None = None) -> None:
    """Errors: NotImplementedError where the kernel lacks these types or shapes."""
    H = kv.shape[4]
    size = kv.shape[3]
    tiles = default_tiles(ROWS, H, kv.dtype) if tiles is None else tiles
    if kv.dtype not in (*WIDE, FP8):
        raise NotImplementedError(
            f"pages of {kv.dtype}; the kernel has {', '.join(map(str, (*WIDE, FP8)))}"
        )
    if bool(tiles.narrow) != (kv.dtype == FP8):
        raise NotImplementedError(
            f"{tiles.narrow} narrow tiles for pages of {kv.dtype}; there are some where pages are of {FP8}"
        )
    if tiles.narrow and tiles.warpgroups > 1 and H > 128:
        raise NotImplementedError(
            f"pages of {kv.dtype} and a head dim of {H} with two computing warpgroups, for lack of registers"
        )
    if H not in HEAD_DIMS:
        raise NotImplementedError(
            f"a head dim of {H}; the kernel has {', '.join(map(str, HEAD_DIMS))}"
        )
    if size % 8 or (tiles.keys % size and size % tiles.keys):
        raise NotImplementedError(
            f"pages of {size} tokens; they must be whole eights that divide key tiles of {tiles.keys}, or multiples"
        )


def _launch(
    q: jax.Array,
    pos: jax.Array,
    pages: KVPages,
    table: jax.Array,
    line: WorkSplit,
    before: tuple[jax.Array, ...],
    setting: Setting,
    dtype: Any,
    interpret: Any,
) -> tuple[jax.Array, jax.Array, KVPages]:
    """out [R, M, heads, H], lse [R, heads, M], as those of `before`, if any; pages that were
    received, or those that are here."""
    R, M, heads, H = q.shape
    tiles = setting.tiles
    blocks = setting.tiles.blocks
    wgs = tiles.warpgroups
    keys = tiles.keys
    stages = tiles.stages
    pools = tuple(jax.tree.leaves(pages))
    columns = column(H)
    here = plgpu.Barrier(num_barriers=stages, num_arrivals=1 if tiles.narrow else setting.per)
    free = plgpu.Barrier(num_barriers=stages, num_arrivals=wgs)
    shared = dict(
        q=_smem((wgs, ROWS, H), q.dtype),
        k=_smem((stages, keys, H), q.dtype),
        v=_smem((stages, keys, H), q.dtype),
        q_here=plgpu.Barrier(num_barriers=wgs),
        k_here=here,
        v_here=here,
        k_free=free,
        v_free=free,
        turn=plgpu.Barrier(num_arrivals=wgs),
    )
    if tiles.narrow:
        shared |= dict(
            narrow=_smem((tiles.narrow, keys, H), FP8),
            scales=plgpu.SMEM((tiles.narrow, keys), SCALE),
            narrow_here=plgpu.Barrier(num_barriers=tiles.narrow, num_arrivals=2 * setting.per),
            narrow_free=plgpu.Barrier(num_barriers=tiles.narrow),
        )
    if setting.interpret:
        shared["p"] = _smem((wgs, ROWS, keys), q.dtype)
    if setting.thin:
        shared["lse"] = plgpu.SMEM((ROWS,), jnp.float32)
    if setting.senders:
        shared["sent"] = hop.buffers(pages.kv)
    out_type = [
        jax.ShapeDtypeStruct(shape, type)
        for shape, type in (
            ((R, M, heads, H), dtype),
            ((R, heads, M), jnp.float32),
            ((blocks, 2, wgs, ROWS, H), jnp.float32),
            ((blocks, 2, wgs, ROWS), jnp.float32),
            *[(pages.kv.shape, pages.kv.dtype)] * bool(setting.senders),
        )
    ]
    body = functools.partial(attention, setting=setting, pools=len(pools), continues=bool(before))
    run = kernel(
        body,
        out_type,
        shared,
        {"block": blocks + setting.senders},
        wgs + 1 + bool(tiles.narrow),
        interpret,
    )
    out, lse, piece, piece_lse, *received = run(q, pos, table, *line, *pools, *before)
    out = jax.new_ref(out)
    lse = jax.new_ref(lse)
    staging = dict(out=plgpu.SMEM((ROWS, columns), dtype)) if dtype != jnp.float32 else {}
    staging |= dict(lse=plgpu.SMEM((ROWS,), jnp.float32)) if setting.thin else {}
    grid = {"block": blocks, "of": wgs, "column": H // columns}
    merge = kernel(functools.partial(join, setting=setting), (), staging, grid, 1, interpret)
    merge(piece, piece_lse, *line, out, lse)
    return jax.freeze(out), jax.freeze(lse), KVPages(*received) if received else pages


def _smem(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory of [..., rows, columns] as wgmma and the copy engine want it."""
    itemsize = jnp.dtype(dtype).itemsize
    columns = column(shape[-1], itemsize)
    return plgpu.SMEM(
        shape,
        dtype,
        transforms=(
            plgpu.TilingTransform((8, columns)),
            plgpu.SwizzleTransform(columns * itemsize),
        ),
    )
