"""The Hopper kernel equals dense attention, in the interpreter, which also finds races between its
warpgroups."""

from __future__ import annotations

import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmarks.gpu.cases import Case, truth
from tests.kernels.test_attend import (
    Shape,
    assert_same,
    few,
    make_case,
    with_moved_history,
    with_passed_pages,
)

if jax.__version_info__ < (0, 11, 2):
    pytest.skip("Mosaic GPU kernels need jax 0.11.2", allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.kernels import mosaic
from jaxserve.kernels.mosaic import Tiles
from jaxserve.kernels.mosaic.config import KernelConfig
from jaxserve.kernels.mosaic.tiles import pack, to_rows
from jaxserve.kernels.work_split import WorkSplit, split_work

SMALL = Tiles(keys=64, warpgroups=1, stages=2, blocks=3)
TWO = dataclasses.replace(SMALL, warpgroups=2)


@functools.cache
def compiled(tiles: Tiles, window: int | None, races: bool, dtype: str, softcap: float):
    interpret = plgpu.InterpretGPUParams(detect_races=races)
    return jax.jit(
        functools.partial(
            mosaic.attend,
            scale=0.3,
            softcap=softcap,
            window=window,
            tiles=tiles,
            interpret=interpret,
            dtype=dtype,
        )
    )


def assert_means_dense(
    case: Case,
    tiles: Tiles,
    window: int | None = None,
    races: bool = False,
    dtype: str = "bfloat16",
    out_dtype: str = "float32",
    softcap: float = 0,
    held: Case | None = None,
) -> None:
    quantized = tiles.narrow > 0
    out, lse = map(
        np.asarray,
        compiled(tiles, window, races, out_dtype, softcap)(
            *(held or case).arguments(dtype, quantized)
        ),
    )
    assert out.dtype == out_dtype and lse.dtype == np.float32
    assert_same(case.rounded(dtype, quantized), out, lse, window, softcap)


SHAPES = [
    (Shape(1, H=64), SMALL),
    (Shape(1, H=64, K=1, G=16, window=40), SMALL),
    (Shape(1, H=128, G=1, C=64, W=6), SMALL),
    (Shape(5, H=64, G=7, K=1), SMALL),
    (Shape(5, H=64, C=8, W=40, R=2), SMALL),
    (Shape(32, H=64, G=4, K=1, R=2), TWO),
    (Shape(64, H=64, G=2, K=1, C=64, W=6, R=2), TWO),
    (Shape(64, H=64, G=3, K=1, C=32, W=9, R=2), TWO),
    (Shape(130, H=64, G=2, K=1, C=128, W=4, R=1, window=70), TWO),
    (Shape(70, H=64, G=1, K=2, C=256, W=3, R=2), TWO),
    (Shape(64, H=128, G=4, K=1, C=128, W=4, R=1), dataclasses.replace(TWO, keys=128)),
    (Shape(3, H=256, G=4, K=1, C=16, R=2), SMALL),
    (Shape(3, H=96, G=4, K=1, C=16, R=2), SMALL),
    (Shape(64, H=96, G=2, K=1, C=32, W=9, R=2), TWO),
]


@pytest.mark.parametrize("shape, tiles", few(SHAPES, (1, 5, 12)), ids=str)
def test_the_kernel_is_dense_attention(shape, tiles):
    # rows less than a tile are stored otherwise in bfloat16
    for seed, out in enumerate(("float32", "bfloat16", "bfloat16")):
        assert_means_dense(make_case(shape, seed), tiles, shape.window, out_dtype=out)


@pytest.mark.parametrize("shape, tiles", few([SHAPES[1], SHAPES[6], SHAPES[11]], (0,)), ids=str)
def test_scores_have_a_soft_cap(shape, tiles):
    for softcap in (0.7, 50.0):
        assert_means_dense(make_case(shape, 1), tiles, shape.window, softcap=softcap)


@pytest.mark.parametrize("shape, tiles", few(SHAPES[3:8], (1, 3)), ids=str)
def test_blocks_that_all_queries_see_whole_lie_in_any_order(shape, tiles):
    case = with_moved_history(make_case(shape, 1), shape.C, 1)
    assert_means_dense(case, tiles, out_dtype="bfloat16")


WINDOWS = [pair for pair in SHAPES if pair[0].window]


@pytest.mark.parametrize("shape, tiles", WINDOWS, ids=str)
def test_pages_that_windows_have_passed_may_be_those_of_others(shape, tiles):
    case = make_case(shape, 1)
    held = with_passed_pages(case, shape.C, shape.window)
    assert_means_dense(case, tiles, shape.window, held=held)


@pytest.mark.parametrize("blocks", few([[1], [2], [5], [16], [60]], (1,)))
def test_the_result_does_not_depend_on_how_many_blocks_share_the_work(blocks):
    """Sixty blocks are more than there is work for: some have nothing to do, and each key tile of a
    query tile is a block's own partial result."""
    for shape, tiles in (
        (Shape(5, H=64, W=24), SMALL),
        (Shape(64, H=64, G=2, K=1, C=32, W=9, R=2), TWO),
    ):
        assert_means_dense(
            make_case(shape, blocks),
            dataclasses.replace(tiles, blocks=blocks),
            out_dtype="bfloat16",
        )


@pytest.mark.parametrize(
    "real", few([[[1]], [[0, 3]], [[1, 2, 5]], [[5]], [[]], [[*range(6)]]], (1, 4))
)
@pytest.mark.parametrize("blocks", [2, 7])
def test_rows_of_padding_are_no_work_wherever_they_are(real, blocks):
    case = make_case(Shape(5, H=64, C=8, W=40, R=6), 3)
    padding = np.setdiff1d(np.arange(6), np.array(list(real), int))
    case.q_pos[padding] = -1
    tiles = dataclasses.replace(SMALL, blocks=blocks)
    assert_means_dense(case, tiles, out_dtype="bfloat16")
    split = split_of(case, tiles)
    only = dataclasses.replace(
        case,
        q=np.delete(case.q, padding, 0),
        q_pos=np.delete(case.q_pos, padding, 0),
        slot=np.delete(case.slot, padding),
        entries=np.delete(case.entries, padding),
    )
    work = int((case.q_pos >= 0).any(1).sum())  # the case has a row of padding of its own
    assert split.total[1] == work <= len(list(real))
    if work:
        np.testing.assert_array_equal(split.blocks, split_of(only, tiles).blocks)
    else:
        assert not split.blocks[:, 3].any()


def split_of(case: Case, tiles: Tiles) -> WorkSplit:
    """How the work of a case is split."""
    R, T, K, G, _ = case.q.shape
    packing = pack(T, K, G, tiles.warpgroups, partial=True)
    config = KernelConfig(1.0, None, packing, tiles, R, case.pages.shape[3], True)
    whole = packing._replace(rows=config.tiles_per_row * config.tile_rows)
    pos = to_rows(jnp.asarray(case.q_pos)[..., None, None, None], whole, -1, G)[..., 0, 0]
    return jax.tree.map(
        np.asarray, split_work(pos, case.table, case.slot, case.entries, config.work)
    )


@pytest.mark.parametrize(
    "shape, tiles",
    [
        (Shape(1, H=64), SMALL),
        (Shape(64, H=64, G=2, K=1, C=32, W=9, R=2), TWO),
        (Shape(70, H=64, G=1, K=1, C=128, W=3, R=2), dataclasses.replace(TWO, stages=3)),
    ],
    ids=str,
)
def test_no_warpgroup_reads_what_another_has_not_finished(shape, tiles):
    assert_means_dense(make_case(shape, 1), tiles, races=True, out_dtype="bfloat16")


FAR = [Shape(1, H=64), Shape(64, H=64, C=256, W=4, K=1, G=2), Shape(64, H=64, K=1, G=2, window=40)]


@pytest.mark.parametrize("shape", few([[shape] for shape in FAR], (1,)), ids=str)
def test_positions_of_ten_million_tokens_fit(shape):
    for last in (10_000_000, 2**31 - 1025):
        assert_means_dense(make_case(shape, 1, last // shape.C - shape.W), TWO, shape.window)


def test_blocks_that_lie_millions_apart_meet_in_one_row():
    case = make_case(Shape(5, H=64), 2)
    row = case.entries.argmax()
    case.table[1, case.slot[row], : case.entries[row]] += np.linspace(
        0, 620_000, case.entries[row]
    ).astype(np.int32)
    case.q_pos[row] = 10_000_000 + np.arange(5)
    case.pages[:] = np.random.default_rng(0).standard_normal(case.pages.shape)
    assert_means_dense(case, SMALL)
    assert_means_dense(case, SMALL, 4_000_000)


def test_where_nothing_is_seen_the_result_is_zero_with_lse_of_minus_infinity():
    for window in (None, 40):
        case = make_case(Shape(3, H=64), 1)
        # no query; no key
        case.q_pos[0] = -1
        case.entries[1] = 0
        case.table[1, case.slot[2], : case.entries[2]] += 1000  # only later keys
        assert_means_dense(case, SMALL, window)


@pytest.mark.parametrize(
    "dtype, out", [("float16", "float16"), ("bfloat16", "bfloat16"), ("float16", "float32")]
)
def test_types_of_pages_and_of_results(dtype, out):
    assert_means_dense(make_case(Shape(5, H=64), 3), SMALL, dtype=dtype, out_dtype=out)


EIGHT = dict(narrow=3, stages=2)
NARROW = [
    (Shape(1, H=64), SMALL),
    (Shape(1, H=128, G=8, K=1, C=64, W=6, window=70), SMALL),
    (Shape(5, H=64, C=8, W=40, R=2), SMALL),
    (Shape(64, H=64, G=2, K=1, C=32, W=9, R=2), TWO),
    (Shape(70, H=96, G=1, K=2, C=128, W=3, R=2), TWO),
]


@pytest.mark.parametrize("shape, tiles", few(NARROW, (3,)), ids=str)
def test_pages_of_eight_bits_are_dequantised(shape, tiles):
    for out in ("float32", "bfloat16"):
        assert_means_dense(
            make_case(shape, 1), dataclasses.replace(tiles, **EIGHT), shape.window, out_dtype=out
        )


@pytest.mark.parametrize("shape, tiles", few([NARROW[0], NARROW[3]], (1,)), ids=str)
def test_no_warpgroup_reads_a_tile_that_is_not_dequantised_yet(shape, tiles):
    assert_means_dense(
        make_case(shape, 1),
        dataclasses.replace(tiles, narrow=2),
        shape.window,
        races=True,
        out_dtype="bfloat16",
    )


@pytest.mark.parametrize(
    "shape, dtype, message",
    [
        (Shape(1, H=64), "float32", "pages of float32"),
        (Shape(1, H=16), "bfloat16", "a head dim of 16"),
        (Shape(1, H=64, C=4, W=60), "bfloat16", "pages of 4 tokens"),
        (Shape(1, H=64, C=48, W=9), "bfloat16", "pages of 48 tokens"),
    ],
)
def test_what_the_kernel_lacks_is_refused_with_the_reason(shape, dtype, message):
    case = make_case(shape, 1)
    with pytest.raises(NotImplementedError, match=message):
        mosaic.attend(*case.arguments(dtype), scale=1.0)


@pytest.mark.parametrize(
    "shape, tiles",
    [(Shape(5, H=64), SMALL), (Shape(64, H=64, G=2, K=1, C=32, W=9, R=2), TWO)],
    ids=str,
)
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
    attend = functools.partial(
        mosaic.attend, scale=0.3, tiles=tiles, interpret=plgpu.InterpretGPUParams()
    )
    first, second = (hop.arguments("bfloat16") for hop in hops)
    out, lse = map(
        np.asarray,
        jax.jit(lambda first, second: attend(*second, before=attend(*first)))(first, second),
    )
    right_out, right_lse = truth(case.rounded("bfloat16"), 0.3, None)
    real = case.q_pos >= 0
    np.testing.assert_allclose(lse[real], right_lse[real], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(out[real], right_out[real], atol=0.02)


@pytest.mark.parametrize(
    "shape, tiles",
    [(Shape(5, H=64), SMALL), (Shape(64, H=64, G=2, K=1, C=256, W=4, R=2), TWO)],
    ids=str,
)
def test_pages_are_sent_on_while_they_are_attended_over(shape, tiles):
    """To the same device: one that is elsewhere is beyond the interpreter."""
    case = make_case(shape, 1)
    case.pages[:] = np.random.default_rng(0).standard_normal(case.pages.shape)
    send = functools.partial(
        mosaic.attend_and_send,
        scale=0.3,
        tiles=dataclasses.replace(tiles, blocks=5),
        ring=None,
        senders=2,
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    arguments = case.arguments("bfloat16")
    out, lse, received = jax.jit(send)(*arguments)
    right_out, right_lse = truth(case.rounded("bfloat16"), 0.3, None)
    real = case.q_pos >= 0
    np.testing.assert_allclose(np.asarray(lse)[real], right_lse[real], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(np.asarray(out)[real], right_out[real], atol=0.02)
    np.testing.assert_array_equal(np.asarray(received.kv), arguments[2].kv)
