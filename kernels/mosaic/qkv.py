"""Norms and RoPE of queries and keys, and the write of keys and values to their pages, in one
launch."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.kernels.kv_pages import COMPUTE_DTYPES, FP8, FP8_MAX, KVPages
from jaxserve.kernels.mosaic.config import ACC_LAYOUT, kernel
from jaxserve.kernels.mosaic.tiles import ROWS, swizzle_columns
from jaxserve.kernels.qkv import Projected

COLUMN_LAYOUT = plgpu.Layout.WGMMA.reduce(0)  # of numbers that all rows share
HEAD_DIMS = (64, 128, 256)
ALIGNED = 128  # bytes that the copy engine's rows in shared memory are multiples of
HALVES = 16  # a swizzle of 32 bytes


def check(heads: Any, half: int, kv: Any) -> None:
    """Checks that the kernel supports heads [T, K, rows, H], of which 2 `half` numbers are rotated,
    and pages kv [..., C, H]: arrays, or anything with shape and dtype. Errors: NotImplementedError,
    with the reason."""
    if heads.dtype not in COMPUTE_DTYPES or kv.dtype not in (heads.dtype, FP8):
        raise NotImplementedError(f"pages of {kv.dtype} and projections of {heads.dtype}")
    if kv.shape[-1] not in HEAD_DIMS or kv.shape[-1] * kv.dtype.itemsize % ALIGNED:
        dims = ", ".join(map(str, HEAD_DIMS))
        raise NotImplementedError(
            f"a head dim of {kv.shape[-1]} in {kv.dtype}; supported are {dims}, of {ALIGNED} bytes"
        )
    if half % HALVES:
        raise NotImplementedError(f"{2 * half} rotated numbers, which are no multiple of 32")


def write_qkv(
    qkv: Projected,
    pages: KVPages,
    page: jax.Array,
    offset: jax.Array,
    *,
    blocks: int = 132,
    interpret: Any = False,
) -> tuple[jax.Array, KVPages]:
    """Prepares and writes as `ops.write_qkv`. blocks: thread blocks that the device runs at once.
    Errors: NotImplementedError, with the reason."""
    pool = pages.kv
    check(qkv.heads, qkv.half, pool)
    T, K, _, H = qkv.heads.shape
    half = qkv.half
    tiles = -(-T // ROWS)
    rows = qkv.group + 2
    # one head for each thread block, or where there are many tokens, all of a kv head
    each = 1 if tiles * K * rows <= 2 * blocks else rows
    targets = [jax.new_ref(array.reshape(array.shape[1:])) for array in jax.tree.leaves(pages)]
    dtype = qkv.heads.dtype
    scratch = dict(
        tile=_smem((ROWS, H), dtype, half),
        staging=plgpu.SMEM((ROWS, H), pool.dtype),
        at=plgpu.SMEM((2, ROWS), jnp.int32),
        loaded=plgpu.Barrier(),
        ready=plgpu.Barrier(num_arrivals=2 + 2 * bool(qkv.cos_sin)),
    )
    if pages.scales is not None:
        scratch["scales"] = plgpu.SMEM((ROWS,), jnp.float32)
    if qkv.cos_sin:
        scratch |= {name: _smem((ROWS, half), jnp.float32, half) for name in ("cos", "sin")}
    run = kernel(
        functools.partial(
            _body,
            group=qkv.group,
            half=half,
            eps=qkv.eps if qkv.norms else None,
            pools=len(targets),
            each=each,
            interpret=bool(interpret),
        ),
        jax.ShapeDtypeStruct((T, K, qkv.group, H), dtype),
        scratch,
        {"tokens": tiles, "head": K, "part": rows // each},
        1,
        interpret,
    )
    cos_sin = [x.reshape(T, half) for x in qkv.cos_sin or ()]
    q = run(qkv.heads, *(qkv.norms or ()), *cos_sin, page, offset, *targets)
    written = [jax.freeze(target)[None] for target in targets]
    return q, KVPages(*written)


def _body(
    heads_g: Any,
    *rest: Any,
    tile: Any,
    staging: Any,
    at: Any,
    loaded: Any,
    ready: Any,
    group: int,
    half: int,
    eps: float | None,
    pools: int,
    each: int,
    interpret: bool,
    scales: Any = None,
    **cos_sin: Any,
) -> None:
    """Kernel body: some of the heads that belong to a kv head, of 64 tokens.

    Arguments ending in _g are refs to device memory: projections, weights of norms, cos and sin,
    pages and offsets, the arrays of the pool (`pools` of them), and the queries. eps: None where
    there are no norms. each: heads of a thread block. In shared memory: tile, staging: a head of
    all tokens, swizzled and plain; at: their pages and offsets; scales: of what `staging` has in 8
    bits; cos_sin: of the tokens, f32.
    """
    *rest, q_g = rest  # type: ignore[assignment]
    *optional, page_g, offset_g = rest[:-pools]
    pool_g, *scales_g = rest[-pools:]
    q_norm_g, k_norm_g = (None, None) if eps is None else optional[:2]
    tables_g = optional if eps is None else optional[2:]
    T, _, rows, H = heads_g.shape
    begin: Any = lax.axis_index("tokens") * ROWS
    tokens = pl.ds(begin, ROWS)  # those past the last are neither read nor written
    head: Any = lax.axis_index("head")
    first: Any = lax.axis_index("part") * each
    for source, to in zip((page_g, offset_g, *tables_g), (at.at[0], at.at[1], *cos_sin.values())):
        plgpu.copy_gmem_to_smem(source.at[tokens], to, ready)
    plgpu.barrier_wait(ready)

    def load(ref: Any, layout: Any) -> jax.Array:
        if interpret:
            return ref[...]
        return plgpu.load(ref, layout=layout, optimized=False)  # type: ignore[call-arg]

    def spread(x: jax.Array, axis: int, width: int) -> jax.Array:
        return lax.broadcast_in_dim(x, (ROWS, width), [axis])

    def parts(of: Any) -> list[Any]:
        """Slices of numbers that are rotated together, and of the others."""
        sizes = [(0, half), (half, half), (2 * half, H - 2 * half)]
        return [of(pl.ds(start, size)) for start, size in sizes if size]

    def loaded_head() -> list[jax.Array]:
        return parts(lambda columns: load(tile.at[:, columns], ACC_LAYOUT).astype(jnp.float32))

    def prepared(weights_g: Any) -> list[jax.Array]:
        """Norm and RoPE of the head in `tile`, in parts."""
        x = loaded_head()
        if eps is not None:
            squares = sum((one * one).sum(axis=1) for one in x)
            factor = lax.rsqrt(squares * (1 / H) + eps)
            weights = parts(lambda columns: load(weights_g.at[columns], COLUMN_LAYOUT))
            x = [
                one * spread(factor, 0, one.shape[1]) * spread(weight, 1, one.shape[1])
                for one, weight in zip(x, weights)
            ]
            x = [one.astype(tile.dtype).astype(jnp.float32) for one in x]
        if cos_sin:
            cos, sin = (load(ref, ACC_LAYOUT) for ref in cos_sin.values())
            a, b, *others = x
            x = [a * cos - b * sin, b * cos + a * sin, *others]
        return [one.astype(tile.dtype) for one in x]

    def quantized(x: list[jax.Array]) -> list[jax.Array]:
        """Quantises a head as `kv_pages.quantize`, but for the scales of vectors with infinity,
        which are NaN; leaves scales in `scales`."""
        wide = [one.astype(jnp.float32) for one in x]
        nothing = sum((one * 0).sum(axis=1) for one in wide)  # or NaN, which a maximum may lose
        largest = functools.reduce(jnp.maximum, (jnp.abs(one).max(axis=1) for one in wide))
        bits = lax.bitcast_convert_type(largest / FP8_MAX, jnp.int32)
        exponent = jnp.where(largest > 0, jnp.clip((bits >> 23) - 126, -120, 120), 0)
        power = lambda number: lax.bitcast_convert_type((number + 127) << 23, jnp.float32)
        scales[...] = power(exponent) + nothing
        factor = power(-exponent) + nothing
        return [(one * spread(factor, 0, one.shape[1])).astype(FP8) for one in wide]

    def write(x: list[jax.Array], which: int) -> None:
        """Writes a head, in parts, to the keys (0) or values (1) of its tokens."""
        if scales_g:
            x = quantized(x)
        for to, one in zip(parts(lambda columns: staging.at[:, columns]), x):
            to[...] = one
        plgpu.commit_smem()
        write_rows(which)

    def write_rows(which: int) -> None:
        def write_row(i: Any, _: Any) -> tuple:
            page = at[0, i]

            @pl.when((page >= 0) & (page < pool_g.shape[0]))
            def write_one() -> None:
                to = pool_g.at[page, head, which, pl.ds(at[1, i], 1)]
                plgpu.copy_smem_to_gmem(staging.at[pl.ds(i, 1)], to)
                for ref in scales_g:
                    ref[page, head, which, at[1, i]] = scales[i].astype(ref.dtype)

            return ()

        lax.fori_loop(0, jnp.minimum(T - begin, ROWS), write_row, ())

    def one_head(index: Any, _: Any) -> tuple:
        number = first + index

        @pl.when(number == group + 1)
        def value() -> None:
            to = tile if scales_g else staging
            plgpu.copy_gmem_to_smem(heads_g.at[tokens, head, rows - 1], to, loaded)
            plgpu.barrier_wait(loaded)
            if scales_g:
                write(loaded_head(), 1)
            else:
                write_rows(1)

        @pl.when(number < group)
        def query() -> None:
            plgpu.copy_gmem_to_smem(heads_g.at[tokens, head, number], tile, loaded)
            plgpu.barrier_wait(loaded)
            for to, x in zip(parts(lambda columns: tile.at[:, columns]), prepared(q_norm_g)):
                to[...] = x
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, q_g.at[tokens, head, number])

        @pl.when(number == group)
        def key() -> None:
            plgpu.copy_gmem_to_smem(heads_g.at[tokens, head, rows - 2], tile, loaded)
            plgpu.barrier_wait(loaded)
            write(prepared(k_norm_g), 0)

        plgpu.wait_smem_to_gmem(0)
        return ()

    lax.fori_loop(0, each, one_head, ())


def _smem(shape: tuple[int, int], dtype: Any, part: int) -> Any:
    """Shared memory [ROWS, columns] in swizzled tiles that columns are cut between at multiples of
    `part`."""
    itemsize = jnp.dtype(dtype).itemsize
    columns = swizzle_columns(part, itemsize)
    return plgpu.SMEM(
        shape,
        dtype,
        transforms=(
            plgpu.TilingTransform((8, columns)),
            plgpu.SwizzleTransform(columns * itemsize),
        ),
    )
