"""Sends KV pages to the next device of a ring over NVLink, by a few thread blocks of the attention
kernel while the others attend over the same pages. Not called by the engine yet.

The sending blocks need neither the host nor another launch: they store into the memory of the next
device by their own copy engine. The compiler starts such kernels on all devices of the axis
together and zeroes their semaphores before.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.kernels.mosaic import page_copy
from jaxserve.kernels.mosaic.config import KernelConfig

MAX_COPY_BYTES = 8 * 1024  # little, since attention uses most of the shared memory


def buffers(pages: jax.Array) -> dict[str, Any]:
    """Shared memory and barriers of a block that sends pages [P, K, 2, C, H]."""
    return page_copy.buffers(pages, page_copy.rows_per_copy(pages, MAX_COPY_BYTES))


def send_pages(
    config: KernelConfig, index: Any, pages_g: Any, received_g: Any, buffer: Any, ready: Any
) -> None:
    """Sends the share of sending block `index` to `received_g` of the next device, and returns when
    all of this device's have arrived."""
    pages, heads, _, size, _ = pages_g.shape
    blocks = config.senders
    axis = config.ring_axis
    height = page_copy.rows_per_copy(pages_g, MAX_COPY_BYTES)
    parts = size // height
    heads2 = 2 * heads
    next_device: Any = None
    if axis is not None:
        next_device = {axis: lax.rem(lax.axis_index(axis) + 1, lax.axis_size(axis))}

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
        return at >= 0, to if axis is None else plgpu.remote_ref(to, next_device)

    total = pages * heads2 * parts
    page_copy.relay(
        lax.div(total - index + (blocks - 1), blocks),
        lambda at: pages_g.at[place(at)],
        target,
        buffer,
        ready,
    )
    if axis is not None:
        arrived = pl.get_global(plgpu.SemaphoreType.REGULAR)
        plgpu.wait_smem_to_gmem(0, wait_read_only=False)  # all that was sent has arrived
        pl.semaphore_signal(arrived, device_id=next_device)
        pl.semaphore_wait(arrived, value=blocks, decrement=False)
