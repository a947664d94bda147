"""A hop of a ring within NVLink: while most blocks attend over the keys that are here, a few send
these on to the next lane.

The blocks that send need no host, no stream and no other launch: they store into the memory of the
next device by its own copy engine. The compiler starts such kernels on all devices of the axis
together and sets their semaphores to zero before.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.kernels.mosaic import page_copy as copy
from jaxserve.kernels.mosaic.config import Setting

BYTES = 8 * 1024  # of one copy, at most: shared memory is little beside that of attention


def buffers(pages: jax.Array) -> dict[str, Any]:
    """What a block that sends pages [P, K, 2, C, H] needs."""
    return copy.buffers(pages, copy.height_of(pages, BYTES))


def send_on(
    setting: Setting, index: Any, pages_g: Any, received_g: Any, buffer: Any, here: Any
) -> None:
    """What sending block `index` does: its share of the pages goes to the next lane's `received_g`;
    it ends when this lane's has come."""
    pages, heads, _, size, _ = pages_g.shape
    blocks = setting.senders
    axis = setting.ring
    height = copy.height_of(pages_g, BYTES)
    parts = size // height
    heads2 = 2 * heads
    onward: Any = (
        None if axis is None else {axis: lax.rem(lax.axis_index(axis) + 1, lax.axis_size(axis))}
    )

    def place(at: Any) -> tuple[Any, ...]:
        at = index + at * blocks
        plane = lax.div(at, parts)
        part = lax.rem(at, parts)
        within = lax.rem(plane, heads2)
        return (
            lax.div(plane, heads2),
            lax.div(within, 2),
            lax.rem(within, 2),
            pl.ds(part * height, height),
        )

    def target(at: Any) -> tuple[Any, Any]:
        to = received_g.at[place(at)]
        return at >= 0, to if axis is None else plgpu.remote_ref(to, onward)

    total = pages * heads2 * parts
    copy.relay(
        lax.div(total - index + (blocks - 1), blocks),
        lambda at: pages_g.at[place(at)],
        target,
        buffer,
        here,
    )
    if axis is not None:
        arrived = pl.get_global(plgpu.SemaphoreType.REGULAR)
        plgpu.wait_smem_to_gmem(0, wait_read_only=False)  # what was sent is there
        pl.semaphore_signal(arrived, device_id=onward)
        pl.semaphore_wait(arrived, value=blocks, decrement=False)
