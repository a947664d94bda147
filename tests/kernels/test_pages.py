"""Pages are copied whole, and only those that are named."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from jaxserve.kernels import pages

NEWER = jax.__version_info__ >= (0, 11, 2)


def implementations():
    yield pytest.param(pages.gather, pages.scatter, id="xla")
    if NEWER:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        from jaxserve.kernels.mosaic import copy

        for blocks in (1, 3, 40):
            settings = dict(blocks=blocks, interpret=plgpu.InterpretGPUParams(detect_races=True))
            both = (functools.partial(copy_, **settings) for copy_ in (copy.gather, copy.scatter))
            yield pytest.param(*both, id=f"mosaic-{blocks}")


@pytest.mark.parametrize("gather, scatter", implementations())
@pytest.mark.parametrize("shape, dtype", [((9, 2, 2, 16, 64), "bfloat16"), ((5, 1, 2, 8, 128), "float32"), ((6, 3, 2, 40, 64), "float16")])
def test_pages_go_out_and_come_back_elsewhere(gather, scatter, shape, dtype):
    rng = np.random.default_rng(len(shape))
    pool, other = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    ids, places = (rng.permutation(shape[0])[:4].astype(np.int32) for _ in range(2))
    taken = np.asarray(jax.jit(gather)(pool, ids))
    np.testing.assert_array_equal(taken, pool[ids])
    places[1], right = shape[0] + 7, other.copy()                                    # nowhere
    for place, page in zip(places, taken):
        if place < shape[0]:
            right[place] = page
    np.testing.assert_array_equal(np.asarray(jax.jit(scatter)(other, places, taken)), right)
