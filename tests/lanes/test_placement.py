"""Blocks that sequences decode go round the lanes of their groups: evenly for each sequence and
over a batch, as far as there are pages, and no group grows by it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.cache import CacheManager, LaneRules
from jaxserve.lanes.groups import group_sizes, lanes_of
from jaxserve.settings.schema import CacheConfig
from tests.examples import examples

NONE = np.empty(0, np.intp)
LIMIT = 4  # blocks of a sequence on a lane before the next lane joins


def spread_prompts(
    placement: str,
    lanes: int,
    sequences: list[tuple[int, int, int]],
    pages: int,
    limit: int = LIMIT,
) -> CacheManager:
    """A cache with a sequence per slot. sequences: home lane, lanes of its group, blocks of its
    prompt; with `grow` the group is what the blocks make it."""
    config = CacheConfig(block_size=1, pages=pages, lane_tokens=limit, placement=placement)
    cache = CacheManager(config, lanes, len(sequences))
    for slot, (home, size, blocks) in enumerate(sequences):
        cache.admit(slot, NONE, home, blocks)
        if placement != "grow":
            first = home - home % size
            cache.regroup(slot, tuple(range(first, first + size)))
        cache.extend(slot, blocks)
    return cache


def decoded(cache: CacheManager, slot: int, prompt: int) -> list[int]:
    """The lane of each block after the prompt's."""
    return cache.layouts[slot].lanes_of(prompt, len(cache.layouts[slot].pages)).tolist()


@st.composite
def batches(draw) -> tuple[str, int, list[tuple[int, int, int]]]:
    lanes = draw(st.sampled_from([2, 3, 4, 6, 8]))
    one = st.tuples(
        st.integers(0, lanes - 1), st.sampled_from(group_sizes(lanes)), st.integers(1, 30)
    )
    placement = draw(st.sampled_from(["grow", "striped", "zigzag"]))
    return placement, lanes, draw(st.lists(one, min_size=1, max_size=6))


@given(batches(), st.integers(0, 40))
@settings(max_examples=examples(200), deadline=None)
def test_lanes_of_a_group_get_equally_many_decoded_blocks_but_for_one(batch, count):
    """While there are pages and, with `grow`, lanes below the limit or none that could join."""
    placement, lanes, sequences = batch
    cache = spread_prompts(placement, lanes, sequences, pages=1000)
    for slot, (home, _, blocks) in enumerate(sequences):
        before = cache.blocks_per_lane[slot].tolist()
        group = lanes_of(home, before)
        cache.extend(slot, count)
        cache.check()
        came = decoded(cache, slot, blocks)
        assert len(came) == count
        if len(group) == 1:
            below = min(count, max(LIMIT - blocks, 0))
            assert came[:below] == [home] * below
        elif placement != "grow" or min(before) >= LIMIT:
            assert set(came) <= set(group)
            by_lane = Counter(came)
            counts = [by_lane[lane] for lane in group]
            assert max(counts) - min(counts) <= 1
            assert all(one != other for one, other in zip(came, came[1:]))


def pairs_of_lanes(cache: CacheManager, first: int, stop: int) -> np.ndarray:
    """Pairs of query and key of each lane, of the tokens of blocks `first` to before `stop`."""
    size = cache.block_size
    lanes = cache.layouts[0].lanes_of(first, stop)
    ends = np.arange(first, stop) * size + (size + 1) / 2  # keys that a token sees, on average
    return np.bincount(lanes, ends * size, cache.pages.lanes)


@given(
    st.sampled_from([2, 4, 8]),
    st.lists(st.integers(1, 40), max_size=3),
    st.integers(1, 12),
    st.integers(0, 7),
)
@settings(max_examples=examples(200), deadline=None)
def test_a_chunk_is_as_much_work_on_each_lane_wherever_it_begins(lanes, history, each, home):
    """`each` blocks for each lane, after chunks of any length (context parallel paper, 3.5.1)."""
    chunks = [*history, each * lanes]
    cache = CacheManager(
        CacheConfig(block_size=16, pages=sum(chunks), lane_tokens=1, placement="zigzag"),
        lanes,
        1,
        rules=LaneRules(stripe=4),
    )
    cache.admit(0, NONE, home % lanes, sum(chunks) + 1)
    for blocks in chunks:
        cache.extend(0, blocks)
        held = cache.blocks_per_lane[0]
        assert held.max() - held.min() <= 1
    last = cache.layouts[0].lanes_of(sum(history), sum(chunks))
    assert np.bincount(last, minlength=lanes).tolist() == [each] * lanes
    pairs = pairs_of_lanes(cache, sum(history), sum(chunks))
    if each % 2 == 0 or sum(history) >= 3 * each * lanes:
        assert pairs.max() <= 1.15 * pairs.mean()


