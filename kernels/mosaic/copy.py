"""Whole pages, copied by the blocks' copy engines through shared memory, several copies in flight."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.kernels.mosaic.setting import kernel

BYTES = 32 * 1024                                    # of one copy, at most
DEEP = 4                                             # copies of a block in flight
ROWS = 256                                           # of one copy, at most


def gather(pages: jax.Array, ids: jax.Array, *, blocks: int = 132, interpret: Any = False) -> jax.Array:
    """As `copy.gather`."""
    source = _flat(pages)
    out = jax.ShapeDtypeStruct((len(ids), *source.shape[1:]), pages.dtype)
    copied = _kernel(source, out, len(ids), blocks, interpret)(source, ids, jnp.arange(len(ids), dtype=jnp.int32))
    return copied.reshape(len(ids), *pages.shape[1:])


def scatter(pages: jax.Array, ids: jax.Array, these: jax.Array, *, blocks: int = 132, interpret: Any = False) -> jax.Array:
    """As `copy.scatter`."""
    target = jax.new_ref(_flat(pages))
    _kernel(_flat(these), (), len(ids), blocks, interpret)(_flat(these), jnp.arange(len(ids), dtype=jnp.int32), ids, target)
    return jax.freeze(target).reshape(pages.shape)


def _flat(pages: jax.Array) -> jax.Array:
    """[P, rows, H]."""
    return pages.reshape(len(pages), -1, pages.shape[-1])


def _kernel(source: jax.Array, out: Any, count: int, blocks: int, interpret: Any) -> Any:
    _, rows, width = source.shape
    most = min(ROWS, BYTES // (width * source.dtype.itemsize))
    height = next(height for height in range(min(most, rows), 0, -1) if rows % height == 0)
    scratch = dict(buffer=plgpu.SMEM((DEEP, height, width), source.dtype), here=plgpu.Barrier(num_barriers=DEEP))
    body = functools.partial(_copy, total=count * (rows // height), height=height, blocks=blocks)
    return kernel(body, out, scratch, {"block": blocks}, 1, interpret)


def _copy(source_g: Any, from_g: Any, to_g: Any, target_g: Any, *, buffer: Any, here: Any, total: int, height: int, blocks: int) -> None:
    """Part i of all is copied by block i % blocks."""
    parts, block = source_g.shape[1] // height, lax.axis_index("block")
    mine = lax.div(total - block + (blocks - 1), blocks)

    def place(index: Any) -> tuple[Any, Any]:
        at = block + index * blocks
        return lax.div(at, parts), pl.ds(lax.rem(at, parts) * height, height)

    def fetch(index: Any) -> None:
        @pl.when(index < mine)
        def start() -> None:
            page, rows = place(index)
            source = jnp.clip(from_g[page], 0, source_g.shape[0] - 1)
            plgpu.copy_gmem_to_smem(source_g.at[source, rows], buffer.at[lax.rem(index, DEEP)], here.at[lax.rem(index, DEEP)])

    def pass_on(index: Any, _: Any) -> tuple:
        slot = lax.rem(index, DEEP)
        plgpu.barrier_wait(here.at[slot])
        page, rows = place(index)
        to = to_g[page]
        somewhere = (to >= 0) & (to < target_g.shape[0])

        @pl.when(somewhere)
        def send() -> None:
            plgpu.copy_smem_to_gmem(buffer.at[slot], target_g.at[to, rows])
            plgpu.wait_smem_to_gmem(1)                                               # the one before has left its slot

        @pl.when(~somewhere)
        def drop() -> None:
            plgpu.wait_smem_to_gmem(0)
        fetch(index + (DEEP - 1))
        return ()

    for index in range(DEEP - 1):
        fetch(jnp.int32(index))
    lax.fori_loop(0, mine, pass_on, ())
    plgpu.wait_smem_to_gmem(0)
