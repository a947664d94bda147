"""Products of groups of rows with the matrix of each group."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.kernels import ops
from jaxserve.kernels.cpu import library, linear

needs_kernels = pytest.mark.skipif(
    library.unsupported() is not None, reason=f"no kernels for CPUs: {library.unsupported()}"
)


def by_loop(x: np.ndarray, w: np.ndarray, counts: list[int]) -> np.ndarray:
    """The products in f64, group by group."""
    y = np.zeros((len(x), w.shape[2]))
    begin = 0
    for matrix, count in zip(w.astype(np.float64), counts):
        y[begin : begin + count] = x[begin : begin + count].astype(np.float64) @ matrix
        begin += count
    return y


def assert_by_loop(counts: list[int], padding: int, K: int, N: int, dtype: str) -> None:
    rng = np.random.default_rng([*counts, padding, K, N])
    x = rng.standard_normal((sum(counts) + padding, K)).astype(dtype)
    w = rng.standard_normal((len(counts), K, N)).astype(dtype)
    x[sum(counts) :] = np.nan  # padding is not looked at
    y = np.asarray(jax.jit(ops.grouped)(x, w, np.array(counts, np.int32)))
    right = by_loop(x, w, counts)
    assert y.dtype == x.dtype
    sums = by_loop(np.abs(np.nan_to_num(x)), np.abs(w), counts)
    limit = sums * K * 2.0**-24 + np.abs(right) * (2.0**-8 if dtype == "bfloat16" else 0)
    assert (np.abs(y.astype(np.float64) - right) <= limit + 1e-30).all()
    assert (y[sum(counts) :] == 0).all()


@pytest.mark.parametrize("counts", [(3, 0, 5, 1), (0, 0, 0, 0), (0, 12, 0, 0), (3, 3, 3, 3)])
def test_rows_are_multiplied_by_the_matrix_of_their_group_and_padding_gives_zero(counts):
    assert_by_loop(list(counts), 12 - sum(counts), 8, 6, "float32")


@needs_kernels
@given(
    st.lists(st.sampled_from([0, 0, 1, 2, 7, 16, 17, 40]), min_size=1, max_size=9),
    st.integers(0, 5),
    st.sampled_from([1, 8, 33, 200]),
    st.sampled_from([1, 16, 50, 130]),
    st.sampled_from(["float32", "bfloat16"]),
)
def test_any_counts_give_what_a_loop_over_groups_gives(counts, padding, K, N, dtype):
    assert_by_loop(counts, padding if sum(counts) else padding + 1, K, N, dtype)


@needs_kernels
@pytest.mark.parametrize("counts", [[1], [0] * 63 + [1], [300], [1] * 64, [40] * 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_row_and_many_in_one_group_and_many(counts, dtype):
    assert_by_loop(counts, 3, 96, 80, dtype)


@needs_kernels
def test_counts_that_are_more_than_the_rows_read_no_other_memory():
    x = jnp.ones((3, 8))
    y = ops.grouped(x, jnp.ones((2, 8, 4)), jnp.array([2, 5], jnp.int32))
    np.testing.assert_array_equal(y, np.full((3, 4), 8))
    y = ops.grouped(x, jnp.ones((2, 8, 4)), jnp.array([-1, 2], jnp.int32))
    np.testing.assert_array_equal(y, [[8] * 4, [8] * 4, [0] * 4])


@needs_kernels
def test_a_row_gives_the_same_in_any_group_of_few_rows():
    """Batches must not change what a request says."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((16, 576)).astype(np.float32)
    matrix = rng.standard_normal((576, 200)).astype(np.float32)
    w = np.stack([matrix, matrix, matrix])
    alone = np.asarray(linear.linear(jnp.asarray(x[5:6]), jnp.asarray(matrix)))
    for counts in ([16, 0, 0], [5, 1, 10], [2, 9, 5]):
        y = np.asarray(linear.grouped(jnp.asarray(x), jnp.asarray(w), jnp.array(counts)))
        np.testing.assert_array_equal(y[5:6], alone)


@needs_kernels
def test_types_that_the_kernel_lacks_are_left_to_xla():
    x, w = jnp.ones((2, 16), jnp.float16), jnp.ones((1, 16, 4), jnp.float16)
    with pytest.raises(NotImplementedError, match="float16"):
        linear.grouped(x, w, jnp.array([2]))
    assert (ops.grouped(x, w, jnp.array([2])) == 16).all()
