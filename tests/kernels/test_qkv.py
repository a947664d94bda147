"""Queries, keys and values: the kernel for Hopper prepares and writes what plain jnp does, in the
interpreter, which also finds races."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine.attention_check import WriteCase
from jaxserve.kernels import ops
from jaxserve.kernels.kv_pages import FP8
from jaxserve.kernels.qkv import Projected

if jax.__version_info__ < (0, 11, 2):
    pytest.skip("Mosaic GPU kernels need jax 0.11.2", allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.kernels import mosaic

BF16 = np.dtype("bfloat16")
QWEN = WriteCase(8, 6, 4, 128, True, 1e-6, (2, 2, 16, 128), BF16, BF16)
SHAPES = {
    "a decode of Qwen 3": QWEN,
    "one token, without norms, of Llama 3": dataclasses.replace(QWEN, width=1, normed=False),
    "a head dim of 64, one query head": dataclasses.replace(
        QWEN, width=3, rows=3, group=1, rotated=64, page=(3, 2, 8, 64)
    ),
    "eight query heads, not rotated": dataclasses.replace(QWEN, rows=10, group=8, rotated=0),
    "gated queries, partly rotated, a head dim of 256": dataclasses.replace(
        QWEN, rows=6, group=2, rotated=64, page=(1, 2, 16, 256)
    ),
    "more tokens than a block has": dataclasses.replace(QWEN, width=70, page=(1, 2, 64, 128)),
    "8 bits": dataclasses.replace(QWEN, kv_dtype=FP8),
    "8 bits, more tokens than a block has, a head dim of 256": dataclasses.replace(
        QWEN, width=70, rows=3, group=1, rotated=256, page=(1, 2, 16, 256), kv_dtype=FP8
    ),
    "float16": dataclasses.replace(QWEN, dtype=np.dtype("float16"), kv_dtype=np.dtype("float16")),
}


@pytest.mark.parametrize("case", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize("blocks", [1, 132])  # so few that each has all heads of a kv head, and one
def test_the_kernel_prepares_and_writes_as_plain_jnp(case, blocks):
    heads, norms, cos_sin, pages, page, offset = case.arguments()
    qkv = Projected(heads, case.group, norms, case.eps, cos_sin)
    right_q, right = ops.write_qkv(qkv, pages, page, offset, implementation="xla")
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    q, written = mosaic.write_qkv(qkv, pages, page, offset, blocks=blocks, interpret=interpret)
    wide = lambda x: np.asarray(x, np.float32)
    np.testing.assert_allclose(wide(q), wide(right_q), rtol=0.008, atol=0.008)
    rounding = 0.13 if case.kv_dtype == FP8 else 0.008  # of 3 bits, and of 7
    for ours, theirs in zip(jax.tree.leaves(written), jax.tree.leaves(right)):
        np.testing.assert_allclose(wide(ours), wide(theirs), rtol=rounding, atol=0.008)
    untouched = np.ones(pages.kv.shape[:2] + pages.kv.shape[4:5], bool)
    real = page < pages.kv.shape[1]
    untouched[0, page[real], offset[real]] = False
    same = wide(written.kv) == wide(pages.kv)
    assert same.all((2, 3, 5))[untouched].all(), "a token without a place was written"


def test_zeros_and_numbers_that_are_none_are_quantised_as_by_plain_jnp():
    case = dataclasses.replace(QWEN, width=4, normed=False, rotated=0, kv_dtype=FP8)
    heads, _, _, pages, _, offset = case.arguments()
    heads = heads.at[0].set(0).at[1, :, :, 3].set(jnp.nan).at[2, :, :, 5].set(jnp.inf)
    heads = heads.at[3].mul(1e-30)
    page = np.arange(4, dtype=np.int32)
    qkv = Projected(heads, case.group)
    _, right = ops.write_qkv(qkv, pages, page, offset, implementation="xla")
    _, ours = mosaic.write_qkv(qkv, pages, page, offset, interpret=plgpu.InterpretGPUParams())
    both = [np.asarray(pages.dequantize(jnp.float32)) for pages in (ours, right)]
    np.testing.assert_array_equal(*both)
    assert np.isnan(both[0][0, 1:3, :, :, offset[1:3]]).any((1, 2, 3)).all()


def test_padding_is_written_nowhere_whatever_it_holds():
    case = dataclasses.replace(QWEN, width=4)
    heads, norms, cos_sin, pages, _, offset = case.arguments()
    heads = heads.at[jnp.array([1, 3])].set(jnp.nan)
    page = np.array([0, pages.kv.shape[1], 1, 2**30], np.int32)
    qkv = Projected(heads, case.group, norms, case.eps, cos_sin)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    q, written = mosaic.write_qkv(qkv, pages, page, offset, interpret=interpret)
    assert np.isfinite(np.asarray(written.kv, np.float32)).all()
    assert np.isfinite(np.asarray(q, np.float32)[[0, 2]]).all()


@pytest.mark.parametrize(
    "kv, half, message",
    [
        (jax.ShapeDtypeStruct((1, 9, 2, 2, 16, 128), "float32"), 64, "pages of float32"),
        (jax.ShapeDtypeStruct((1, 9, 2, 2, 16, 64), "float8_e4m3fn"), 32, "64 in float8_e4m3fn"),
        (jax.ShapeDtypeStruct((1, 9, 2, 2, 16, 96), "bfloat16"), 48, "a head dim of 96"),
        (jax.ShapeDtypeStruct((1, 9, 2, 2, 16, 128), "bfloat16"), 8, "16 rotated numbers"),
    ],
)
def test_what_is_not_supported_is_said(kv, half, message):
    heads = jax.ShapeDtypeStruct((4, 2, 6, kv.shape[-1]), "bfloat16")
    with pytest.raises(NotImplementedError, match=message):
        mosaic.check_write_qkv(heads, half, kv)


def test_other_devices_prepare_and_write_without_the_kernel():
    heads = jax.ShapeDtypeStruct((4, 2, 6, 128), "bfloat16")
    kv = jax.ShapeDtypeStruct((1, 9, 2, 2, 16, 128), "bfloat16")
    assert ops.choose_write_qkv("cpu", heads, 64, kv) == "xla"
