"""Segments lie where their hash says: evenly, equal prefixes on equal lanes, within the group of
lanes around home as long as that has room."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest

from jaxserve.cache import CacheManager, LaneRules
from jaxserve.costs.coefficients import NOMINAL
from jaxserve.lanes.placement import default_pool
from jaxserve.lanes.rates import LaneLinks, Link
from jaxserve.lanes.segments import least_segment
from jaxserve.lanes.work import Heads
from jaxserve.scheduling.assembly import ReplicaProfile, ReplicaSizes
from jaxserve.settings.schema import CacheConfig, MeshConfig, SchedulerConfig
from tests.engine.harness import engine, generate

NOTHING = np.empty(0, np.intp)
SIZE = 4
SEGMENT = 3  # blocks


def placed(
    tokens: np.ndarray, lanes: int = 8, home: int = 0, decoded: int = 0, pages: int = 900, **config
) -> list[int]:
    """The lanes of a prompt's blocks in an empty cache, and of decoded ones."""
    made = CacheConfig(block_size=SIZE, pages=pages, placement="hashed", **config)
    cache = CacheManager(made, lanes, 1, rules=LaneRules(SEGMENT))
    hashes = cache.block_hashes("", lambda first, last: tokens[first:last])
    blocks = cache.blocks(len(tokens))
    cache.admit(0, NOTHING, home, blocks, hashes=hashes)
    cache.extend(0, blocks)
    cache.extend(0, decoded)
    cache.check()
    return cache.layouts[0].lanes_of(0, blocks + decoded).tolist()


def prompt(seed: int, blocks: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 999, blocks * SIZE).astype(np.int32)


def variation(counts: Counter[int], lanes: int) -> float:
    values = np.array([counts[lane] for lane in range(lanes)])
    return float(values.std() / values.mean())


def test_segments_are_even_over_lanes_as_chance_has_it_and_not_in_turns():
    """The coefficient of variation of n even segments on N lanes is about sqrt((N - 1) / n): far
    less would mean that consecutive segments go in turns."""
    segments = 900
    lanes = placed(prompt(1, segments * SEGMENT + 1))[: segments * SEGMENT]
    assert all(len(set(lanes[at : at + SEGMENT])) == 1 for at in range(0, len(lanes), SEGMENT))
    by_segment = lanes[::SEGMENT]
    expected = np.sqrt(7 / segments)
    assert 0.3 * expected < variation(Counter(by_segment), 8) < 2 * expected
    steps = Counter((two - one) % 8 for one, two in zip(by_segment, by_segment[1:]))
    assert variation(steps, 8) < 2.5 * expected


def test_first_segments_of_documents_are_even_over_lanes_too():
    firsts = [placed(prompt(seed, SEGMENT + 2))[0] for seed in range(240)]
    assert variation(Counter(firsts), 8) < 2 * np.sqrt(7 / 240)


def test_decoded_segments_are_even_too_and_hang_on_the_prompt():
    lanes = placed(prompt(1, 20), decoded=720)
    by_segment = lanes[21::SEGMENT]
    assert variation(Counter(by_segment), 8) < 2 * np.sqrt(7 / 240)
    assert placed(prompt(1, 20), decoded=720) == lanes
    assert placed(prompt(2, 20), decoded=720)[20:] != lanes[20:]


def test_equal_prefixes_lie_on_equal_lanes_of_their_group():
    tokens = prompt(3, 50)
    lanes = placed(tokens, pool_lanes=4, home=1)
    assert set(lanes) == {0, 1, 2, 3}
    assert placed(tokens, pool_lanes=4, home=3) == lanes
    assert placed(tokens, pool_lanes=4, home=6) == [lane + 4 for lane in lanes]
    assert placed(tokens[: 30 * SIZE], pool_lanes=4)[:29] == lanes[:29]
    assert len(set(placed(tokens, prefix_caching=False))) > 4  # by slot, where none is kept


def test_a_prompt_of_one_segment_is_at_home_with_what_it_decodes():
    assert placed(prompt(3, SEGMENT), home=5, decoded=9) == [5] * 12


def test_full_lanes_are_left_out_and_the_group_first():
    tokens = prompt(4, 60)
    lanes = placed(tokens, pool_lanes=4, pages=20)
    counts = Counter(lanes)
    assert max(counts.values()) <= 20 and set(counts) == {0, 1, 2, 3}
    assert set(placed(prompt(4, 100), pool_lanes=4, pages=20)) > {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("lanes", "pool"), [(2, 2), (3, 3), (6, 6), (8, 8), (12, 4), (16, 8), (1, 1), (11, 1)]
)
def test_the_default_pool_is_a_group_within_a_node(lanes, pool):
    assert default_pool(lanes) == pool


def test_a_segment_is_as_long_as_settings_or_costs_say_and_a_row_at_least():
    heads = Heads(32, 8, 128)
    costs = dataclasses.replace(NOMINAL, read=2e-9, kvp=4e-6)

    def stripe(profile: ReplicaProfile | None, placement: str = "hashed", **cache) -> int:
        config = CacheConfig(block_size=16, pages=9, placement=placement, **cache)
        made = SchedulerConfig(chunk_tokens=1024)
        return ReplicaSizes(MeshConfig(kvp=4), config, made, heads, 9999, 9999).stripe(profile)

    measured = ReplicaProfile(costs, {})
    row = stripe(None)
    assert stripe(measured, "striped") == stripe(ReplicaProfile(NOMINAL, {})) == row
    least = least_segment(heads, costs.exchange_rates(heads))
    assert stripe(measured) == -(-least // 16) > row
    slow = {2: LaneLinks.alike(Link(9e-6, 1e12)), 4: LaneLinks.alike(Link(20e-6, 1e12))}
    assert stripe(ReplicaProfile(costs, slow), pool_lanes=2) == pytest.approx(9000 / 16, rel=0.01)
    assert stripe(ReplicaProfile(costs, slow)) == pytest.approx(20000 / 16, rel=0.01)
    assert stripe(measured, segment_tokens=90) == 6


def test_an_engine_serves_with_it_and_the_tokens_stay():
    prompts = [[3 + 7 * token % 500 for token in range(length)] for length in (150, 90, 20)]
    size = dict(chunk=32, seqs=4, pages=40, block=8, max_len=256)
    right = generate(engine(**size), prompts, max_tokens=6)
    made = engine(mesh="kvp=4", placement="hashed", pool_lanes=2, segment_tokens=16, **size)
    assert generate(made, prompts, max_tokens=6) == right
    assert generate(made, prompts, max_tokens=6) == right  # behind cached prefixes
