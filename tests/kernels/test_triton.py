"""The Triton kernel equals dense attention, in the Pallas interpreter."""

from __future__ import annotations

import copy
import dataclasses
import functools

import jax
import numpy as np
import pytest

pytest.importorskip("jax.experimental.pallas.triton", reason="jax has no compiler for Triton")

from experiments.benchmarks.gpu.cases import Case
from jaxserve.kernels import ops, triton
from jaxserve.kernels.kv_pages import pool_shapes
from jaxserve.kernels.triton import Tiles, tiles_for
from tests.kernels import cuda
from tests.kernels.test_attend import (
    Shape,
    assert_same,
    few,
    make_case,
    with_moved_history,
    with_passed_pages,
)

SMALL = Tiles(rows=16, keys=64, warps=4, stages=2, blocks=3)
LARGE = dataclasses.replace(SMALL, rows=64)


@functools.cache
def compiled(tiles: Tiles, window: int | None, dtype: str, softcap: float):
    return jax.jit(
        functools.partial(
            triton.attend,
            scale=0.3,
            softcap=softcap,
            window=window,
            tiles=tiles,
            interpret=True,
            dtype=dtype,
        )
    )


def assert_means_dense(
    case: Case,
    tiles: Tiles,
    window: int | None = None,
    dtype: str = "bfloat16",
    out_dtype: str = "float32",
    softcap: float = 0,
    quantized: bool = False,
    held: Case | None = None,
) -> None:
    """Compares with dense attention. held: the case with the pages that the kernel is given."""
    out, lse = map(
        np.asarray,
        compiled(tiles, window, out_dtype, softcap)(*(held or case).arguments(dtype, quantized)),
    )
    assert out.dtype == out_dtype and lse.dtype == np.float32
    assert_same(case.rounded(dtype, quantized), out, lse, window, softcap)


SHAPES = [
    (Shape(1, H=64), SMALL),
    (Shape(1, H=64, K=1, G=16, window=40), SMALL),
    (Shape(1, H=128, G=1, C=64, W=6), SMALL),
    (Shape(1, H=64, G=4, K=1, C=256, W=3), SMALL),
    (Shape(5, H=64, G=7, K=1), LARGE),
    (Shape(5, H=64, G=2, K=1, C=1, W=140, R=2), SMALL),
    (Shape(32, H=64, G=4, K=1, R=2), LARGE),
    (Shape(64, H=64, G=3, K=1, C=32, W=9, R=2), LARGE),
    (Shape(130, H=64, G=2, K=1, C=128, W=4, R=1, window=70), LARGE),
    (Shape(70, H=64, G=1, K=2, C=256, W=3, R=2), dataclasses.replace(LARGE, rows=128)),
    (Shape(3, H=256, G=4, K=1, C=16, R=2), dataclasses.replace(SMALL, keys=32)),
]


@pytest.mark.parametrize("shape, tiles", few(SHAPES, (1, 3, 4, 8)), ids=str)
def test_the_kernel_is_dense_attention(shape, tiles):
    for seed, out in enumerate(("float32", "bfloat16")):
        assert_means_dense(make_case(shape, seed), tiles, shape.window, out_dtype=out)


@pytest.mark.parametrize("shape, tiles", few([SHAPES[1], SHAPES[7]], (0,)), ids=str)
def test_scores_have_a_soft_cap(shape, tiles):
    for softcap in (0.7, 50.0):
        assert_means_dense(make_case(shape, 1), tiles, shape.window, softcap=softcap)


@pytest.mark.parametrize("shape, tiles", few([SHAPES[4], SHAPES[6], SHAPES[9]], (0,)), ids=str)
def test_blocks_that_all_queries_see_whole_lie_in_any_order(shape, tiles):
    case = with_moved_history(make_case(shape, 1), shape.C, 1)
    assert_means_dense(case, tiles)


@pytest.mark.parametrize("shape, tiles", few([SHAPES[1], SHAPES[8]], (0,)), ids=str)
def test_pages_that_windows_have_passed_may_be_those_of_others(shape, tiles):
    case = make_case(shape, 1)
    held = with_passed_pages(case, shape.C, shape.window)
    assert_means_dense(case, tiles, shape.window, held=held)


@pytest.mark.parametrize("blocks", few([[1], [2], [5], [60]], (0, 3)))
def test_the_result_does_not_depend_on_how_many_blocks_share_the_work(blocks):
    """Sixty blocks are more than there is work for: some have nothing to do, and each key tile of a
    query tile is a block's own partial result."""
    tiles = dataclasses.replace(SMALL, blocks=blocks)
    assert_means_dense(make_case(Shape(5, H=64, W=24), 1), tiles, out_dtype="bfloat16")


def test_rows_of_padding_are_no_work_wherever_they_are():
    for real in ([1, 2, 5], []):
        case = make_case(Shape(5, H=64, C=8, W=40, R=6), 3)
        case.q_pos[np.setdiff1d(np.arange(6), np.array(real, int))] = -1
        assert_means_dense(case, SMALL)


def test_positions_of_two_thousand_million_tokens_fit():
    for shape in (Shape(1, H=64), Shape(1, H=64, window=40)):
        first = (2**31 - 1025) // shape.C - shape.W
        assert_means_dense(make_case(shape, 1, first), SMALL, shape.window)


