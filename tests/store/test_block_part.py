"""Parts of blocks are cut out of blocks and put together again, whatever the cuts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.store.block_part import BlockPart, PartBytes, PartPlace, cover

WHOLE = PartBytes(BlockPart(range(6), range(4)), 12, 4)


def part(first_layer: int, end_layer: int, first_head: int, end_head: int) -> BlockPart:
    return BlockPart(range(first_layer, end_layer), range(first_head, end_head))


@st.composite
def ranges(draw, most: int) -> range:
    start = draw(st.integers(0, most - 1))
    return range(start, draw(st.integers(start + 1, most)))


@st.composite
def cuts(draw, most: int) -> list[range]:
    """Ranges that follow each other up to `most`."""
    ends = sorted(draw(st.sets(st.integers(1, most - 1))))
    return [range(start, end) for start, end in zip([0, *ends], [*ends, most])]


@given(st.builds(BlockPart, ranges(6), ranges(4)), cuts(6), cuts(4), st.integers(0, 20))
def test_what_is_wanted_comes_from_processes_with_other_cuts(wanted, layers, heads, first):
    places = [
        PartPlace(BlockPart(some, ours), f"{number}:1")
        for number, (some, ours) in enumerate((a, b) for a in layers for b in heads)
    ]
    first %= len(places)
    block = np.random.default_rng(0).integers(0, 256, WHOLE.bytes, np.uint8)
    right = np.empty(WHOLE.of(wanted).bytes, np.uint8)
    WHOLE.take(block, wanted, right)
    joined = np.zeros_like(right)
    for asked, address in cover(wanted, [*places[first:], *places[:first]]):
        there = WHOLE.of(places[int(address.partition(":")[0])].part)
        held = np.empty(there.bytes, np.uint8)
        WHOLE.take(block, there.part, held)
        piece = np.empty(WHOLE.of(asked).bytes, np.uint8)
        there.take(held, asked, piece)
        WHOLE.of(wanted).put(joined, asked, piece)
    assert (joined == right).all()


def test_of_processes_with_copies_one_is_asked():
    """Of heads 0 to 3 as four processes have them with two copies of each, two in each process."""
    heads = [part(0, 6, 0, 2), part(0, 6, 0, 2), part(0, 6, 2, 4), part(0, 6, 2, 4)]
    places = [PartPlace(each, f"{number}:1") for number, each in enumerate(heads)]
    assert [place.address for place in cover(WHOLE.part, places)] == ["0:1", "2:1"]
    assert [place.address for place in cover(part(1, 2, 0, 1), places[1:])] == ["1:1"]


def test_of_a_head_that_two_processes_have_one_sends_it():
    """Three heads, two copies of each, three in each of two processes."""
    places = [PartPlace(part(0, 6, 0, 2), "a:1"), PartPlace(part(0, 6, 1, 4), "b:1")]
    assert cover(WHOLE.part, places) == [places[0], PartPlace(part(0, 6, 2, 4), "b:1")]
    assert cover(WHOLE.part, places[::-1]) == [places[1], PartPlace(part(0, 6, 0, 1), "a:1")]


def test_what_no_process_has_is_refused():
    places = [PartPlace(part(0, 3, 0, 4), "a:1"), PartPlace(part(4, 6, 0, 4), "b:1")]
    with pytest.raises(ValueError, match="no process has 4 of 24"):
        cover(WHOLE.part, places)
    assert len(cover(part(4, 5, 1, 2), places)) == 1
    with pytest.raises(ValueError, match="no process"):
        cover(part(0, 1, 0, 1), [])
