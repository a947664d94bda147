"""Requests are matched to lanes as brute force does it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jaxserve.lanes.groups import group_sizes
from jaxserve.lanes.work import Heads
from jaxserve.scheduling.pool.dispatch import TokenBytes, balanced_room, gains, match, match_groups

LLAMA_2 = Heads(32, 32, 128)


def drawn(rng: np.random.Generator, requests: int, lanes: int) -> np.ndarray:
    visits = rng.integers(0, 50, (requests, lanes))
    puts = rng.integers(0, 20, (requests, lanes))
    return gains(visits, puts, TokenBytes.of(LLAMA_2))


def test_a_token_has_the_bytes_of_the_paper():
    """4 d of queries and outputs in 16 bit, besides the log-sum-exp of each head; 4 d of KV."""
    d = 4096
    paper = TokenBytes.of(Heads(32, 32, 128, partial=2))
    assert paper == (4 * d + 2 * 32, 4 * d)
    grouped = TokenBytes.of(Heads(32, 8, 128))
    assert grouped.put == d, "K / N of it"
    assert grouped.query == TokenBytes.of(LLAMA_2).query == 2 * d + 4 * 32 * 129


@pytest.mark.parametrize("seed", range(100))
def test_the_match_is_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    lanes = int(rng.integers(2, 5))
    room = rng.integers(0, 3, lanes)
    requests = int(rng.integers(0, min(5, room.sum()) + 1))
    gain = drawn(rng, requests, lanes)
    found = match(gain, room)
    assert (np.bincount(found, minlength=lanes) <= room).all()
    best = max(
        sum(gain[request, lane] for request, lane in enumerate(way))
        for way in itertools.product(range(lanes), repeat=requests)
        if all(way.count(lane) <= room[lane] for lane in range(lanes))
    )
    assert gain[np.arange(requests), found].sum() == best


def test_no_more_requests_than_room():
    with pytest.raises(ValueError, match="3 requests, and room for 2"):
        match(np.ones((3, 2)), [1, 1])


@pytest.mark.parametrize("seed", range(50))
def test_groups_are_aligned_and_disjoint_and_best_for_one_degree(seed):
    rng = np.random.default_rng(seed)
    lanes = int(rng.choice([4, 6, 8]))
    sizes = group_sizes(lanes)
    degrees: list[int] = []
    while (left := lanes - sum(degrees)) and rng.random() < 0.9:
        degrees.append(int(rng.choice([size for size in sizes if size <= left])))
    gain = drawn(rng, len(degrees), lanes)
    groups = match_groups(gain, degrees, np.ones(lanes, bool))
    taken = [lane for group in groups for lane in group]
    assert len(taken) == len(set(taken)) == sum(degrees)
    for group, degree in zip(groups, degrees):
        assert len(group) == degree and group.start % degree == 0
    if len(set(degrees)) == 1:
        places = [range(start, start + degrees[0]) for start in range(0, lanes, degrees[0])]
        best = max(
            sum(gain[batch, list(group)].sum() for batch, group in enumerate(way))
            for way in itertools.permutations(places, len(degrees))
        )
        assert sum(gain[batch, list(group)].sum() for batch, group in enumerate(groups)) == best


def test_room_makes_lanes_equal():
    room = lambda *running, requests: balanced_room(np.array(running), requests).tolist()
    assert room(3, 0, 1, 3, requests=4) == [0, 3, 2, 0]
    assert room(0, 0, requests=1) == [1, 1], "either"
    assert room(2, 0, requests=1) == [0, 2]
    assert room(90, 0, requests=5) == [0, 48]