def test_where_nothing_is_seen_the_result_is_zero_with_lse_of_minus_infinity():
    for window in (None, 40):
        case = make_case(Shape(3, H=64), 1)
        # no query; no key
        case.q_pos[0] = -1
        case.entries[1] = 0
        case.table[1, case.slot[2], : case.entries[2]] += 1000  # only later keys
        assert_means_dense(case, SMALL, window)


def test_pages_and_results_of_float16():
    for out in ("float16", "float32"):
        assert_means_dense(make_case(Shape(5, H=64), 3), SMALL, dtype="float16", out_dtype=out)


@pytest.mark.parametrize(
    "shape, tiles", few([SHAPES[0], SHAPES[2], SHAPES[7], SHAPES[8]], (0, 3)), ids=str
)
def test_pages_of_eight_bits_are_dequantised(shape, tiles):
    assert_means_dense(make_case(shape, 1), tiles, shape.window, quantized=True)


@pytest.mark.parametrize("shape, tiles", [(Shape(5, H=64), SMALL)], ids=str)
def test_a_hop_of_a_ring_continues_from_the_keys_before(shape, tiles):
    """Each row's entries are dealt to two hops: the second, given what the first returned, returns
    what all of them give."""
    case = make_case(shape, 2)
    hops = [copy.deepcopy(case) for _ in range(2)]
    for row, slot in enumerate(case.slot):
        held = np.arange(case.entries[row])
        for hop, mine in zip(hops, (held % 3 == 0, held % 3 != 0)):
            hop.entries[row] = mine.sum()
            hop.table[:, slot, : mine.sum()] = case.table[:, slot, : case.entries[row]][:, mine]
    attend = functools.partial(triton.attend, scale=0.3, tiles=tiles, interpret=True)
    first, second = (hop.arguments("bfloat16") for hop in hops)
    out, lse = map(
        np.asarray,
        jax.jit(lambda first, second: attend(*second, before=attend(*first)))(first, second),
    )
    assert_same(case.rounded("bfloat16"), out, lse)


@pytest.mark.parametrize(
    "shape, dtype, message",
    [
        (Shape(1, H=64), "float32", "pages of float32"),
        (Shape(1, H=96), "bfloat16", "a head dim of 96"),
        (Shape(1, H=64, C=48, W=9), "bfloat16", "pages of 48 tokens"),
        (Shape(1, H=64, K=1, vectors=1, value_dim=32), "bfloat16", "one vector per token"),
    ],
)
def test_what_the_kernel_lacks_is_refused_with_the_reason(shape, dtype, message):
    case = make_case(shape, 1)
    with pytest.raises(NotImplementedError, match=message):
        triton.attend(*case.arguments(dtype), scale=1.0, value_dim=shape.value_dim)


@pytest.mark.parametrize("pages", [4096, 2**18])  # offsets of 32 and of 64 bits
@pytest.mark.parametrize("kv", ["bfloat16", "float8_e4m3fn"])
def test_lowers_to_two_kernels(kv, pages):
    array = lambda shape, dtype="int32": jax.ShapeDtypeStruct(shape, np.dtype(dtype))
    pool = pool_shapes((pages, 8, 2, 64, 128), np.dtype(kv))
    row = array((4,))
    attend = functools.partial(triton.attend, scale=0.1, dtype=np.dtype("bfloat16"))
    q = array((4, 1, 8, 4, 128), "bfloat16")
    lowered = cuda.lower(attend, q, array((4, 1)), pool, array((2, 4, 64)), row, row)
    assert lowered.as_text().count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 2


@pytest.mark.parametrize("capability", ["8.0", "8.6", "8.9", "9.0", "10.0", "12.0"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_tiles_fit_every_gpu(capability, dtype):
    """A block has all rows of a decode in one query tile, and its tiles fit into shared memory."""
    shared = 99 * 1024 if capability in ("8.6", "8.9", "12.0") else 163 * 1024
    for head_dim in (64, 128, 256):
        for rows in (1, 8, 17, 64, 8192):
            tiles = tiles_for(capability, 100, (4, rows, 8, 1, head_dim), dtype)
            assert tiles.shared_bytes(head_dim, np.dtype(dtype).itemsize) <= shared
            assert tiles.rows >= min(rows, 64) and tiles.blocks % 100 == 0


def test_gpus_since_ampere_choose_it_where_the_hopper_kernel_is_not(monkeypatch):
    class Gpu:
        compute_capability = "8.0"

    pages = jax.ShapeDtypeStruct((64, 8, 2, 64, 128), np.dtype("bfloat16"))
    q = jax.ShapeDtypeStruct((4, 1, 8, 4, 128), np.dtype("bfloat16"))
    assert "Ampere" in ops.unsupported(q, pages)["triton"]  # on a CPU
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [Gpu])
    found = ops.unsupported(q, pages)
    assert found["triton"] is None and "Hopper" in found["mosaic"]
    wide = jax.ShapeDtypeStruct((64, 8, 2, 64, 96), np.dtype("bfloat16"))
    assert "a head dim of 96" in ops.unsupported(q, wide)["triton"]
    Gpu.compute_capability = "7.5"
    assert "Ampere" in ops.unsupported(q, pages)["triton"]
