"""Lanes evict for themselves, but lose little of what one cache of all their pages would hit."""

from __future__ import annotations

import numpy as np

from jaxserve.cache import CacheManager, LaneRules
from jaxserve.settings.schema import CacheConfig
from tests.cache.test_hashes import chain

SIZE = 4
REQUESTS = 500


def hit_rate(lanes: int, placement: str, pages: int = 960, documents: int = 150) -> float:
    """The share of blocks that are found, of parts of documents that are drawn by Zipf's law."""
    config = CacheConfig(block_size=SIZE, pages=pages // lanes, placement=placement)
    cache = CacheManager(config, lanes, 1, rules=LaneRules(stripe=4))
    dice = np.random.default_rng(0)
    weight = np.arange(1, documents + 1) ** -0.9
    lengths = dice.integers(10, 60, documents)
    keys = [chain(range(first, first + 62 * SIZE)) for first in range(0, documents * 1000, 1000)]
    found = asked = 0
    for number in dice.choice(documents, REQUESTS, p=weight / weight.sum()):
        share = 1.0 if dice.random() < 0.6 else dice.random()
        blocks = int(lengths[number] * share) + 1
        match = cache.match(keys[number], blocks)
        found += len(match.pages)
        asked += blocks
        home = int(dice.integers(lanes))
        cache.admit(0, match.pages, home, blocks + 2, hashes=keys[number])
        cache.extend(0, blocks + 2 - len(match.pages))
        cache.publish(0, 0, blocks, keys[number])
        cache.release(0)
    cache.check()
    return found / asked


def test_four_lanes_hit_nearly_as_much_as_one_of_their_size():
    """Without regard to holes, hashed segments would hit 0.88 of it."""
    alone = hit_rate(1, "grow")
    shares = {name: hit_rate(4, name) / alone for name in ("hashed", "round_robin", "grow")}
    assert alone > 0.3 and min(shares.values()) > 0.92, shares
