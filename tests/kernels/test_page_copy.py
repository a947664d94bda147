"""Pages are copied whole, and only those that are named."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from jaxserve.kernels import page_copy
from jaxserve.kernels.kv_pages import KVPages, quantize

NEWER = jax.__version_info__ >= (0, 11, 2)


def implementations():
    on_lane = lambda pages: jax.tree.map(lambda pool: pool[None], pages)

    def read_on_lane(pages, ids):
        return page_copy.read_pages(on_lane(pages), ids)

    def write_on_lane(pages, ids, values):
        return page_copy.write_pages(on_lane(pages), ids, values).take(0)

    yield pytest.param(read_on_lane, write_on_lane, id="xla")
    if NEWER:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        from jaxserve.kernels.mosaic import page_copy as hopper

        def read(pages, ids, **settings):
            return jax.tree.map(lambda pool: hopper.read_pages(pool, ids, **settings), pages)

        def write(pages, ids, values, **settings):
            return jax.tree.map(
                lambda pool, some: hopper.write_pages(pool, ids, some, **settings), pages, values
            )

        for blocks in (1, 3, 40):
            settings = dict(blocks=blocks, interpret=plgpu.InterpretGPUParams(detect_races=True))
            yield pytest.param(
                functools.partial(read, **settings),
                functools.partial(write, **settings),
                id=f"mosaic-{blocks}",
            )


@pytest.mark.parametrize("read, write", implementations())
@pytest.mark.parametrize(
    "shape, dtype",
    [
        ((9, 2, 2, 16, 64), "bfloat16"),
        ((5, 1, 2, 8, 128), "float32"),
        ((6, 3, 2, 40, 64), "float16"),
        ((9, 2, 2, 16, 64), "fp8"),
    ],
)
def test_pages_go_out_and_come_back_elsewhere(read, write, shape, dtype):
    rng = np.random.default_rng(len(shape))
    made = lambda kv: (
        jax.tree.map(np.asarray, quantize(kv)) if dtype == "fp8" else KVPages(kv.astype(dtype))
    )
    pool, other = (made(rng.standard_normal(shape).astype(np.float32)) for _ in range(2))
    ids, places = (rng.permutation(shape[0])[:4].astype(np.int32) for _ in range(2))
    taken = jax.tree.map(np.asarray, jax.jit(read)(pool, ids))
    jax.tree.map(np.testing.assert_array_equal, taken, pool.take(ids))
    places[1], right = shape[0] + 7, jax.tree.map(np.copy, other)  # nowhere
    there = places < shape[0]
    jax.tree.map(lambda pool, some: pool.__setitem__(places[there], some[there]), right, taken)
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.tree.map(np.asarray, jax.jit(write)(other, places, taken)),
        right,
    )
