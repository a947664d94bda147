"""Blocks behind a hole are known, step by step, and leave before others."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.cache import CacheManager, LaneRules
from jaxserve.cache.chains import PrefixChains
from jaxserve.settings.schema import CacheConfig
from tests.cache.test_hashes import chain
from tests.examples import examples

NOTHING = np.empty(0, np.intp)
SIZE = 4


def key(node: int) -> bytes:
    return bytes([node])


@given(
    st.lists(st.integers(-1, 14), min_size=15, max_size=15),
    st.lists(st.integers(0, 14), max_size=80),
    st.integers(1, 9),
)
@settings(max_examples=examples(400), deadline=None)
def test_all_that_is_behind_a_hole_is_known_once_it_is_followed(parents, changes, steps):
    """A change publishes a block that is not published, and takes one that is."""
    parent = [min(each, node - 1) for node, each in enumerate(parents)]
    published: dict[bytes, None] = {}
    chains = PrefixChains(published)
    flipped: dict[bytes, bool] = {}
    for node in changes:
        if key(node) in published:
            del published[key(node)]
            chains.remove(key(node))
            flipped.pop(key(node), None)
        else:
            chains.add(key(node), key(parent[node]) if parent[node] >= 0 else None)
            published[key(node)] = None
            flipped[key(node)] = key(node) in chains.behind
        chains.follow(lambda each: flipped.__setitem__(each, each in chains.behind), steps)
        assert chains.behind <= published.keys()
        assert {each for each, behind in flipped.items() if behind} == chains.behind
    chains.follow(lambda each: flipped.__setitem__(each, each in chains.behind), 10**6)

    def reached(node: int) -> bool:
        return node < 0 or (key(node) in published and reached(parent[node]))

    behind = {key(node) for node in range(15) if key(node) in published and not reached(node)}
    assert chains.behind == behind


def lanes(pages: int = 6) -> CacheManager:
    config = CacheConfig(block_size=SIZE, pages=pages, placement="round_robin")
    return CacheManager(config, 2, 4, rules=LaneRules(most_moves=9))


def cached(cache: CacheManager, document: int, blocks: int) -> list[int]:
    """Computes a document, on both lanes in turns, and leaves it cached; returns its pages."""
    hashes = chain(range(document * 1000, document * 1000 + blocks * SIZE))
    cache.admit(3, NOTHING, 0, blocks)
    cache.extend(3, blocks)
    cache.publish(3, 0, blocks, hashes)
    pages = list(cache.layouts[3].pages)
    cache.release(3)
    cache.check()
    return pages


def test_what_is_behind_a_hole_leaves_before_what_was_used_longer_ago():
    cache = lanes()
    old = cached(cache, 1, 4)  # two pages on each lane
    holed = cached(cache, 2, 8)  # four on each
    used = [page for page in (*old, *holed) if page // 6 == 0]
    for page in used[:3]:  # all but the deepest of the second document's on lane 0
        cache.pages.ref(np.array([page]))
    cache.pages.ref(np.array(used[4:]))
    cache.pages.allocate(0)  # its block 2: blocks 3 to 7 are behind a hole
    leaving = [cache.pages.allocate(1) for _ in range(4)]
    assert leaving[:3] == [holed[7], holed[5], holed[3]] and leaving[3] == old[3]


def test_blocks_are_reached_again_once_the_hole_is_filled():
    cache = lanes()
    pages = cached(cache, 1, 6)
    cache.pages.ref(np.array([pages[0], *pages[4:]]))
    taken = [cache.pages.allocate(0) for _ in range(4)]  # three free, and block 2
    assert pages[2] in taken
    cache.pages.unref([pages[0], *pages[4:]])
    hashes = chain(range(1000, 1000 + 6 * SIZE))
    assert len(cache.match(hashes, 6).pages) == 2
    for _ in range(2):
        cache.pages.allocate(1)
    cache.pages.publish(taken[3], hashes[2], hashes[1])
    cache.pages.unref(taken)
    assert len(cache.match(hashes, 6).pages) == 6


def test_of_the_oldest_pages_one_leaves_whose_block_has_another():
    cache = lanes()
    first = cached(cache, 1, 4)
    second = cached(cache, 2, 4)
    copy = cache.copy(second[1], 0)
    cache.moves.take()
    assert copy is not None
    taken = [cache.pages.allocate(1) for _ in range(3)]
    assert taken[2] == second[1] and len(cache.pages.with_key) == 8
    assert first[3] not in taken
