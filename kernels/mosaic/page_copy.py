"""Whole pages, copied by the blocks' copy engines through shared memory, several copies in
flight."""

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

BYTES = 32 * 1024  # of one copy, at most
DEEP = 4  # copies of a block in flight
ROWS = 256  # of one copy, at most


def gather(
    pages: jax.Array, ids: jax.Array, *, blocks: int = 132, interpret: Any = False
) -> jax.Array:
    """As `copy.gather`."""
    source = flat(pages)
    out = jax.ShapeDtypeStruct((len(ids), *source.shape[1:]), pages.dtype)
    copied = _kernel(source, out, len(ids), blocks, interpret)(
        source, ids, jnp.arange(len(ids), dtype=jnp.int32)
    )
    return copied.reshape(len(ids), *pages.shape[1:])


def scatter(
    pages: jax.Array, ids: jax.Array, these: jax.Array, *, blocks: int = 132, interpret: Any = False
) -> jax.Array:
    """As `copy.scatter`."""
    target = jax.new_ref(flat(pages))
    _kernel(flat(these), (), len(ids), blocks, interpret)(
        flat(these), jnp.arange(len(ids), dtype=jnp.int32), ids, target
    )
    return jax.freeze(target).reshape(pages.shape)


def flat(pages: jax.Array) -> jax.Array:
    """[P, rows, H]."""
    return pages.reshape(len(pages), -1, pages.shape[-1])


def _kernel(source: jax.Array, out: Any, count: int, blocks: int, interpret: Any) -> Any:
    height = height_of(source, BYTES)
    body = functools.partial(
        _copy, total=count * (source.shape[1] // height), height=height, blocks=blocks
    )
    return kernel(body, out, buffers(source, height), {"block": blocks}, 1, interpret)


def height_of(source: Any, most: int) -> int:
    """Rows of [..., rows, H] that one copy of at most so many bytes moves."""
    *_, rows, width = source.shape
    tallest = max(1, min(ROWS, most // (width * source.dtype.itemsize), rows))
    return next(height for height in range(tallest, 0, -1) if rows % height == 0)


def buffers(source: jax.Array, height: int) -> dict[str, Any]:
    """What `relay` needs."""
    return dict(
        buffer=plgpu.SMEM((DEEP, height, source.shape[-1]), source.dtype),
        here=plgpu.Barrier(num_barriers=DEEP),
    )


def _copy(
    source_g: Any,
    from_g: Any,
    to_g: Any,
    target_g: Any,
    *,
    buffer: Any,
    here: Any,
    total: int,
    height: int,
    blocks: int,
) -> None:
    """Part i of all is copied by block i % blocks."""
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

    relay(lax.div(total - block + (blocks - 1), blocks), source, target, buffer, here)


def relay(
    count: Any,
    source: Callable[[Any], Any],
    target: Callable[[Any], tuple[Any, Any]],
    buffer: Any,
    here: Any,
) -> None:
    """Copies source(0..count), several in flight, each to a target, which comes with whether it is
    one. Returns when all have arrived."""

    def fetch(index: Any) -> None:
        @pl.when(index < count)
        def start() -> None:
            plgpu.copy_gmem_to_smem(
                source(index), buffer.at[lax.rem(index, DEEP)], here.at[lax.rem(index, DEEP)]
            )

    def pass_on(index: Any, _: Any) -> tuple:
        slot = lax.rem(index, DEEP)
        plgpu.barrier_wait(here.at[slot])
        somewhere, to = target(index)

        @pl.when(somewhere)
        def send() -> None:
            plgpu.copy_smem_to_gmem(buffer.at[slot], to)
            plgpu.wait_smem_to_gmem(1)  # the one before has left its slot

        @pl.when(~somewhere)
        def drop() -> None:
            plgpu.wait_smem_to_gmem(0)

        fetch(index + (DEEP - 1))
        return ()

    for index in range(DEEP - 1):
        fetch(jnp.int32(index))
    lax.fori_loop(0, count, pass_on, ())
    plgpu.wait_smem_to_gmem(0)
