"""Quantised KV pages are close to what was stored."""

from __future__ import annotations

import hypothesis.extra.numpy as some
import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.kernels.kv_pages import FP8, FP8_MAX, SCALE_DTYPE, pool_shapes, quantize

vectors = some.arrays(np.float32, (3, 16), elements=st.floats(-(2.0**99), 2.0**99, width=32))


@settings(deadline=None)
@given(vectors, st.integers(-60, 60))
def test_what_is_stored_in_eight_bits_is_within_a_sixteenth(x, exponent):
    x = np.ldexp(x / max(1.0, np.abs(x).max()), exponent).astype(np.float32)
    stored = jax.tree.map(np.asarray, quantize(x))
    said = np.asarray(stored.dequantize(np.float32))
    scale = stored.scales.astype(np.float32)
    assert (stored.kv.dtype, stored.scales.dtype) == (FP8, SCALE_DTYPE) and np.isfinite(said).all()
    assert (np.frexp(scale)[0] == 0.5).all()  # powers of two
    # so bfloat16 holds them
    np.testing.assert_array_equal(said, said.astype(SCALE_DTYPE).astype(np.float32))
    assert (np.abs(said - x) <= np.maximum(np.abs(x) / 16, scale[:, None] * 2.0**-10)).all()
    assert (np.abs(said).max(-1) <= FP8_MAX * scale).all()


def test_a_vector_of_zeros_stays_one_and_what_is_not_finite_is_not_hidden():
    x = np.zeros((4, 8), np.float32)
    x[1, 3] = np.nan
    x[2, 0] = np.inf
    x[3, 7] = 1e38
    said = np.asarray(quantize(x).dequantize(np.float32))
    assert (
        (said[0] == 0).all()
        and not np.isfinite(said[1]).all()
        and not np.isfinite(said[2]).all()
        and np.isfinite(said[3]).all()
    )


def test_a_vector_does_not_depend_on_its_neighbours():
    x = np.random.default_rng(0).standard_normal((5, 2, 64)).astype(np.float32)
    alone = [quantize(one) for one in x]
    together = quantize(x)
    for number, one in enumerate(alone):
        jax.tree.map(np.testing.assert_array_equal, one, together.take(number))


def test_only_pools_of_eight_bits_have_scales():
    assert pool_shapes((7, 2, 2, 16, 64), np.float32).scales is None
    scales = pool_shapes((7, 2, 2, 16, 64), FP8).scales
    assert (scales.shape, scales.dtype) == ((7, 2, 2, 16), SCALE_DTYPE)
