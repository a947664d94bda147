from __future__ import annotations

import numpy as np
import pytest

from jaxserve.cache.pages import PageAllocator


def test_every_page_is_free_held_or_cached():
    pages = PageAllocator(2, 3)
    taken = [pages.allocate(0), pages.allocate(1), pages.allocate(0)]
    assert taken == [0, 3, 1] and pages.available() == [1, 2]
    pages.publish(0, b"a")
    pages.check(taken)
    pages.unref(taken)
    assert list(pages.cached[0]) == [0] and pages.available() == [3, 3]
    pages.check([])


def test_a_page_with_two_holders_is_kept_for_the_second():
    pages = PageAllocator(1, 2)
    page = pages.allocate(0)
    pages.publish(page, b"a")
    pages.ref(np.array([page]))
    pages.unref([page])
    pages.check([page])
    pages.unref([page])
    pages.ref(np.array([page]))  # out of the cache again
    pages.check([page])


def test_free_pages_go_first_then_the_least_recently_used_deepest_block_first():
    pages = PageAllocator(1, 4)
    first = [pages.allocate(0), pages.allocate(0)]
    second = [pages.allocate(0)]
    for page in first + second:
        pages.publish(page, bytes([page]))
    pages.unref(first)
    pages.unref(second)
    pages.ref(np.array(first[:1]))  # used again
    pages.unref(first[:1])
    assert [pages.allocate(0) for _ in range(4)] == [3, first[1], second[0], first[0]]
    assert pages.with_key == pages.key_of == {}
    with pytest.raises(KeyError):
        pages.allocate(0)


def test_a_key_stays_with_the_page_that_had_it_first():
    pages = PageAllocator(1, 2)
    one = pages.allocate(0)
    two = pages.allocate(0)
    pages.publish(one, b"a")
    pages.publish(two, b"a")
    pages.unref([one, two])
    assert pages.with_key == {b"a": (one,)} and pages.free[0] == [two]


def test_check_tells_a_lost_reference():
    pages = PageAllocator(1, 2)
    page = pages.allocate(0)
    with pytest.raises(AssertionError, match="holders"):
        pages.check([page, page])


def test_a_retracted_page_is_not_found_again_and_is_free_once_dropped():
    pages = PageAllocator(1, 3)
    one = pages.allocate(0)
    two = pages.allocate(0)
    pages.publish(one, b"a")
    pages.ref(np.array([one]))
    pages.retract([one, two])
    assert pages.with_key == {}
    pages.unref([one, two])
    pages.check([one])
    pages.unref([one])
    pages.check([])
    assert not pages.cached[0] and len(pages.free[0]) == 3
