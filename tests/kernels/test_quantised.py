"""Quantised weights mean what the library of their format says, in every product and lookup."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from jaxserve.kernels import ops, quantised
from jaxserve.kernels.cpu import library
from jaxserve.kernels.quantised import Form, Quantised
from jaxserve.weights.quantised import GGUF_KINDS, Blocks, from_gguf, joined, pack

needs_kernels = pytest.mark.skipif(
    library.unsupported() is not None, reason=f"no kernels for CPUs: {library.unsupported()}"
)
KINDS = pytest.mark.parametrize("kind", GGUF_KINDS, ids=lambda kind: kind.name)


def random_rows(kind: Kind, outputs: int, inputs: int, seed: int = 0) -> np.ndarray:
    """Rows of blocks of random codes, whose factors are small floats."""
    rng = np.random.default_rng([seed, outputs, inputs])
    block, size = GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (outputs, inputs // block, size), np.uint8)
    factors = {Kind.Q6_K: [208]}.get(kind, [0, 2])
    if kind in (Kind.Q8_0, Kind.Q4_0, Kind.Q5_0):
        factors = [0]
    for at in factors:
        half = rng.uniform(-0.01, 0.01, (outputs, inputs // block, 1)).astype(np.float16)
        raw[..., at : at + 2] = half.view(np.uint8)
    return raw.reshape(outputs, -1)


def on_device(w: Quantised) -> Quantised:
    return jax.tree.map(jnp.asarray, w)


def stacked(parts: list[Quantised]) -> Quantised:
    """The matrices of several experts."""
    return jax.tree.map(lambda *arrays: np.stack(arrays), *parts)


def assert_close(y: jax.Array, right: np.ndarray) -> None:
    assert y.shape == right.shape
    assert np.abs(np.asarray(y, np.float64) - right).max() <= 1e-5 * np.abs(right).max()


@KINDS
def test_the_matrix_is_what_its_format_says(kind):
    raw = random_rows(kind, 48, 512)
    matrix = quantised.dequantise(on_device(pack(from_gguf(raw, kind))))
    np.testing.assert_allclose(matrix, dequantize(raw, kind).T, rtol=1e-6, atol=1e-7)


@KINDS
@pytest.mark.parametrize("T", [1, 3, 40])
def test_products_are_those_with_the_matrix_in_f64(kind, T):
    raw = random_rows(kind, 80, 512)
    x = np.random.default_rng(T).standard_normal((T, 512)).astype(np.float32)
    y = ops.linear(jnp.asarray(x), on_device(pack(from_gguf(raw, kind))))
    assert_close(y, x.astype(np.float64) @ dequantize(raw, kind).astype(np.float64).T)


@KINDS
def test_products_of_groups_are_those_with_the_matrix_of_each_expert(kind):
    raws = [random_rows(kind, 32, 256, seed) for seed in range(4)]
    w = on_device(stacked([pack(from_gguf(raw, kind)) for raw in raws]))
    x = np.random.default_rng(1).standard_normal((12, 256)).astype(np.float32)
    counts = np.array([3, 0, 1, 5], np.int32)
    right = np.zeros((12, 32))
    ends = np.cumsum(counts)
    for raw, begin, end in zip(raws, ends - counts, ends):
        right[begin:end] = x[begin:end].astype(np.float64) @ dequantize(raw, kind).T
    y = ops.grouped(jnp.asarray(x), w, jnp.asarray(counts))
    assert_close(y, right)
    assert (np.asarray(y)[9:] == 0).all()


@KINDS
def test_rows_are_those_of_the_table(kind):
    raw = random_rows(kind, 48, 256)
    ids = np.array([0, 47, 16, 16, 3], np.int32)
    table = pack(from_gguf(raw, kind))
    found = ops.rows(on_device(table), jnp.asarray(ids))
    np.testing.assert_allclose(found, dequantize(raw, kind)[ids], rtol=1e-6, atol=1e-7)


@needs_kernels
@KINDS
def test_a_row_gives_the_same_whatever_other_rows_are_beside_it(kind):
    """Batches must not change what a request says."""
    w = on_device(pack(from_gguf(random_rows(kind, 48, 512), kind)))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((16, 512)), jnp.float32)
    few = np.asarray(ops.linear(x, w))
    for first, last in ((3, 4), (3, 5), (2, 9)):
        np.testing.assert_array_equal(few[first:last], ops.linear(x[first:last], w))


@needs_kernels
@pytest.mark.parametrize("T", [5, 300])
def test_rows_of_padding_change_no_other(T):
    w = on_device(pack(from_gguf(random_rows(Kind.Q8_0, 80, 256), Kind.Q8_0)))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((T, 256)), jnp.float32)
    positions = jnp.where(jnp.arange(T) % 3 == 0, -1, 7)
    whole, padded = np.asarray(ops.linear(x, w)), np.asarray(ops.linear(x, w, positions))
    np.testing.assert_array_equal(padded[positions >= 0], whole[positions >= 0])
    assert (np.asarray(ops.linear(x, w, positions * 0 - 1)) == 0).all()


@needs_kernels
@pytest.mark.parametrize("form", [Form(4, mantissa=1), Form(8, mantissa=3), Form(8, 128)], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("group", [16, 32, 128, 384])
@pytest.mark.parametrize("T", [2, 20])
def test_other_codes_scales_and_groups_are_those_of_the_matrix(form, dtype, group, T):
    rng = np.random.default_rng(group)
    codes = rng.integers(0, 256 if form.bits == 8 else 16, (64, 384), np.uint8)
    if form.mantissa == 3:
        codes[codes & 127 == 127] = 8  # NaN
    scales = rng.uniform(0.5, 1, (64, 384 // group)).astype(jnp.dtype(dtype))
    w = on_device(pack(Blocks(form, codes, scales)))
    x = rng.standard_normal((T, 384)).astype(np.float32)
    right = x.astype(np.float64) @ np.asarray(quantised.dequantise(w), np.float64)
    assert_close(ops.linear(jnp.asarray(x), w), right)


@pytest.mark.parametrize("form", [Form(4, mantissa=1), Form(8, mantissa=3)], ids=str)
def test_codes_that_are_floats_mean_what_their_type_says(form):
    dtype = {4: ml_dtypes.float4_e2m1fn, 8: ml_dtypes.float8_e4m3fn}[form.bits]
    codes = np.arange(2**form.bits, dtype=np.uint8)
    if form.bits == 8:
        codes[codes & 127 == 127] = 0  # NaN
    every = np.resize(codes, (16, 256))
    matrix = quantised.dequantise(
        on_device(pack(Blocks(form, every, np.ones((16, 8), np.float32))))
    )
    np.testing.assert_array_equal(matrix, every.view(dtype).astype(np.float32).T)


def test_rows_of_an_array_are_its_own():
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    found = ops.rows(jnp.asarray(table), jnp.array([2, 0]))
    np.testing.assert_array_equal(found, table[[2, 0]])


def test_activations_of_half_precision_give_results_of_their_type():
    w = on_device(pack(from_gguf(random_rows(Kind.Q4_K, 32, 256), Kind.Q4_K)))
    x = jnp.ones((2, 256), jnp.bfloat16)
    assert ops.linear(x, w).dtype == jnp.bfloat16
    right = x.astype(np.float32) @ quantised.dequantise(w)
    np.testing.assert_allclose(ops.linear(x, w).astype(np.float32), right, rtol=2e-2, atol=1e-2)


@KINDS
def test_rows_and_columns_are_cut_before_packing(kind):
    raw = random_rows(kind, 96, 512)
    blocks = from_gguf(raw, kind)
    part = joined([blocks.rows(slice(64, 96)), blocks.rows(slice(0, 16))]).columns(256, 512)
    right = dequantize(raw, kind)[np.r_[64:96, 0:16], 256:].T
    matrix = quantised.dequantise(on_device(pack(part)))
    np.testing.assert_allclose(matrix, right, rtol=1e-6, atol=1e-7)


def test_several_dimensions_of_outputs_are_one_in_a_product():
    """Gate and up, each of which is split over ranks."""
    raws = [random_rows(Kind.Q5_0, 32, 64, seed) for seed in range(2)]
    both = stacked([pack(from_gguf(raw, Kind.Q5_0)) for raw in raws])
    x = np.random.default_rng(2).standard_normal((3, 64)).astype(np.float32)
    right = x @ np.concatenate([dequantize(raw, Kind.Q5_0) for raw in raws]).T
    assert_close(ops.linear(jnp.asarray(x), on_device(both)), right)


@pytest.mark.parametrize("outputs, inputs", [(8, 64), (16, 48)])
def test_a_matrix_that_does_not_fit_tiles_is_refused_with_the_reason(outputs, inputs):
    blocks = from_gguf(np.zeros((16, 2 * 34), np.uint8), Kind.Q8_0)
    part = blocks.rows(slice(0, outputs)).columns(0, inputs)
    reason = f"{inputs} inputs and {outputs} outputs cannot stay quantised"
    with pytest.raises(ValueError, match=reason):
        pack(part)


def test_types_that_are_not_kept_are_refused_with_their_name():
    with pytest.raises(ValueError, match="Q2_K is not kept"):
        from_gguf(np.zeros((16, 84), np.uint8), Kind.Q2_K)


def test_matrices_of_different_forms_are_not_joined():
    parts = [from_gguf(random_rows(kind, 16, 256), kind) for kind in (Kind.Q4_0, Kind.Q8_0)]
    with pytest.raises(ValueError, match="different forms"):
        joined(parts)
