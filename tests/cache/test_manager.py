from __future__ import annotations

import numpy as np
import pytest

from jaxserve.cache import CacheManager, LaneRules
from jaxserve.cache.hashes import BlockHashes
from jaxserve.settings.schema import CacheConfig, ConfigError
from tests.cache.test_hashes import chain

NONE = np.empty(0, np.intp)


def manager(lanes: int = 2, pages: int = 4, placement="grow", **fields) -> CacheManager:
    config = CacheConfig(block_size=4, pages=pages, placement=placement, **fields)
    return CacheManager(config, lanes, 3)


def found(cache: CacheManager, tokens: BlockHashes, blocks: int) -> list[int]:
    return cache.match(tokens, blocks).pages.tolist()


def lanes_of(cache: CacheManager, slot: int) -> list[int]:
    return [page // cache.pages.per_lane for page in cache.layouts[slot].pages]


def admit(cache: CacheManager, slot: int, pages: np.ndarray, need: int, pending=None) -> None:
    lanes = cache.pages.lanes
    cache.admit(
        slot, pages, cache.choose_home(pages, list(range(lanes)), need, pending or [0.0] * lanes)
    )


def fill(cache: CacheManager, slot: int, blocks: int) -> None:
    admit(cache, slot, NONE, blocks)
    cache.extend(slot, blocks)


def test_a_sequence_stays_on_its_lane_until_that_is_full_then_the_next_joins():
    cache = manager()
    fill(cache, 0, 3)
    assert lanes_of(cache, 0) == [0, 0, 0] and cache.group_size[0] == 1
    cache.extend(0, 3)
    assert (
        lanes_of(cache, 0) == [0, 0, 0, 0, 1, 1]
        and cache.group_size[0] == 2
        and cache.blocks_per_lane[0].tolist() == [4, 2]
    )
    cache.check()


def test_a_lane_holds_no_more_than_its_share_while_another_can_join():
    cache = manager(lane_tokens=7)
    fill(cache, 0, 8)
    assert lanes_of(cache, 0) == [0, 0, 1, 1, 0, 1, 0, 1]  # then on as far as there is room
    cache.check()


def test_new_sequences_go_where_most_room_is():
    cache = manager()
    fill(cache, 0, 2)
    fill(cache, 1, 1)
    fill(cache, 2, 1)
    assert cache.home.tolist() == [0, 1, 1]


def test_new_sequences_go_where_the_least_work_is_pending_if_their_chunk_fits_there():
    cache = manager()
    for slot, (pending, need, home) in enumerate(
        [([3.0, 2.0], 2, 1), ([0.0, 9.0], 2, 0), ([9.0, 1.0], 3, 0)]
    ):
        if slot == 2:
            cache.extend(0, 2)  # lane 1 has room for two pages
        admit(cache, slot, NONE, need, pending)
        assert cache.home[slot] == home


def test_a_sequence_goes_where_its_prefix_lies_if_its_chunk_fits_there():
    cache = manager()
    tokens = chain(range(100))
    fill(cache, 0, 2)
    cache.publish(0, 0, 2, tokens)
    assert (
        found(cache, tokens, 5) == [0, 1]
        and found(cache, tokens, 1) == [0]
        and found(cache, chain(range(1, 100)), 5) == []
    )
    admit(cache, 1, cache.match(tokens, 5).pages, 2)
    admit(cache, 2, cache.match(tokens, 5).pages, 3)
    assert cache.home[1:].tolist() == [0, 1] and cache.group_size.tolist() == [1, 1, 2]
    cache.check()


@pytest.mark.parametrize(
    ("placement", "right"),
    [
        ("striped", [1, 1, 0, 0, 2, 2, 1, 1, 0, 0, 2, 2, 1, 0]),
        ("zigzag", [1, 1, 0, 0, 2, 2, 2, 2, 0, 0, 1, 1, 1, 0]),
    ],
)
def test_a_prompt_that_one_lane_shall_not_hold_is_dealt_out_and_ends_at_home(placement, right):
    """Stripes of two blocks; the last block of its thirteen is at home, and what it generates goes
    on as before."""
    cache = CacheManager(
        CacheConfig(block_size=4, pages=9, lane_tokens=8, placement=placement),
        3,
        3,
        rules=LaneRules(stripe=2),
    )
    for slot, blocks in ((0, 13), (1, 2)):
        cache.admit(slot, np.empty(0, np.intp), 1, blocks=blocks)
        cache.extend(slot, blocks)
    cache.extend(0, 1)
    assert cache.layouts[0].lanes_of(0, 14).tolist() == right and cache.layouts[1].lanes_of(
        0, 2
    ).tolist() == [1, 1]
    cache.check()


@pytest.mark.parametrize(
    ("placement", "lanes"), [("round_robin", [0, 1, 2, 0, 1, 2]), ("random", None)]
)
def test_placements_scatter_blocks_and_rows_stay_ascending(placement, lanes):
    cache = manager(3, placement=placement)
    fill(cache, 0, 6)
    deltas = cache.table_updates.take()
    assert lanes is None or lanes_of(cache, 0) == lanes
    for lane in range(3):
        rows = deltas[deltas[:, 0] == lane]
        assert rows[:, 2].tolist() == list(range(len(rows))) and rows[:, 4].tolist() == sorted(
            rows[:, 4].tolist()
        )
    cache.extend(0, 6)
    assert cache.available == 0 and cache.blocks_per_lane[0].tolist() == [4, 4, 4]
    cache.check()


def test_deltas_tell_what_is_new_once_and_list_a_prefix_hit_first():
    cache = manager()
    fill(cache, 0, 2)
    cache.publish(0, 0, 2, chain(range(8)))
    assert cache.table_updates.take().tolist() == [[0, 0, 0, 0, 0], [0, 0, 1, 1, 1]]
    assert cache.table_updates.take().shape == (0, 5)
    cache.admit(1, cache.match(chain(range(8)), 2).pages, 1)
    cache.extend(1, 1)
    assert cache.table_updates.take().tolist() == [
        [0, 1, 0, 0, 0],
        [0, 1, 1, 1, 1],
        [1, 1, 0, 0, 2],
    ]


def test_a_released_block_can_be_matched_until_its_page_is_needed():
    cache = manager(1)
    tokens = chain(range(100))
    fill(cache, 0, 3)
    cache.publish(0, 0, 2, tokens)
    cache.release(0)
    assert (
        cache.counts() == (2, 2, 0)
        and found(cache, tokens, 3) == [0, 1]
        and cache.pages.evictable(np.arange(2)) == 2
    )
    fill(cache, 1, 3)
    assert found(cache, tokens, 3) == [0]  # the deeper block went first
    cache.check()


def test_without_prefix_caching_nothing_is_kept():
    cache = manager(prefix_caching=False)
    fill(cache, 0, 2)
    cache.publish(0, 0, 2, chain(range(8)))
    cache.release(0)
    assert found(cache, chain(range(8)), 2) == [] and cache.counts() == (8, 0, 0)


def test_pages_must_be_given():
    with pytest.raises(ConfigError, match="pages"):
        CacheManager(CacheConfig(), 1, 1)
