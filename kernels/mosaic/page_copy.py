"""Copies whole pages between pools with the copy engine (TMA) of many thread blocks, through shared
memory, several copies in flight. `ring_send` uses `relay` too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.kernels.mosaic.config import kernel

MAX_COPY_BYTES = 32 * 1024
MAX_COPY_ROWS = 256  # limit of the copy engine
IN_FLIGHT = 4  # copies per thread block


def read_pages(
    pages: jax.Array, ids: jax.Array, *, blocks: int = 132, interpret: Any = False
) -> jax.Array:
    """One array of `kernels.page_copy.read_pages`. blocks: thread blocks that copy."""
    source = _flat(pages)
    out = jax.ShapeDtypeStruct((len(ids), *source.shape[1:]), pages.dtype)
    copied = _kernel(source, out, len(ids), blocks, interpret)(
        source, ids, jnp.arange(len(ids), dtype=jnp.int32)
    )
    return copied.reshape(len(ids), *pages.shape[1:])


def write_pages(
    pages: jax.Array,
    ids: jax.Array,
    values: jax.Array,
    *,
    blocks: int = 132,
    interpret: Any = False,
) -> jax.Array:
    """One array of `kernels.page_copy.write_pages`. blocks: thread blocks that copy."""
    target = jax.new_ref(_flat(pages))
    _kernel(_flat(values), (), len(ids), blocks, interpret)(
        _flat(values), jnp.arange(len(ids), dtype=jnp.int32), ids, target
    )
    return jax.freeze(target).reshape(pages.shape)


def _flat(pages: jax.Array) -> jax.Array:
    """[P, ..., H] -> [P, rows, H]."""
    return pages.reshape(len(pages), -1, pages.shape[-1])


def _kernel(source: jax.Array, out: Any, count: int, blocks: int, interpret: Any) -> Any:
    height = rows_per_copy(source, MAX_COPY_BYTES)
    body = functools.partial(
        _copy, total=count * (source.shape[1] // height), height=height, blocks=blocks
    )
    return kernel(body, out, buffers(source, height), {"block": blocks}, 1, interpret)


def rows_per_copy(source: Any, max_bytes: int) -> int:
    """Rows of [..., rows, H] that one copy moves: the most that divide them, within `max_bytes`."""
    *_, rows, width = source.shape
    tallest = max(1, min(MAX_COPY_ROWS, max_bytes // (width * source.dtype.itemsize), rows))
    return next(height for height in range(tallest, 0, -1) if rows % height == 0)


def buffers(source: jax.Array, height: int) -> dict[str, Any]:
    """Shared memory and barriers that `relay` needs, by name."""
    return dict(
        buffer=plgpu.SMEM((IN_FLIGHT, height, source.shape[-1]), source.dtype),
        ready=plgpu.Barrier(num_barriers=IN_FLIGHT),
    )


def _copy(
    source_g: Any,
    from_g: Any,
    to_g: Any,
    target_g: Any,
    *,
    buffer: Any,
    ready: Any,
    total: int,
    height: int,
    blocks: int,
) -> None:
    """Kernel body: copies pages from_g of source_g to pages to_g of target_g, `height` rows at a
    time; copy i of `total` is done by block i % blocks."""
    parts = source_g.shape[1] // height
    block = lax.axis_index("block")

    def place(index: Any) -> tuple[Any, Any]:
        at = block + index * blocks
        return lax.div(at, parts), pl.ds(lax.rem(at, parts) * height, height)

    def source(index: Any) -> Any:
        page, rows = place(index)
        return source_g.at[jnp.clip(from_g[page], 0, source_g.shape[0] - 1), rows]

    def target(index: Any) -> tuple[Any, Any]:
        page, rows = place(index)
        to = to_g[page]
        return (to >= 0) & (to < target_g.shape[0]), target_g.at[to, rows]

    relay(lax.div(total - block + (blocks - 1), blocks), source, target, buffer, ready)


def relay(
    count: Any,
    source: Callable[[Any], Any],
    target: Callable[[Any], tuple[Any, Any]],
    buffer: Any,
    ready: Any,
) -> None:
    """Copies source(i) to target(i) for i in 0..count - 1, several in flight; returns when all have
    arrived. target returns (whether to copy, where to)."""

    def load(index: Any) -> None:
        @pl.when(index < count)
        def start() -> None:
            plgpu.copy_gmem_to_smem(
                source(index),
                buffer.at[lax.rem(index, IN_FLIGHT)],
                ready.at[lax.rem(index, IN_FLIGHT)],
            )

    def store(index: Any, _: Any) -> tuple:
        slot = lax.rem(index, IN_FLIGHT)
        plgpu.barrier_wait(ready.at[slot])
        wanted, to = target(index)

        @pl.when(wanted)
        def send() -> None:
            plgpu.copy_smem_to_gmem(buffer.at[slot], to)
            plgpu.wait_smem_to_gmem(1)  # the previous store has read its slot

        @pl.when(~wanted)
        def drop() -> None:
            plgpu.wait_smem_to_gmem(0)

        load(index + (IN_FLIGHT - 1))
        return ()

    for index in range(IN_FLIGHT - 1):
        load(jnp.int32(index))
    lax.fori_loop(0, count, store, ())
    plgpu.wait_smem_to_gmem(0)