@pytest.mark.parametrize("history", [0, 64, 1024, 1040, 8192])
def test_the_last_256_tokens_of_a_prompt_are_work_of_all_of_eight_lanes(history):
    blocks = (history + 256) // 16
    config = CacheConfig(block_size=16, pages=blocks, lane_tokens=1, placement="zigzag")
    cache = CacheManager(config, 8, 1, rules=LaneRules(stripe=4))
    cache.admit(0, NONE, 3, blocks)
    for chunk in (blocks - 16, 16):
        cache.extend(0, chunk)
    pairs = pairs_of_lanes(cache, blocks - 16, blocks)
    assert pairs.max() <= 1.15 * pairs.mean()
    assert cache.layouts[0].last_lane == 3  # home, where the token after it is sampled
    cache.extend(0, 40)
    held = cache.blocks_per_lane[0]
    assert held.max() - held.min() <= 1, "what is decoded goes on evenly"


def test_lanes_below_the_limit_share_what_is_decoded_until_the_next_lane_must_join():
    """A prompt of nine blocks fills lanes 0 and 1 of eight and begins on the next, whose neighbour
    is in the group too; no lane of another group joins before all four are full."""
    cache = spread_prompts("grow", 8, [(0, 1, 9)], pages=100)
    assert cache.blocks_per_lane[0].tolist() == [4, 4, 1, 0, 0, 0, 0, 0]
    cache.extend(0, 4)
    assert cache.blocks_per_lane[0, :4].tolist() == [4, 4, 3, 2] and cache.group_size[0] == 4
    cache.extend(0, 3)
    assert cache.blocks_per_lane[0, :4].tolist() == [4, 4, 4, 4] and cache.group_size[0] == 4
    cache.extend(0, 1)
    assert cache.group_size[0] == 8
    cache.check()


@pytest.mark.parametrize(("placement", "home"), [("striped", 3), ("zigzag", 0)])
@pytest.mark.parametrize("sequences", [1, 3, 4, 7, 16])
def test_lanes_fill_evenly_over_a_batch(placement, home, sequences):
    """Each sequence decodes a block after the other, and after each round of the batch no lane has
    gained more than one block more than another."""
    cache = spread_prompts(placement, 4, [(home, 4, 16)] * sequences, pages=1000)
    start = cache.blocks_per_lane.sum(0)
    assert (start == start[0]).all()
    for _ in range(9):
        for slot in range(sequences):
            cache.extend(slot, 1)
        gained = cache.blocks_per_lane.sum(0) - start
        assert gained.max() - gained.min() <= 1
    cache.check()


@given(batches(), st.lists(st.integers(0, 5), max_size=60))
@settings(max_examples=examples(200), deadline=None)
def test_lanes_without_a_page_are_skipped_and_nothing_is_lost(batch, slots):
    """Pages are short: a group grows only when none of its lanes has a page, or, with `grow` and
    from one lane, when none with a page is below the limit."""
    placement, lanes, sequences = batch
    cache = spread_prompts(placement, lanes, sequences, pages=sum(s[2] for s in sequences) + 3)
    for slot in (slot % len(sequences) for slot in slots):
        if not cache.available:
            break
        available = cache.pages.available()
        before = cache.blocks_per_lane[slot].tolist()
        group = lanes_of(int(cache.home[slot]), before)
        cache.extend(slot, 1)
        cache.check()
        lane = decoded(cache, slot, 0)[-1]
        assert available[lane]
        limited = placement == "grow" or 1 in (sequences[slot][1], len(group))
        room = [lane for lane in group if available[lane] and (before[lane] < LIMIT or not limited)]
        assert lane in room or not room
    for slot, table in enumerate(layout.pages for layout in cache.layouts):
        assert cache.blocks_per_lane[slot].sum() == len(table) == len(set(table))


def test_a_round_goes_on_behind_a_lane_without_a_page():
    cache = spread_prompts("striped", 4, [(3, 4, 4), (2, 1, 9)], pages=10)
    assert cache.pages.available() == [9, 9, 0, 9]
    cache.extend(0, 7)
    assert decoded(cache, 0, 4) == [0, 1, 3, 0, 1, 3, 0]
