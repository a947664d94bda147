"""Rows of a step: positions, blocks and pages of tokens, up to the longest contexts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.sharding.rows import local_rows, spread_rows

PAGES = 50


def int32(*values) -> list[np.ndarray]:
    return [np.asarray(value, np.int32) for value in values]


@functools.cache
def compiled(f, width: int, size: int):
    return jax.jit(lambda *args: f(*args[:-1], width, args[-1], PAGES, size))


def on_lane(slot, start, length, *rest):
    return local_rows(jnp.stack([slot, start, length], 1), *rest)


def on_one_lane(slot, start, length, held, *rest):
    return spread_rows(jnp.stack([slot, start, length, held], 1), 0, *rest)


@pytest.mark.parametrize("width", [1, 40])
def test_a_local_token_goes_to_the_page_of_its_block(width):
    size = 16
    rng = np.random.default_rng(0)
    table = rng.integers(0, PAGES, (2, 4, 12)).astype(np.int32)
    slot, start, length = int32([2, 0, 3, 1], [17, 0, 100, 0], [1, width, max(1, width - 7), 0])
    rows = compiled(on_lane, width, size)(slot, start, length, table)
    for r in range(4):
        positions = start[r] + np.arange(length[r])
        np.testing.assert_array_equal(rows.pos[r], np.r_[positions, np.full(width - length[r], -1)])
        np.testing.assert_array_equal(
            rows.page[r],
            np.r_[table[0, slot[r], positions // size], np.full(width - length[r], PAGES)],
        )
        # what attention may look at: nothing for an empty row
        assert rows.entries[r] == -(-int(start[r] + length[r]) // size)


@pytest.mark.parametrize("size", [1, 16, 256])
@pytest.mark.parametrize("width", [1, 40])
def test_a_spread_token_goes_to_the_page_of_its_block_where_this_lane_has_it(width, size):
    rng = np.random.default_rng(size)
    # ten million tokens, and the last that int32 counts
    ends = np.array([10_000_000, 2**31 - 1, 50 * size, width])
    # blocks of this lane, some of which the tokens fall in
    near = np.maximum(ends[:, None] // size - rng.permutation(40)[:9], 0)
    blocks = np.sort(
        np.concatenate([near, rng.integers(0, ends[:, None] // size + 1, (4, 3))], 1), 1
    ).astype(np.int32)
    table = np.stack([rng.integers(0, PAGES, blocks.shape), blocks]).astype(np.int32)
    held = int32([12, 7, 0, 12])[0]
    slot, length = int32([0, 1, 2, 3], np.minimum([width, max(1, width - 7), width, width], ends))
    start = (ends - length).astype(np.int32)
    rows = compiled(on_one_lane, width, size)(slot, start, length, held, table)
    hits = 0
    for r in range(4):
        for t in range(width):
            position = int(start[r]) + t if t < length[r] else -1
            # of equal blocks the first
            mine = {int(block): int(page) for page, block in table[:, r, : held[r]].T[::-1]}
            right = mine.get(position // size, PAGES) if position >= 0 else PAGES
            assert (int(rows.pos[r, t]), int(rows.page[r, t])) == (position, right)
            hits += right < PAGES
    assert hits > 0


def test_entries_are_found_in_a_table_of_ten_million_tokens():
    """Finds entries in so wide a table, and compiles in a moment: the search is a loop, since
    unrolled it would double the compiler's work with every iteration."""
    size = 16
    count = 625_000
    blocks = np.arange(count, dtype=np.int32) * 2  # the even ones are here
    table = np.stack([blocks[::-1] % PAGES, blocks])[:, None]
    start = int32([0, size, 2 * size * 311_111, 2 * size * (count - 1), size * (2 * count - 1)])[0]
    rows = compiled(on_one_lane, 1, size)(
        *int32([0] * 5, start, [1] * 5), int32([count] * 5)[0], table
    )
    entry = start // size // 2
    np.testing.assert_array_equal(
        rows.page[:, 0], np.where(start // size % 2 == 0, table[0, 0, entry], PAGES)
    )
    assert (np.asarray(rows.page[:, 0]) < PAGES).tolist() == [True, False, True, True, False]
