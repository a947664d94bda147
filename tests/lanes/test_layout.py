"""The places of one sequence's blocks, without pages that could run out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.lanes.layout import BLOCK, INDEX, LANE, PAGE, SLOT, SequenceLayout
from tests.examples import examples

PER_LANE = 100


def filled(lanes: list[int], home: int = 0, ascending: bool = False) -> SequenceLayout:
    """A layout of four lanes whose blocks lie on the given ones, on ascending pages."""
    layout = SequenceLayout(3, 4, PER_LANE, home, ascending=ascending)
    for block, lane in enumerate(lanes):
        assert layout.append(lane * PER_LANE + block, lane) == lanes[:block].count(lane)
    layout.check()
    return layout


def test_entries_name_the_rows_of_the_device():
    layout = filled([1, 0, 1, 2])
    entries = layout.entries(1)
    assert entries[:, [LANE, SLOT]].tolist() == [[1, 3], [1, 3]]
    assert entries[:, [INDEX, PAGE, BLOCK]].tolist() == [[0, 0, 0], [1, 2, 2]]
    assert layout.entries(1, 1).tolist() == entries[1:].tolist() and not len(layout.entries(3))
    assert layout.lanes_of(1, 3).tolist() == [0, 1] and layout.last_lane == 2


def test_matched_pages_give_the_same_as_blocks_one_by_one():
    layout = filled([1, 0, 1, 2])
    other = SequenceLayout(3, 4, PER_LANE)
    entries = other.start(np.array(layout.pages))
    assert (other.pages, other.rows, other.by_lane) == (layout.pages, layout.rows, layout.by_lane)
    assert entries.tolist() == [row for lane in range(4) for row in layout.entries(lane).tolist()]
    assert layout.group_size == other.group_size == 4
    assert filled([1, 0]).group_size == 2 and filled([0, 0]).group_size == 1


def test_keys_are_known_of_full_blocks_of_the_prompt():
    asked = []
    layout = SequenceLayout(0, 1, PER_LANE, prompt_blocks=3, key_of=lambda block: bytes([block]))
    assert [layout.key(block) for block in range(4)] == [b"\0", b"\1", None, None]
    assert SequenceLayout(0, 1, PER_LANE, key_of=asked.append).key(0) is None and not asked
    assert SequenceLayout(0, 1, PER_LANE, prompt_blocks=3).key(0) is None


@settings(deadline=None, max_examples=examples(200))
@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.booleans(), st.data())
def test_a_move_returns_where_rows_differ(lanes, ascending, data):
    layout = filled(lanes, ascending=ascending)
    before = data.draw(st.integers(0, len(lanes)), "first block of the newest chunk")
    lane = data.draw(st.sampled_from(lanes))
    movable = [block for block in layout.rows[lane] if block < before]
    blocks = sorted(data.draw(st.sets(st.sampled_from(movable)), "moves")) if movable else []
    to_lane = (lane + data.draw(st.integers(1, 3))) % 4
    if not blocks:
        return
    rows = [layout.entries(each).tolist() for each in range(4)]
    targets = [to_lane * PER_LANE + 50 + block for block in blocks]
    starts = layout.move(blocks, to_lane, targets, before)
    assert set(starts) == {lane, to_lane}
    if layout.group_size == 1:
        layout.rows[0].sort()
    layout.check()
    for each, start in starts.items():
        assert layout.entries(each)[:start].tolist() == rows[each][:start] or each == 0
    newest = [block for block in layout.rows[to_lane] if block >= before]
    assert ascending or layout.rows[to_lane][len(layout.rows[to_lane]) - len(newest) :] == newest
    assert [layout.pages[block] for block in blocks] == targets


def test_a_row_that_is_wrong_is_noticed():
    layout = filled([0, 1, 0])
    layout.rows[0].reverse()
    layout.check()  # of a spread sequence, in whatever order
    layout.rows[0][0] = 1
    with pytest.raises(AssertionError, match="a row of lane 0"):
        layout.check()
    layout = filled([0, 1, 0], ascending=True)
    layout.rows[0].reverse()
    with pytest.raises(AssertionError, match="a row of lane 0"):
        layout.check()
