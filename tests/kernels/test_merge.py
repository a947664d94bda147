"""The merge of partial attention is associative and commutative, and merging the parts of any
partition of the keys gives attention over all."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.kernels.kv_pages import KVPages
from jaxserve.kernels.merge import merge
from jaxserve.kernels.reference import attend
from tests.examples import examples

TOLERANCE = dict(rtol=1e-5, atol=1e-5)
PIECES = 4
ROWS = 6
H = 8
BLOCKS = 12
C = 4
merged = jax.jit(merge)
attended = jax.jit(functools.partial(attend, scale=0.5))


def partials(seed: int, magnitude: float) -> tuple[np.ndarray, np.ndarray]:
    """Pieces of which some saw nothing, and one row of which none saw anything."""
    rng = np.random.default_rng(seed)
    lses = rng.normal(0, magnitude, (PIECES, ROWS)).astype(np.float32)
    lses[rng.random(lses.shape) < 0.3] = -np.inf
    lses[:, 0] = -np.inf
    outs = np.where(np.isneginf(lses)[..., None], 0, rng.standard_normal((PIECES, ROWS, H)))
    return outs.astype(np.float32), lses


def assert_same(a, b) -> None:
    np.testing.assert_allclose(a[0], b[0], **TOLERANCE)
    np.testing.assert_allclose(a[1], b[1], **TOLERANCE)


seeds = st.integers(0, 2**32 - 1)
magnitudes = st.sampled_from([0.0, 1.0, 30.0, 1e4])


@settings(max_examples=examples(60), deadline=None)
@given(seeds, magnitudes)
def test_merging_in_any_grouping_and_order_is_the_same(seed, magnitude):
    outs, lses = partials(seed, magnitude)
    whole = merged(outs, lses)
    order = np.random.default_rng(seed).permutation(PIECES)
    assert_same(merged(outs[order], lses[order]), whole)
    first = merged(outs[order[:2]], lses[order[:2]])
    second = merged(outs[order[2:]], lses[order[2:]])
    assert_same(merged(*map(jnp.stack, zip(first, second))), whole)
    left = functools.reduce(
        lambda a, b: merged(*map(jnp.stack, zip(a, b))), zip(outs[order], lses[order])
    )
    assert_same(left, whole)


@settings(max_examples=examples(30), deadline=None)
@given(seeds, magnitudes)
def test_a_piece_that_saw_nothing_changes_nothing(seed, magnitude):
    outs, lses = partials(seed, magnitude)
    nothing = np.zeros((1, ROWS, H), np.float32), np.full((1, ROWS), -np.inf, np.float32)
    assert_same(
        merged(np.concatenate([outs, nothing[0]]), np.concatenate([lses, nothing[1]])),
        merged(outs, lses),
    )


def test_where_no_piece_saw_anything_the_result_is_zero_with_lse_of_minus_infinity():
    out, lse = merged(*partials(0, 1.0))
    assert np.isneginf(lse[0]) and (np.asarray(out[0]) == 0).all()
    assert np.isfinite(out).all() and not np.isnan(lse).any()


@settings(max_examples=examples(40), deadline=None)
@given(seeds, st.lists(st.integers(0, PIECES - 1), min_size=BLOCKS, max_size=BLOCKS))
def test_the_merge_over_any_partition_of_the_blocks_is_attention_over_all(seed, owner):
    rng = np.random.default_rng(seed)
    K = 2
    G = 3
    T = 5
    q = rng.standard_normal((1, T, K, G, H)).astype(np.float32)
    q_pos = rng.integers(0, BLOCKS * C, (1, T)).astype(np.int32)
    pages = KVPages(rng.standard_normal((BLOCKS, K, 2, C, H)).astype(np.float32))
    page = rng.permutation(BLOCKS)
    pieces = []
    for piece in (range(PIECES), *range(PIECES)):
        blocks = [block for block in range(BLOCKS) if owner[block] in np.atleast_1d(piece)]
        table = np.zeros((2, 1, BLOCKS), np.int32)
        table[:, 0, : len(blocks)] = page[blocks], blocks
        pieces.append(
            attended(
                q, q_pos, pages, table, np.zeros(1, np.int32), np.array([len(blocks)], np.int32)
            )
        )
    whole, *parts = pieces
    assert_same(merged(*map(jnp.stack, zip(*parts))), whole)
