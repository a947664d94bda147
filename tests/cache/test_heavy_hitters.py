"""The most read segments, by their counts and by the prefix tree: the same ones, exactly."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.cache.heavy_hitters import enough_for, most_read, most_read_of_tree
from tests.examples import examples
from tests.work import calls_of


@st.composite
def trees(draw) -> tuple[list[int], np.ndarray]:
    """Parents of nodes, which come before them (-1: none), and how many read each."""
    size = draw(st.integers(1, 40))
    parents = [draw(st.integers(-1, node - 1)) for node in range(size)]
    readers = np.array(draw(st.lists(st.integers(0, 6), min_size=size, max_size=size)), np.int32)
    for node in reversed(range(size)):
        if parents[node] >= 0:
            readers[parents[node]] += readers[node]
    return parents, readers


@given(trees(), st.integers(1, 45), st.integers(1, 4))
@settings(max_examples=examples(400), deadline=None)
def test_counts_and_tree_find_the_same_segments(tree, most, least):
    parents, readers = tree
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    by_tree = most_read_of_tree(
        children.get(-1, ()), lambda node: children.get(node, ()), readers.item, most, least
    )
    best = sorted((-count, node) for node, count in enumerate(readers.tolist()) if count >= least)
    assert by_tree == most_read(readers, most, least).tolist() == [node for _, node in best[:most]]


def test_some_of_n_log_n_are_enough():
    assert [enough_for(lanes) for lanes in (1, 2, 4, 8, 64)] == [0, 2, 8, 24, 384]


def test_the_most_read_of_a_million_segments_are_found_with_few_calls():
    """Segments are not looked at one by one."""
    rng = np.random.default_rng(0)
    readers = rng.zipf(1.2, 10**6).clip(0, 10**6).astype(np.int32)
    best = most_read(readers, 384)
    assert len(best) == 384 and readers[best].min() >= np.sort(readers)[-384]
    assert calls_of(lambda: most_read(readers, 384)) < 1000
