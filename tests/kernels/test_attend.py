"""Every implementation of attention over pages equals dense attention in f64."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
import pytest

from experiments.benchmarks.gpu.cases import HUGE, Case, draw, truth
from jaxserve.kernels import ops, xla

TOLERANCE = dict(rtol=2e-5, atol=2e-5)
PORTABLE = ["reference", "xla", "cpu"]  # the other has tests of its own


@dataclass
class Shape:
    """T query tokens a row, K kv heads, G query heads of each, H head dim, C tokens a page, W table
    entries, `vectors` of a token and kv head on a page, numbers of a value (None: H)."""

    T: int
    K: int = 2
    G: int = 3
    H: int = 16
    C: int = 16
    W: int = 24
    window: int | None = None
    R: int = 4
    vectors: int = 2
    value_dim: int | None = None

    def __str__(self) -> str:
        return f"T{self.T}-K{self.K}-G{self.G}-H{self.H}-C{self.C}" + "".join(
            f"-{name}{value}"
            for name, value in (("window", self.window), ("value", self.value_dim))
            if value
        )


SHAPES = [
    Shape(1),
    Shape(1, window=40),
    Shape(1, K=1, G=1, H=16, C=256, W=3),
    Shape(1, K=3, G=16, R=1),
    Shape(1, K=1, G=4, H=256, C=32, W=4),
    Shape(40, K=1, G=2, H=256, C=32, W=4, R=2),
    Shape(1, K=8, G=4, C=1, W=70),
    Shape(5, G=7),
    Shape(5, K=1, G=8, C=4, W=90, window=7),
    Shape(64, K=3),
    Shape(64, C=64, W=6, window=40),
    Shape(512, W=60, R=2),
    Shape(512, K=1, G=2, C=32, W=40, window=100, R=2),
]
# Values that are the first numbers of keys, and values shorter than keys
VALUES = [
    Shape(1, K=1, G=16, H=576, vectors=1, value_dim=512, R=2, W=6),
    Shape(1, K=1, G=40, H=48, vectors=1, value_dim=32, window=70),
    Shape(1, K=1, G=3, H=48, C=4, W=80, vectors=1, value_dim=32),
    Shape(5, K=1, G=16, H=80, C=64, W=6, vectors=1, value_dim=64, window=100),
    Shape(64, K=1, G=8, H=576, vectors=1, value_dim=512, R=2, W=6),
    Shape(1, G=4, H=192, value_dim=128),
    Shape(64, G=2, H=192, value_dim=128),
    Shape(5, K=3, G=9, H=32, C=256, W=3, value_dim=16),
]


def make_case(shape: Shape, seed: int, first_block: int = 0) -> Case:
    """Rows of random lengths at random positions, over random subsets of their blocks, on permuted
    pages. Tokens that were not written are NaN, invalid table entries nonsense. The last row is
    empty, and so is the table of the first row of every third case."""
    rng = np.random.default_rng([seed, shape.T])

    def span(row: int) -> tuple[int, int]:
        length = 0 if row == shape.R - 1 > 0 else int(rng.integers(1, shape.T + 1))
        return length, int(rng.integers(length, shape.W * shape.C + 1))

    return draw(
        shape, rng, span, lambda row: rng.random() < 0.8 and bool(row or seed % 3), first_block
    )


def with_moved_history(case: Case, size: int, seed: int) -> Case:
    """The case with the blocks that all queries of a row see whole in any order, as after they have
    come from other lanes. size: tokens of a page."""
    rng = np.random.default_rng(seed)
    table = case.table.copy()
    for row, slot in enumerate(case.slot):
        queries = case.q_pos[row][case.q_pos[row] >= 0]
        blocks = table[1, slot, : case.entries[row]]
        older = int((blocks < queries.min(initial=HUGE) // size).sum())
        table[:, slot, :older] = table[:, slot, rng.permutation(older)]
    return dataclasses.replace(case, table=table)


def with_passed_pages(case: Case, size: int, window: int) -> Case:
    """The case with NaN on the pages of blocks that no query of their row sees through the window,
    as where other sequences have them by now. size: tokens of a page."""
    pages = case.pages.copy()
    for row, slot in enumerate(case.slot):
        queries = case.q_pos[row][case.q_pos[row] >= 0]
        page, block = case.table[:, slot, : case.entries[row]]
        passed = (block + 1) * size <= queries.min(initial=HUGE) - window + 1
        pages[page[passed]] = np.nan
    assert not np.array_equal(pages, case.pages, equal_nan=True), "no page was passed"
    return dataclasses.replace(case, pages=pages)


@functools.cache
def compiled(
    name: str, window: int | None, softcap: float = 0, value_dim: int | None = None
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    return jax.jit(
        functools.partial(
            ops.attend,
            scale=0.3,
            softcap=softcap,
            window=window,
            value_dim=value_dim,
            implementation=name,
        )
    )


def assert_means_truth(
    name: str, case: Case, window: int | None, softcap: float = 0, held: Case | None = None
) -> None:
    """held: the case as memory has it, where that also has what must not be seen."""
    attend = compiled(name, window, softcap, case.value_dim)
    out, lse = map(np.asarray, attend(*(held or case).arguments()))
    right_out, right_lse = truth(case, 0.3, window, softcap)
    assert out.dtype == lse.dtype == np.float32
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(right_lse))
    np.testing.assert_allclose(lse, right_lse, **TOLERANCE)
    np.testing.assert_allclose(out, right_out, **TOLERANCE)


def assert_same(
    case: Case, out: np.ndarray, lse: np.ndarray, window: int | None = None, softcap: float = 0
) -> None:
    """Compares out and lse of a kernel that rounds weights to the type of pages with attention in
    f64."""
    right_out, right_lse = truth(case, 0.3, window, softcap)
    real = case.q_pos >= 0  # what padding gets means nothing
    out, lse, right_out, right_lse = (x[real] for x in (out, lse, right_out, right_lse))
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(right_lse))
    np.testing.assert_allclose(lse, right_lse, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(out.astype(np.float32), right_out, atol=0.02)


def few(cases, numbers):
    """The cases as parameters: those with these numbers run by default, the rest with `-m matrix`,
    for the interpreter takes seconds for each."""
    return [
        pytest.param(*case, marks=[] if number in numbers else pytest.mark.matrix)
        for number, case in enumerate(cases)
    ]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", PORTABLE)
def test_attention_over_pages_is_dense_attention(name, shape):
    for seed in range(3):  # of three cases one has a row without keys
        assert_means_truth(name, make_case(shape, seed), shape.window)


@pytest.mark.parametrize("shape", VALUES, ids=str)
@pytest.mark.parametrize("name", PORTABLE)
def test_values_may_be_part_of_keys_or_shorter(name, shape):
    for seed in range(2):
        assert_means_truth(name, make_case(shape, seed), shape.window)
    if shape in VALUES[1:4]:
        assert_means_truth(name, make_case(shape, 0), shape.window, softcap=2.0)


@pytest.mark.parametrize("shape", SHAPES[:2] + SHAPES[4:7] + SHAPES[-4:-2], ids=str)
@pytest.mark.parametrize("softcap", [0.7, pytest.param(50.0, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("name", PORTABLE)
def test_logits_have_a_soft_cap(name, softcap, shape):
    assert_means_truth(name, make_case(shape, 1), shape.window, softcap)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if not shape.window], ids=str)
@pytest.mark.parametrize("name", PORTABLE)
def test_blocks_that_all_queries_see_whole_lie_in_any_order(name, shape):
    for seed in range(3):
        case = with_moved_history(make_case(shape, seed), shape.C, seed)
        assert_means_truth(name, case, shape.window)


@pytest.mark.parametrize(
    "shape", [Shape(1), Shape(1, C=256, W=4), Shape(64, C=256, W=4), Shape(64, window=40)], ids=str
)
@pytest.mark.parametrize("name", PORTABLE)
def test_positions_of_ten_million_tokens_fit(name, shape):
    for last in (10_000_000, HUGE - 1024):
        assert_means_truth(name, make_case(shape, 1, last // shape.C - shape.W), shape.window)


@pytest.mark.parametrize("name", PORTABLE)
def test_blocks_that_lie_millions_apart_meet_in_one_row(name):
    case = make_case(Shape(5), 2)
    row = case.entries.argmax()
    case.table[1, case.slot[row], : case.entries[row]] += np.linspace(
        0, 620_000, case.entries[row]
    ).astype(np.int32)
    case.q_pos[row] = 10_000_000 + np.arange(5)
    case.pages[:] = np.random.default_rng(0).standard_normal(case.pages.shape)
    assert case.entries[row] > 5
    assert_means_truth(name, case, None)
    assert_means_truth(name, case, 4_000_000)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.window], ids=str)
@pytest.mark.parametrize("name", PORTABLE)
def test_pages_that_windows_have_passed_may_be_those_of_others(name, shape):
    case = make_case(shape, 1)
    held = with_passed_pages(case, shape.C, shape.window)
    assert_means_truth(name, case, shape.window, held=held)


@pytest.mark.parametrize("name", PORTABLE)
def test_where_nothing_is_seen_the_result_is_zero_with_lse_of_minus_infinity(name):
    for window in (None, 40):
        for T in (1, 64):
            case = make_case(Shape(T), 1)
            # no query; no key
            case.q_pos[0] = -1
            case.entries[1] = 0
            case.table[1, case.slot[2], : case.entries[2]] += 1000  # only later keys
            out, lse = map(np.asarray, compiled(name, window)(*case.arguments()))
            assert (out == 0).all() and np.isneginf(lse).all()


@pytest.mark.parametrize("name", PORTABLE)
def test_every_column_of_a_row_is_its_own_query(name):
    """A row's answer is that of its tokens one by one: nothing leaks between the tokens of a row,
    or from row to row."""
    case = make_case(Shape(5), 4)
    out, lse = map(np.asarray, compiled(name, None)(*case.arguments()))
    for t in range(5):
        alone = dataclasses.replace(case, q=case.q[:, t : t + 1], q_pos=case.q_pos[:, t : t + 1])
        one_out, one_lse = map(np.asarray, compiled(name, None)(*alone.arguments()))
        np.testing.assert_allclose(one_out[:, 0], out[:, t], **TOLERANCE)
        np.testing.assert_allclose(one_lse[:, 0], lse[:, t], **TOLERANCE)


@pytest.mark.parametrize("name", PORTABLE)
def test_several_rows_may_be_of_one_sequence(name):
    case = make_case(Shape(64, R=1), 5)
    q = case.q.reshape(2, 32, *case.q.shape[2:])
    q_pos = case.q_pos.reshape(2, 32)
    halves = dataclasses.replace(
        case, q=q, q_pos=q_pos, slot=case.slot.repeat(2), entries=case.entries.repeat(2)
    )
    whole = compiled(name, None)(*case.arguments())
    split = compiled(name, None)(*halves.arguments())
    for a, b in zip(whole, split):
        np.testing.assert_allclose(np.asarray(a).reshape(b.shape), b, **TOLERANCE)


@pytest.mark.parametrize("name", PORTABLE)
def test_half_precision_pages_differ_by_rounding_only(name):
    case = make_case(Shape(64), 3)
    out, lse = compiled(name, None)(*case.arguments("bfloat16"))
    right_out, right_lse = truth(case.rounded("bfloat16"), 0.3, None)
    np.testing.assert_allclose(out, right_out, atol=0.03)
    np.testing.assert_allclose(lse, right_lse, atol=0.03)


@pytest.mark.parametrize(
    "shape", [Shape(1), Shape(5, C=4, W=90, window=7), Shape(64, C=64, W=6)], ids=str
)
@pytest.mark.parametrize("name", PORTABLE)
def test_quantised_pages_are_attended_to_as_their_dequantised_values(name, shape):
    case = make_case(shape, 3)
    out, lse = map(np.asarray, compiled(name, shape.window)(*case.arguments(quantized=True)))
    right_out, right_lse = truth(case.rounded(quantized=True), 0.3, shape.window)
    np.testing.assert_allclose(lse, right_lse, **TOLERANCE)
    np.testing.assert_allclose(out, right_out, **TOLERANCE)


def test_a_shape_that_an_implementation_lacks_is_refused_with_the_reason():
    case = make_case(Shape(xla.QUERY_TILE + 1, R=1, W=60), 1)
    with pytest.raises(NotImplementedError, match=f"rows of {xla.QUERY_TILE + 1} tokens"):
        ops.attend(*case.arguments(), scale=1.0, implementation="xla")


def test_a_name_that_is_no_implementation_is_an_error():
    with pytest.raises(KeyError, match="fastest"):
        ops.attend(*make_case(Shape(1), 1).arguments(), scale=1.0, implementation="fastest")
