"""The door: what the kernels have, and their launch."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.kernels.mosaic.attention import LOG2E, attention
from jaxserve.kernels.mosaic.join import join
from jaxserve.kernels.mosaic.line import Line, line_of
from jaxserve.kernels.mosaic.setting import Setting, kernel
from jaxserve.kernels.mosaic.tiles import HEAD_DIMS, ROWS, Tiles, column, default_tiles, from_rows, pack, to_rows


def attend(
    q: jax.Array, q_pos: jax.Array, pages: jax.Array, table: jax.Array, rows: jax.Array, count: jax.Array,
    *, scale: float, window: int | None = None, dtype: Any = jnp.float32, before: tuple[jax.Array, jax.Array] | None = None,
    tiles: Tiles | None = None, interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """As `reference.attend`, but for `out`, which is of type `dtype`; merged with `before`, an (out, lse) over other keys, where there is
    one: a hop of a ring. Errors: NotImplementedError, with the reason."""
    R, T, K, G, H = q.shape
    tiles = default_tiles(T * G, H) if tiles is None else tiles
    check(pages, tiles)
    own = jnp.dtype(dtype) == pages.dtype                                            # results go through the queries' buffer
    packing = pack(T, K, G, tiles.warpgroups, thin=before is None and own)
    setting = Setting(scale * LOG2E, window, packing, tiles, R, pages.shape[3], bool(interpret))
    tall = packing._replace(rows=setting.across * setting.height)
    q_rows, pos = to_rows(q.astype(pages.dtype), packing), to_rows(q_pos[..., None, None, None], tall, -1, G)[..., 0, 0]
    earlier = () if before is None else (to_rows(before[0].astype(jnp.float32), packing),
                                         to_rows(before[1][..., None], packing, -jnp.inf)[..., 0].transpose(0, 2, 1))
    line = line_of(pos, table, rows, count, setting)
    type_ = dtype if own else jnp.float32
    out, lse = from_rows(*_launch(q_rows, pos, pages, table, line, earlier, setting, type_, interpret), q.shape, packing)
    return out.astype(dtype), lse


def check(pages: jax.Array | jax.ShapeDtypeStruct, tiles: Tiles | None = None) -> None:
    """Errors: NotImplementedError where the kernel lacks these types or shapes."""
    H, size = pages.shape[4], pages.shape[3]
    tiles = default_tiles(ROWS, H) if tiles is None else tiles
    if pages.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"pages of {pages.dtype}; the kernel multiplies bfloat16 and float16")
    if H not in HEAD_DIMS:
        raise NotImplementedError(f"a head dim of {H}; the kernel has {', '.join(map(str, HEAD_DIMS))}")
    if size % 8 or (tiles.keys % size and size % tiles.keys):
        raise NotImplementedError(f"pages of {size} tokens; they must be whole eights that divide key tiles of {tiles.keys}, or multiples")


def _launch(q: jax.Array, pos: jax.Array, pages: jax.Array, table: jax.Array, line: Line, before: tuple[jax.Array, ...], setting: Setting,
            dtype: Any, interpret: Any) -> tuple[jax.Array, jax.Array]:
    """out [R, M, heads, H], lse [R, heads, M], as those of `before`, if any."""
    R, M, heads, H = q.shape
    tiles, blocks = setting.tiles, setting.tiles.blocks
    wgs, keys, stages = tiles.warpgroups, tiles.keys, tiles.stages
    columns = column(H)
    smem = functools.partial(plgpu.SMEM, dtype=pages.dtype, transforms=(plgpu.TilingTransform((8, columns)),
                                                                        plgpu.SwizzleTransform(2 * columns)))
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
    run = kernel(functools.partial(attention, setting=setting), out_type, shared, {"block": blocks}, wgs + 1, interpret)
    out, lse, *pieces = run(q, pos, pages, table, *line, *before)
    out, lse = jax.new_ref(out), jax.new_ref(lse)
    staging = dict(out=plgpu.SMEM((ROWS, columns), dtype)) if dtype != jnp.float32 else {}
    staging |= dict(lse=plgpu.SMEM((ROWS,), jnp.float32)) if setting.thin else {}
    grid = {"block": blocks, "of": wgs, "column": H // columns}
    merge = kernel(functools.partial(join, setting=setting), (), staging, grid, 1, interpret)
    merge(*pieces, *line, out, lse)
    return jax.freeze(out), jax.freeze(lse)
