"""Which blocks are in host memory, and which of them leave it first."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.store.host_index import NORMAL, PASSING, HostIndex
from tests.examples import examples
from tests.store.fakes import key_of as key


def put(tier: HostIndex, number: int, now: float = 0.0, until: float = NORMAL) -> bool:
    placed = tier.reserve(key(number), now, until)
    if placed is not None:
        tier.commit(key(number))
    return placed is not None


def test_the_least_recently_used_leaves_first():
    tier = HostIndex(2)
    assert put(tier, 1) and put(tier, 2)
    tier.touch(key(1))
    placed = tier.reserve(key(3), 0.0)
    assert placed is not None and placed.leaves == (key(2), 0.0)
    assert key(1) in tier and key(2) not in tier


def test_what_is_there_gets_no_second_slot_and_counts_as_used():
    tier = HostIndex(2)
    assert put(tier, 1) and put(tier, 2)
    assert not put(tier, 1)
    put(tier, 3)
    assert key(1) in tier and key(2) not in tier


def test_what_is_to_be_kept_stays_while_others_come_and_go():
    tier = HostIndex(3)
    put(tier, 0, until=100.0)
    for number in range(1, 50):
        put(tier, number, now=float(number))
    assert key(0) in tier


def leaving(tier: HostIndex, number: int, now: float = 0.0) -> int:
    """Returns which of the first hundred blocks makes room for this one."""
    placed = tier.reserve(key(number), now)
    tier.commit(key(number))
    return next(other for other in range(100) if key(other) == placed.leaves[0])


def test_what_is_kept_no_more_leaves_like_others():
    tier = HostIndex(4)
    put(tier, 0, until=100.0)
    put(tier, 1, until=10.0)
    put(tier, 2)
    put(tier, 3)
    assert leaving(tier, 4, now=20.0) == 2  # one whose time is over counts as used just now
    assert [leaving(tier, number, now=20.0) for number in (5, 6, 7)] == [3, 1, 4]
    tier.check(4)


def test_what_only_passes_through_leaves_before_others():
    tier = HostIndex(3)
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
    tier = HostIndex(2)
    put(tier, 0, until=first)
    assert not put(tier, 0, until=then)
    assert tier.whole() == [(key(0), max(first, then))]


def test_half_of_the_slots_are_for_what_is_to_be_kept():
    tier = HostIndex(4)
    for number in range(4):
        put(tier, number, until=100.0)
    assert [leaving(tier, number) for number in (4, 5, 6)] == [0, 1, 4]
    assert key(2) in tier and key(3) in tier


def test_what_is_kept_longer_and_longer_takes_no_memory_for_that():
    tier = HostIndex(4)
    for second in range(1, 1_000):
        put(tier, 0, until=float(second))
        tier.check(4)


def test_what_is_read_without_being_used_goes_as_early_as_before():
    tier = HostIndex(3)
    for number in range(3):
        put(tier, number)
    for number, use in ((0, True), (1, False)):
        tier.pin(key(number), use)
        tier.unpin(key(number))
    leaves = tier.reserve(key(3), 0.0).leaves
    assert leaves is not None and leaves[0] == key(1)


def test_what_is_pinned_or_being_filled_stays():
    tier = HostIndex(2)
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
            st.sampled_from(["reserve", "commit", "pin", "unpin", "forget", "lock", "unlock"]),
            st.integers(0, 9),
        )
    ),
)
def test_slots_and_blocks_fit_each_other_whatever_happens(slots, steps):
    tier = HostIndex(slots)
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
        elif what == "lock":
            tier.lock(name)
        elif what == "unlock":
            tier.unlock(name)
        assert all(each in tier for each in pinned)
        tier.check(slots)


def test_what_is_locked_stays_until_it_is_unlocked_also_if_it_comes_later():
    tier = HostIndex(3)
    tier.lock(key(0))
    tier.lock(key(1))
    put(tier, 0)
    put(tier, 1, until=5.0)
    assert [put(tier, number, now=10.0) for number in (2, 3, 4)] == [True] * 3
    assert key(0) in tier and key(1) in tier
    tier.check(3)
    tier.unlock(key(0))
    assert leaving(tier, 5, now=10.0) == 4  # what was unlocked counts as used just now
    assert leaving(tier, 6, now=10.0) == 0
    tier.check(3)


def test_where_all_is_locked_there_is_no_room():
    tier = HostIndex(1)
    put(tier, 0)
    tier.lock(key(0))
    assert not put(tier, 1)
