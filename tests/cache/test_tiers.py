"""What the cache asks of the tiers below it, and which pages it has them keep."""

from __future__ import annotations

import pytest

from jaxserve.api.batch import PageStores
from jaxserve.api.request import EPHEMERAL, NORMAL_RETENTION
from jaxserve.cache import CacheManager, LaneRules
from jaxserve.cache.block_events import Medium
from jaxserve.cache.prefix_match import BlockPage
from jaxserve.cache.tier_events import TierEvents
from jaxserve.cache.tiers import TierCounts
from jaxserve.settings.schema import CacheConfig
from tests.cache.test_hashes import chain


class Lower:
    """Holds what it is told to."""

    outlasts = True
    most_locked = 4
    shared = False

    def __init__(self):
        self.keys: set[bytes] = set()
        self.locked: set[bytes] = set()
        self.events = TierEvents(lambda tier: self.keys if tier is Medium.HOST else ())

    def holds(self, name: bytes) -> bool:
        return name in self.keys

    def seconds(self, keys) -> float:
        return 0.0

    def keep(self, keys, retention) -> None:
        self.kept = list(keys), retention

    def lock(self, key) -> None:
        self.locked.add(key)

    def unlock(self, key) -> None:
        self.locked.discard(key)

    def prefetch(self, keys) -> None:
        raise AssertionError("nothing waits")

    def counts(self) -> TierCounts:
        return TierCounts()


@pytest.fixture
def lower() -> Lower:
    return Lower()


@pytest.fixture
def cache(lower) -> CacheManager:
    return CacheManager(CacheConfig(block_size=4, pages=4), 1, 3, lower=lower)


def run(cache: CacheManager, slot: int, hashes, blocks: int) -> None:
    cache.admit(slot, cache.match(hashes, 0).pages, 0)
    cache.extend(slot, blocks)
    cache.stores.take()
    cache.publish(slot, 0, blocks, hashes)
    cache.release(slot)


def test_a_block_that_leaves_a_page_is_named_with_that_page_before_the_page_is_used(cache):
    first, second = chain([1] * 16), chain([2] * 16)
    run(cache, 0, first, 4)
    assert not len(cache.stores.take())
    cache.admit(1, cache.match(second, 0).pages, 0)
    cache.extend(1, 2)
    stores = cache.stores.take()
    assert stores.keys == [first[3], first[2]]  # the deepest leave first
    assert stores.pages.tolist() == cache.layouts[1].pages and not stores.lanes.any()
    assert not len(cache.stores.take())


def test_a_page_that_was_given_away_in_this_step_has_nothing_to_store_yet(cache):
    run(cache, 0, chain([1] * 16), 4)
    cache.admit(1, cache.match(chain([2] * 16), 0).pages, 0)
    cache.extend(1, 4)
    cache.publish(1, 0, 4, chain([2] * 16))
    cache.release(1)
    cache.admit(2, cache.match(chain([3] * 16), 0).pages, 0)
    cache.extend(2, 4)
    assert set(cache.stores.take().keys) == {chain([1] * 16)[n] for n in range(4)}


def test_blocks_are_fetched_up_to_the_first_gap(cache, lower):
    hashes = chain([1] * 16)
    lower.keys = {hashes[0], hashes[1], hashes[3]}
    assert cache.below.fetchable(hashes, 0, 4) == [hashes[0], hashes[1]]
    assert cache.below.fetchable(hashes, 1, 4) == [hashes[1]]
    assert cache.below.fetchable(hashes, 0, 1) == [hashes[0]]
    assert cache.below.fetchable(hashes, 2, 4) == []


def test_a_fetch_names_pages_that_the_slot_holds(cache, lower):
    hashes = chain([1] * 16)
    cache.admit(0, cache.match(hashes, 0).pages, 0)
    ticket = cache.fetch(0, [BlockPage(0), BlockPage(1)], hashes)
    (fetch,) = cache.below.take_fetches()
    assert fetch.ticket == ticket and fetch.keys == [hashes[0], hashes[1]]
    assert fetch.places.tolist() == [[0, page] for page in cache.layouts[0].pages]
    assert cache.below.take_fetches() == []
    assert cache.fetch(0, [BlockPage(2)], hashes) != ticket
    cache.check()


def test_at_the_end_all_that_can_be_found_is_to_be_kept_if_that_outlasts_the_end(cache, lower):
    hashes = chain([1] * 16)
    run(cache, 0, hashes, 3)
    assert set(cache.below.stores_at_the_end().keys) == {hashes[n] for n in range(3)}
    lower.outlasts = False
    assert not len(cache.below.stores_at_the_end())


