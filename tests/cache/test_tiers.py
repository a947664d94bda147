"""Which blocks are in host memory, and which of them leave it first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.api.request import EPHEMERAL, NORMAL_RETENTION
from jaxserve.cache import CacheManager
from jaxserve.cache.block_events import Medium
from jaxserve.cache.hashes import block_key, root_key
from jaxserve.cache.tier_events import TierEvents
from jaxserve.cache.tiers import NORMAL, PASSING, HostTier, TierCounts, key_of, key_words
from jaxserve.settings.schema import CacheConfig
from tests.cache.test_hashes import chain
from tests.examples import examples

WHAT = ("reserve", "commit", "pin", "unpin", "forget")


def key(number: int) -> bytes:
    return block_key(root_key("", "", 4, ""), np.array([number] * 4))


def put(tier: HostTier, number: int, now: float = 0.0, until: float = NORMAL) -> bool:
    placed = tier.reserve(key(number), now, until)
    if placed is not None:
        tier.commit(key(number))
    return placed is not None


def test_the_least_recently_used_leaves_first():
    tier = HostTier(2)
    assert put(tier, 1) and put(tier, 2)
    tier.touch(key(1))
    placed = tier.reserve(key(3), 0.0)
    assert placed is not None and placed.leaves == (key(2), 0.0)
    assert key(1) in tier and key(2) not in tier


def test_what_is_there_gets_no_second_slot_and_counts_as_used():
    tier = HostTier(2)
    assert put(tier, 1) and put(tier, 2)
    assert not put(tier, 1)
    put(tier, 3)
    assert key(1) in tier and key(2) not in tier


def test_what_is_to_be_kept_stays_while_others_come_and_go():
    tier = HostTier(3)
    put(tier, 0, until=100.0)
    for number in range(1, 50):
        put(tier, number, now=float(number))
    assert key(0) in tier


def leaving(tier: HostTier, number: int, now: float = 0.0) -> int:
    """Which block makes room for this one, of the first hundred."""
    placed = tier.reserve(key(number), now)
    tier.commit(key(number))
    return next(other for other in range(100) if key(other) == placed.leaves[0])


def test_what_is_kept_no_more_leaves_like_others():
    tier = HostTier(4)
    put(tier, 0, until=100.0)
    put(tier, 1, until=10.0)
    put(tier, 2)
    put(tier, 3)
    assert leaving(tier, 4, now=20.0) == 2  # one whose time is over counts as used just now
    assert [leaving(tier, number, now=20.0) for number in (5, 6, 7)] == [3, 1, 4]
    tier.check(4)


def test_what_only_passes_through_leaves_before_others():
    tier = HostTier(3)
    put(tier, 0)
    put(tier, 1, until=PASSING)
    put(tier, 2)
    tier.touch(key(1))  # who reads it does not ask for it to be kept
    assert leaving(tier, 3) == 1


@pytest.mark.parametrize(
    ("first", "then"),
    [(PASSING, NORMAL), (NORMAL, PASSING), (50.0, NORMAL), (NORMAL, 50.0), (PASSING, 50.0)],
)
def test_of_several_wishes_the_strongest_counts(first, then):
    tier = HostTier(2)
    put(tier, 0, until=first)
    assert not put(tier, 0, until=then)
    assert tier.whole() == [(key(0), max(first, then))]


def test_half_of_the_slots_are_for_what_is_to_be_kept():
    tier = HostTier(4)
    for number in range(4):
        put(tier, number, until=100.0)
    assert [leaving(tier, number) for number in (4, 5, 6)] == [0, 1, 4]
    assert key(2) in tier and key(3) in tier


def test_what_is_kept_longer_and_longer_takes_no_memory_for_that():
    tier = HostTier(4)
    for second in range(1, 10_000):
        put(tier, 0, until=float(second))
    tier.check(4)
    assert len(tier._ends) < 200


def test_what_is_pinned_or_being_filled_stays():
    tier = HostTier(2)
    put(tier, 1)
    tier.pin(key(1))
    assert tier.reserve(key(2), 0.0) is not None  # filling from now on
    assert tier.pin(key(2)) is None
    assert tier.reserve(key(3), 0.0) is None
    tier.commit(key(2))
    assert tier.reserve(key(3), 0.0).leaves == (key(2), 0.0)
    tier.forget(key(1))
    assert key(1) in tier
    tier.unpin(key(1))
    tier.forget(key(1))
    assert key(1) not in tier


@settings(max_examples=examples(200))
@given(
    st.integers(1, 5),
    st.lists(
        st.tuples(
            st.sampled_from(["reserve", "commit", "pin", "unpin", "forget"]), st.integers(0, 9)
        )
    ),
)
def test_slots_and_blocks_fit_each_other_whatever_happens(slots, steps):
    tier = HostTier(slots)
    pinned: list[bytes] = []
    for at, (what, number) in enumerate(steps):
        name = key(number)
        if what == "reserve":
            tier.reserve(name, float(at), (PASSING, NORMAL, at + 3.0)[number % 3])
        elif what == "commit" and tier.filling(name):
            tier.commit(name)
        elif what == "pin" and tier.pin(name) is not None:
            pinned.append(name)
        elif what == "unpin" and name in pinned:
            pinned.remove(name)
            tier.unpin(name)
        elif what == "forget":
            tier.forget(name)
        assert all(each in tier for each in pinned)
        tier.check(slots)


@given(st.binary(min_size=16, max_size=16))
def test_keys_come_back_from_their_words(name):
    assert key_of(key_words(name)) == name


# --- what the cache asks of lower tiers


class Lower:
    """Holds what it is told to."""

    outlasts = True
    shared = False

    def __init__(self):
        self.keys: set[bytes] = set()
        self.events = TierEvents(lambda tier: self.keys if tier is Medium.HOST else ())

    def holds(self, name: bytes) -> bool:
        return name in self.keys

    def seconds(self, keys) -> float:
        return 0.0

    def keep(self, keys, retention) -> None:
        self.kept = list(keys), retention

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
    cache.take_stores()
    cache.publish(slot, 0, blocks, hashes)
    cache.release(slot)


def test_a_block_that_leaves_a_page_is_named_with_that_page_before_the_page_is_used(cache):
    first, second = chain([1] * 16), chain([2] * 16)
    run(cache, 0, first, 4)
    assert not len(cache.take_stores())
    cache.admit(1, cache.match(second, 0).pages, 0)
    cache.extend(1, 2)
    stores = cache.take_stores()
    assert [key_of(row[3:]) for row in stores] == [first[3], first[2]]  # the deepest leave first
    assert stores[:, 1].tolist() == cache.tables[1] and not stores[:, 0].any()
    assert not len(cache.take_stores())


def test_a_page_that_was_given_away_in_this_step_has_nothing_to_store_yet(cache):
    run(cache, 0, chain([1] * 16), 4)
    cache.admit(1, cache.match(chain([2] * 16), 0).pages, 0)
    cache.extend(1, 4)
    cache.publish(1, 0, 4, chain([2] * 16))
    cache.release(1)
    cache.admit(2, cache.match(chain([3] * 16), 0).pages, 0)
    cache.extend(2, 4)
    assert {key_of(row[3:]) for row in cache.take_stores()} == {
        chain([1] * 16)[n] for n in range(4)
    }


def test_blocks_are_fetched_up_to_the_first_gap(cache, lower):
    hashes = chain([1] * 16)
    lower.keys = {hashes[0], hashes[1], hashes[3]}
    assert cache.fetchable(hashes, 0, 4) == [hashes[0], hashes[1]]
    assert cache.fetchable(hashes, 1, 4) == [hashes[1]]
    assert cache.fetchable(hashes, 0, 1) == [hashes[0]]
    assert cache.fetchable(hashes, 2, 4) == []


def test_a_fetch_names_pages_that_the_slot_holds(cache, lower):
    hashes = chain([1] * 16)
    cache.admit(0, cache.match(hashes, 0).pages, 0)
    ticket = cache.fetch(0, [hashes[0], hashes[1]])
    (fetch,) = cache.take_fetches()
    assert fetch.ticket == ticket and fetch.keys == [hashes[0], hashes[1]]
    assert fetch.places.tolist() == [[0, page] for page in cache.tables[0]]
    assert cache.take_fetches() == []
    assert cache.fetch(0, [hashes[2]]) != ticket
    cache.check()


def test_at_the_end_all_that_can_be_found_is_to_be_kept_if_that_outlasts_the_end(cache, lower):
    hashes = chain([1] * 16)
    run(cache, 0, hashes, 3)
    assert {key_of(row[3:]) for row in cache.stores_at_the_end()} == {hashes[n] for n in range(3)}
    lower.outlasts = False
    assert not len(cache.stores_at_the_end())


# --- requests' wishes


def stored(cache: CacheManager, hashes, blocks: int, retention: int, pages=4) -> dict[bytes, int]:
    """Runs a sequence of this retention, evicts its blocks by another one, and returns what is
    stored of them, with retentions."""
    if blocks:
        cache.admit(0, cache.match(hashes, 0).pages, 0, retention=retention)
        cache.extend(0, blocks)
        cache.take_stores()
        cache.publish(0, 0, blocks, hashes)
        cache.release(0)
    cache.admit(1, cache.match(chain([9] * 16), 0).pages, 0)
    cache.extend(1, pages)
    rows = cache.take_stores()
    cache.release(1)
    cache.check()
    return {key_of(row[3:]): int(row[2]) for row in rows}


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
            cache.take_stores()
            cache.publish(0, 0, 4, hashes)
        cache.release(slot)
    assert stored(cache, hashes, 0, 0) == {hashes[0]: 60, hashes[1]: 60, hashes[2]: 0}


def test_a_block_that_was_computed_twice_has_the_strongest_wish_too(cache):
    hashes = chain([1] * 4)
    for slot, retention in enumerate([EPHEMERAL, 60]):
        cache.admit(slot, cache.match(hashes, 0).pages, 0, retention=retention)
        cache.extend(slot, 1)
    cache.take_stores()
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
    cache.take_stores()
    cache.publish(0, 0, 2, hashes)
    rows = cache.take_stores()
    assert [(key_of(row[3:]), row[2]) for row in rows] == [(hashes[0], EPHEMERAL)]


def test_at_the_end_ephemeral_blocks_are_not_stored(cache):
    for slot, (token, retention) in enumerate([(1, EPHEMERAL), (2, 60)]):
        hashes = chain([token] * 4)
        cache.admit(slot, cache.match(hashes, 0).pages, 0, retention=retention)
        cache.extend(slot, 1)
        cache.publish(slot, 0, 1, hashes)
    assert [(key_of(row[3:]), row[2]) for row in cache.stores_at_the_end()] == [(hashes[0], 60)]


def test_who_fetches_blocks_has_them_kept_as_long_as_it_asks(cache, lower):
    hashes = chain([1] * 16)
    cache.admit(0, cache.match(hashes, 0).pages, 0, retention=600)
    cache.fetch(0, [hashes[0]])
    assert lower.kept == ([hashes[0]], 600)


def test_a_block_that_moves_to_another_lane_is_retained_there():
    cache = CacheManager(CacheConfig(block_size=4, pages=4), 2, 3, lower=Lower(), most_moves=4)
    hashes = chain([1] * 16)
    cache.admit(0, cache.match(hashes, 0).pages, 0, retention=600)
    cache.extend(0, 4)
    cache.publish(0, 0, 4, hashes)
    cache.regroup(0, (0, 1))
    assert cache.rebalance(0, 4) == 2
    rows = cache.stores_at_the_end()
    assert sorted(rows[:, 0].tolist()) == [0, 0, 1, 1] and set(rows[:, 2].tolist()) == {600}
