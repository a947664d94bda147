"""Which cached blocks stay for who was promised them, and how many."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.cache import CacheIdentity, CacheManager
from jaxserve.cache.block_events import BlockEvents
from jaxserve.cache.locks import BlockLocks
from jaxserve.cache.lower_blocks import LowerBlocks
from jaxserve.cache.pages import PageAllocator
from jaxserve.cache.stores import PendingStores
from jaxserve.settings.schema import CacheConfig
from tests.cache.test_hashes import chain
from tests.cache.test_tiers import Lower
from tests.examples import examples


def cached(pages: PageAllocator, keys: list[bytes], lane: int = 0) -> list[int]:
    """Caches blocks with these keys, as those of one sequence; returns their pages."""
    taken = []
    for block, key in enumerate(keys):
        page = pages.allocate(lane)
        pages.publish(page, key, keys[block - 1] if block else None)
        taken.append(page)
    pages.unref(taken)
    return taken


def locks_of(pages: PageAllocator, most: int = 100) -> BlockLocks:
    below = LowerBlocks(None, PendingStores(pages), BlockEvents(), CacheIdentity(), 1)
    locks = BlockLocks(pages, below, most, 0)
    pages.on_shortage = locks.make_room
    return locks


def test_a_locked_block_is_evicted_after_all_others():
    pages = PageAllocator(1, 4)
    locks = locks_of(pages)
    old = cached(pages, [b"a", b"b"])
    young = cached(pages, [b"c", b"d"])
    locks.lock("waits", 1.0, [b"a", b"b"])
    assert pages.available() == [4] and pages.available_unlocked() == [2]
    assert [pages.allocate(0), pages.allocate(0)] == young[::-1]
    assert locks.given_up == 0
    assert [pages.allocate(0), pages.allocate(0)] == old[::-1]  # what runs goes on
    assert locks.given_up == 1 and not locks and not pages.locks


def test_a_released_block_counts_as_used_just_now_and_the_deepest_leaves_first():
    pages = PageAllocator(1, 4)
    locks = locks_of(pages)
    old = cached(pages, [b"a", b"b"])
    young = cached(pages, [b"c", b"d"])
    locks.lock("waits", 1.0, [b"a", b"b"])
    locks.release("waits")
    assert [pages.allocate(0) for _ in range(4)] == [*young[::-1], *old[::-1]]
    assert locks.given_up == 0


def test_of_locks_the_one_that_is_due_last_is_given_up_first():
    pages = PageAllocator(1, 3)
    locks = locks_of(pages)
    for key in (b"a", b"b", b"c"):
        cached(pages, [key])
    for due, key in ((2.0, b"a"), (3.0, b"b"), (1.0, b"c")):
        locks.lock(key, due, [key])
    for _ in range(3):
        pages.allocate(0)
        locks.check()
    assert locks.given_up == 3


def test_a_block_stays_locked_until_the_last_of_its_holders_releases_it():
    pages = PageAllocator(1, 3)
    locks = locks_of(pages)
    cached(pages, [b"a"])
    cached(pages, [b"b"])
    locks.lock("first", 1.0, [b"a"])
    locks.lock("second", 2.0, [b"a"])
    locks.release("first")
    pages.allocate(0)
    pages.allocate(0)
    assert b"a" in pages.with_key and b"b" not in pages.with_key


def test_locks_take_no_more_than_their_share_and_a_prompt_keeps_its_first_blocks():
    pages = PageAllocator(1, 8)
    locks = locks_of(pages, most=2)
    keys = [bytes([number]) for number in range(4)]
    cached(pages, keys)
    assert locks.lock("waits", 1.0, keys).on_pages == keys[:2]
    assert pages.available_unlocked() == [6]
    assert not locks.lock("due later", 2.0, keys[2:]).on_pages
    assert locks.lock("due earlier", 0.5, keys[2:]).on_pages == keys[2:]
    assert locks.holders() == ["due earlier"] and locks.given_up == 1


def test_one_copy_of_a_locked_block_stays():
    pages = PageAllocator(2, 2)
    locks = locks_of(pages)
    page = cached(pages, [b"a"])[0]
    copy = pages.copy(page, 1)
    locks.lock("waits", 1.0, [b"a"])
    assert pages.available_unlocked() == [1, 2]
    pages.allocate(1)
    assert pages.allocate(1) == copy and locks.given_up == 0
    pages.check([2, 3])
    assert pages.copies(page) == (page,)


def test_where_the_first_copy_is_damaged_nothing_stays_locked():
    pages = PageAllocator(2, 2)
    locks = locks_of(pages)
    page = cached(pages, [b"a"])[0]
    pages.copy(page, 1)
    locks.lock("waits", 1.0, [b"a"])
    pages.retract([page])
    pages.check([])
    assert pages.available_unlocked() == [2, 2]


def test_a_promise_locks_what_is_below_the_devices_too():
    lower = Lower()
    cache = CacheManager(CacheConfig(block_size=4, pages=8), 1, 3, lower=lower)
    hashes = chain([1] * 24)
    cache.admit(0, cache.match(hashes, 0).pages, 0)
    cache.extend(0, 1)
    cache.publish(0, 0, 1, hashes)
    cache.release(0)
    lower.keys = {hashes[1], hashes[2], hashes[3]}
    cache.promise(7, 1.0, hashes, 5)
    assert set(cache.pages.locks) == {hashes[0]}
    assert lower.locked == {hashes[1], hashes[2]}  # as many as may be, from the first on
    cache.promises.release(7)
    assert not cache.pages.locks and not lower.locked


def test_forgetting_all_prefixes_ends_promises():
    cache = CacheManager(CacheConfig(block_size=4, pages=4), 1, 3)
    hashes = chain([1] * 8)
    cache.admit(0, cache.match(hashes, 0).pages, 0)
    cache.extend(0, 1)
    cache.publish(0, 0, 1, hashes)
    cache.release(0)
    cache.promise(7, math.inf, hashes, 1)
    assert cache.flush() == 1 and not cache.promises
    cache.check()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["cache", "lock", "release", "allocate", "free", "copy", "retract"]),
        st.integers(0, 5),
        st.integers(0, 5),
    ),
    max_size=60,
)


@settings(max_examples=examples(1000), deadline=None)
@given(st.integers(1, 2), st.integers(1, 4), st.integers(0, 4), STEPS)
def test_whatever_happens_locked_blocks_leave_last_and_pages_add_up(lanes, per_lane, most, steps):
    pages = PageAllocator(lanes, per_lane)
    locks = locks_of(pages, most)
    held: list[int] = []
    for what, number, other in steps:
        lane = other % lanes
        room = pages.available()[lane]
        key = bytes([number])
        if what == "cache" and room and key not in pages.with_key:
            cached(pages, [key], lane)
        elif what == "lock":
            known = [one for one in (key, bytes([other])) if one in pages.with_key]
            locks.lock(number, float(other), dict.fromkeys(known))
        elif what == "release":
            locks.release(number)
        elif what == "allocate" and room:
            unlocked = pages.available_unlocked()[lane]
            given_up = locks.given_up
            held.append(pages.allocate(lane))
            assert (locks.given_up > given_up) <= (unlocked == 0)
        elif what == "free" and held:
            pages.unref([held.pop(number % len(held))])
        elif what == "copy" and lanes > 1:
            page = pages.with_key.get(key, (None,))[0]
            homes = {copy // per_lane for copy in pages.with_key.get(key, ())}
            if page is not None and lane not in homes and pages.available_unlocked()[lane]:
                pages.copy(page, lane)
        elif what == "retract" and key in pages.with_key:
            pages.retract(pages.with_key[key])
        pages.check(held)
        locks.check()
    for holder in locks.holders():
        locks.release(holder)
    assert not pages.locks and pages.available() == pages.available_unlocked()
    with pytest.raises(KeyError):
        for _ in range(lanes * per_lane + 1):
            pages.allocate(0)