# --- requests' wishes


def retentions(stores: PageStores) -> dict[bytes, int]:
    return dict(zip(stores.keys, stores.retention.tolist(), strict=True))


def stored(cache: CacheManager, hashes, blocks: int, retention: int, pages=4) -> dict[bytes, int]:
    """Runs a sequence of this retention, evicts its blocks by another one, and returns what is
    stored of them, with retentions."""
    if blocks:
        cache.admit(0, cache.match(hashes, 0).pages, 0, retention=retention)
        cache.extend(0, blocks)
        cache.stores.take()
        cache.publish(0, 0, blocks, hashes)
        cache.release(0)
    cache.admit(1, cache.match(chain([9] * 16), 0).pages, 0)
    cache.extend(1, pages)
    stores = cache.stores.take()
    cache.release(1)
    cache.check()
    return retentions(stores)


def test_ephemeral_blocks_are_not_stored(cache):
    assert stored(cache, chain([1] * 16), 4, EPHEMERAL) == {}
    assert len(stored(cache, chain([2] * 16), 3, NORMAL_RETENTION)) == 3  # on the same pages


def test_blocks_to_be_kept_are_stored_with_the_seconds(cache):
    hashes = chain([1] * 16)
    assert stored(cache, hashes, 3, 600) == {hashes[n]: 600 for n in range(3)}


def test_the_strongest_of_the_wishes_of_all_who_share_a_block_counts(cache):
    hashes = chain([1] * 16)
    for slot, (blocks, retention) in enumerate([(4, EPHEMERAL), (3, NORMAL_RETENTION), (2, 60)]):
        cache.admit(slot, cache.match(hashes, blocks).pages, 0, retention=retention)
        if slot == 0:
            cache.extend(0, 4)
            cache.stores.take()
            cache.publish(0, 0, 4, hashes)
        cache.release(slot)
    assert stored(cache, hashes, 0, 0) == {hashes[0]: 60, hashes[1]: 60, hashes[2]: 0}


def test_a_block_that_was_computed_twice_has_the_strongest_wish_too(cache):
    hashes = chain([1] * 4)
    for slot, retention in enumerate([EPHEMERAL, 60]):
        cache.admit(slot, cache.match(hashes, 0).pages, 0, retention=retention)
        cache.extend(slot, 1)
    cache.stores.take()
    for slot in range(2):
        cache.publish(slot, 0, 1, hashes)
    for slot in range(2):
        cache.release(slot)
    assert stored(cache, hashes, 0, 0) == {hashes[0]: 60}


def test_an_ephemeral_block_that_is_wanted_elsewhere_passes_through(cache):
    hashes = chain([1] * 16)
    cache.stores.want([hashes[0]], lambda key: False)
    cache.admit(0, cache.match(hashes, 0).pages, 0, retention=EPHEMERAL)
    cache.extend(0, 2)
    cache.stores.take()
    cache.publish(0, 0, 2, hashes)
    assert retentions(cache.stores.take()) == {hashes[0]: EPHEMERAL}


def test_at_the_end_ephemeral_blocks_are_not_stored(cache):
    for slot, (token, retention) in enumerate([(1, EPHEMERAL), (2, 60)]):
        hashes = chain([token] * 4)
        cache.admit(slot, cache.match(hashes, 0).pages, 0, retention=retention)
        cache.extend(slot, 1)
        cache.publish(slot, 0, 1, hashes)
    assert retentions(cache.below.stores_at_the_end()) == {hashes[0]: 60}


def test_who_fetches_blocks_has_them_kept_as_long_as_it_asks(cache, lower):
    hashes = chain([1] * 16)
    cache.admit(0, cache.match(hashes, 0).pages, 0, retention=600)
    cache.fetch(0, [BlockPage(0)], hashes)
    assert lower.kept == ([hashes[0]], 600)


def test_a_block_that_moves_to_another_lane_is_retained_there():
    cache = CacheManager(
        CacheConfig(block_size=4, pages=4), 2, 3, lower=Lower(), rules=LaneRules(most_moves=4)
    )
    hashes = chain([1] * 16)
    cache.admit(0, cache.match(hashes, 0).pages, 0, retention=600)
    cache.extend(0, 4)
    cache.publish(0, 0, 4, hashes)
    cache.regroup(0, (0, 1))
    assert cache.rebalance(0, 4) == 2
    stores = cache.below.stores_at_the_end()
    assert sorted(stores.lanes.tolist()) == [0, 0, 1, 1] and set(stores.retention.tolist()) == {600}
