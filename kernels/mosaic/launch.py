"""Entry points of the Hopper kernels: checks what they support, prepares their inputs and launches
them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.kernels.kv_pages import COMPUTE_DTYPES, FP8, SCALE_DTYPE, KVPages, check_pages
from jaxserve.kernels.mosaic import ring_send
from jaxserve.kernels.mosaic.attention import LOG2E, attention
from jaxserve.kernels.mosaic.combine import combine
from jaxserve.kernels.mosaic.config import KernelConfig, kernel
from jaxserve.kernels.mosaic.tiles import (
    HEAD_DIMS,
    ROWS,
    Tiles,
    default_tiles,
    from_rows,
    pack,
    swizzle_columns,
    to_rows,
)
from jaxserve.kernels.work_split import WorkSplit, split_work


def attend(
    q: jax.Array,
    q_pos: jax.Array,
    pages: KVPages,
    table: jax.Array,
    slot: jax.Array,
    entries: jax.Array,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """Attention over pages. Arguments and results are those of `ops.attend`; options are the
    keyword arguments of `_attend`. Errors: NotImplementedError, with the reason, for what is
    unsupported."""
    out, lse, _ = _attend(q, q_pos, pages, table, slot, entries, **options)
    return out, lse


def attend_and_send(
    q: jax.Array,
    q_pos: jax.Array,
    pages: KVPages,
    table: jax.Array,
    slot: jax.Array,
    entries: jax.Array,
    *,
    ring: str | None,
    senders: int = 8,
    **options: Any,
) -> tuple[jax.Array, jax.Array, KVPages]:
    """One hop of ring attention in one launch: attends over the pages while `senders` thread blocks
    send them to the next device of mesh axis `ring` (None: to this one). Not called by the engine
    yet.

    Returns out, lse and the pages of the previous device. Needs NVLink between all devices of the
    axis. Errors: NotImplementedError, with the reason, for what is unsupported.
    """
    if pages.scales is not None:
        raise NotImplementedError(f"sending pages of {pages.kv.dtype}")
    return _attend(q, q_pos, pages, table, slot, entries, ring=ring, senders=senders, **options)


def _attend(
    q: jax.Array,
    q_pos: jax.Array,
    pages: KVPages,
    table: jax.Array,
    slot: jax.Array,
    entries: jax.Array,
    *,
    scale: float,
    softcap: float = 0,
    window: int | None = None,
    value_dim: int | None = None,
    dtype: Any = jnp.float32,
    before: tuple[jax.Array, jax.Array] | None = None,
    tiles: Tiles | None = None,
    ring: str | None = None,
    senders: int = 0,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, KVPages]:
    """`attend`, and what it takes besides the arguments of `ops.attend`.

    tiles: block shape; None: the default. ring, senders: as in `attend_and_send`; 0 senders: none.
    interpret: run in the Pallas interpreter, with these parameters. Returns out, lse, and the pages
    received (`pages` without senders).
    """
    R, T, K, G, H = q.shape
    tiles = default_tiles(T * G, H, pages.kv.dtype) if tiles is None else tiles
    if senders:
        tiles = dataclasses.replace(tiles, blocks=tiles.blocks - senders)  # all blocks run at once
    check(pages.kv, value_dim, tiles)
    computed = pages.kv.dtype
    if pages.scales is not None:
        computed = q.dtype if q.dtype in COMPUTE_DTYPES else COMPUTE_DTYPES[0]
    staged = jnp.dtype(dtype) == computed  # results can be stored through the queries' buffer
    packing = pack(T, K, G, tiles.warpgroups, partial=before is None and staged)
    config = KernelConfig(
        (softcap or scale) * LOG2E,
        window,
        packing,
        tiles,
        rows=R,
        page_size=pages.kv.shape[3],
        interpret=bool(interpret),
        senders=senders,
        ring_axis=ring,
        inner=scale / softcap if softcap else 0,
    )
    whole_tiles = packing._replace(rows=config.tiles_per_row * config.tile_rows, by_head=False)
    q_rows = to_rows(q.astype(computed), packing)
    pos = to_rows(q_pos[..., None, None, None], whole_tiles, -1, G)[..., 0, 0]
    packed_before: tuple[jax.Array, ...] = ()
    if before is not None:
        packed_before = (
            to_rows(before[0].astype(jnp.float32), packing),
            to_rows(before[1][..., None], packing, -jnp.inf)[..., 0].transpose(0, 2, 1),
        )
    split = split_work(pos, table, slot, entries, config.work)
    out_dtype = dtype if staged else jnp.float32
    out, lse, received = _launch(
        q_rows, pos, pages, table, split, packed_before, config, out_dtype, interpret
    )
    out, lse = from_rows(out, lse, q.shape, packing)
    return out.astype(dtype), lse, received


def check(
    kv: jax.Array | jax.ShapeDtypeStruct, value_dim: int | None = None, tiles: Tiles | None = None
) -> None:
    """Checks that the kernel supports pages of this dtype and shape [..., C, H] and values of this
    dim, with these tiles or the default ones. Errors: NotImplementedError, with the reason."""
    check_pages(kv, value_dim, HEAD_DIMS)
    H = kv.shape[4]
    size = kv.shape[3]
    tiles = default_tiles(ROWS, H, kv.dtype) if tiles is None else tiles
    if bool(tiles.narrow) != (kv.dtype == FP8):
        raise NotImplementedError(
            f"tiles with narrow={tiles.narrow} for pages of {kv.dtype}; "
            f"it must be positive for pages of {FP8} and 0 for others"
        )
    if tiles.narrow and tiles.warpgroups > 1 and H > 128:
        raise NotImplementedError(
            f"pages of {kv.dtype} with a head dim of {H} and two computing warpgroups, "
            "which lack registers"
        )
    if size % 8 or (tiles.keys % size and size % tiles.keys):
        raise NotImplementedError(
            f"pages of {size} tokens; the size must be a multiple of 8 that divides key tiles "
            f"of {tiles.keys} keys or is a multiple of them"
        )


def _launch(
    q: jax.Array,
    pos: jax.Array,
    pages: KVPages,
    table: jax.Array,
    split: WorkSplit,
    before: tuple[jax.Array, ...],
    config: KernelConfig,
    dtype: Any,
    interpret: Any,
) -> tuple[jax.Array, jax.Array, KVPages]:
    """Runs both kernels on packed queries q [R, M, heads, H] at pos. before: out and lse of other
    keys, packed alike, or (). Returns out [R, M, heads, H], lse [R, heads, M], and the pages
    received (`pages` without senders)."""
    R, *_, H = q.shape
    M = config.packing.rows
    heads = config.packing.heads
    tiles = config.tiles
    blocks = config.tiles.blocks
    wgs = tiles.warpgroups
    keys = tiles.keys
    stages = tiles.stages
    pools = tuple(jax.tree.leaves(pages))
    columns = swizzle_columns(H)
    copies = config.work.copies_per_tile
    ready = plgpu.Barrier(num_barriers=stages, num_arrivals=1 if tiles.narrow else copies)
    consumed = plgpu.Barrier(num_barriers=stages, num_arrivals=wgs)
    shared = dict(
        q=_smem((wgs, ROWS, H), q.dtype),
        k=_smem((stages, keys, H), q.dtype),
        v=_smem((stages, keys, H), q.dtype),
        q_ready=plgpu.Barrier(num_barriers=wgs),
        k_ready=ready,
        v_ready=ready,
        k_consumed=consumed,
        v_consumed=consumed,
        tensor_cores=plgpu.Barrier(num_arrivals=wgs),
    )
    if tiles.narrow:
        shared |= dict(
            narrow=_smem((tiles.narrow, keys, H), FP8),
            scales=plgpu.SMEM((tiles.narrow, keys), SCALE_DTYPE),
            narrow_ready=plgpu.Barrier(num_barriers=tiles.narrow, num_arrivals=2 * copies),
            narrow_consumed=plgpu.Barrier(num_barriers=tiles.narrow),
        )
    if config.interpret:
        shared["p"] = _smem((wgs, ROWS, keys), q.dtype)
    if config.partial_tile:
        shared["lse"] = plgpu.SMEM((ROWS,), jnp.float32)
    if config.senders:
        shared["sent"] = ring_send.buffers(pages.kv)
    out_type = [
        jax.ShapeDtypeStruct(shape, type)
        for shape, type in (
            (q.shape, dtype),
            ((R, heads, M), jnp.float32),
            ((blocks, 2, wgs, ROWS, H), jnp.float32),
            ((blocks, 2, wgs, ROWS), jnp.float32),
            *[(pages.kv.shape, pages.kv.dtype)] * bool(config.senders),
        )
    ]
    body = functools.partial(attention, config=config, pools=len(pools), continues=bool(before))
    run = kernel(
        body,
        out_type,
        shared,
        {"block": blocks + config.senders},
        wgs + 1 + bool(tiles.narrow),
        interpret,
    )
    out, lse, partial, partial_lse, *received = run(q, pos, table, *split, *pools, *before)
    out = jax.new_ref(out)
    lse = jax.new_ref(lse)
    staging = dict(out=plgpu.SMEM((ROWS, columns), dtype)) if dtype != jnp.float32 else {}
    staging |= dict(lse=plgpu.SMEM((ROWS,), jnp.float32)) if config.partial_tile else {}
    grid = {"block": blocks, "of": wgs, "column": H // columns}
    merge = kernel(functools.partial(combine, config=config), (), staging, grid, 1, interpret)
    merge(partial, partial_lse, *split, out, lse)
    return jax.freeze(out), jax.freeze(lse), KVPages(*received) if received else pages


def _smem(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory [..., rows, columns], tiled and swizzled as wgmma and the TMA copies need
    it."""
    itemsize = jnp.dtype(dtype).itemsize
    columns = swizzle_columns(shape[-1], itemsize)
    return plgpu.SMEM(
        shape,
        dtype,
        transforms=(
            plgpu.TilingTransform((8, columns)),
            plgpu.SwizzleTransform(columns * itemsize),
        ),
    )
