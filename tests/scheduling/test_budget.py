"""What a step has room for: its pace beside decodes, and how much of a prompt goes into it.

A step takes a millisecond per token, unless said otherwise.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.costs.coefficients import Costs
from jaxserve.costs.predictor import Predictor
from jaxserve.lanes.groups import ChunkPlace
from jaxserve.lanes.load import LaneLoad
from jaxserve.scheduling.budget import CHUNKING, StepBudget, adaptive
from jaxserve.settings.schema import MeshConfig
from tests.examples import examples

TOKEN = Costs(layers=1, linear_token=0.001)
HOME = ChunkPlace(0)
SPREAD = ChunkPlace(0, [3, 1])


def room(
    target: float,
    long: float,
    *decodes: int,
    tile: int = 1,
    tokens: int = 4096,
    costs: Costs = TOKEN,
) -> StepBudget:
    """Beside so many decodes per lane, each after 100 tokens; on one lane without any, where none
    are given."""
    lanes = [LaneLoad(count, 100 * count, 100, samples=count) for count in decodes or (0,)]
    return StepBudget(
        Predictor(costs, MeshConfig(kvp=len(lanes))), lanes, tokens, tile, target, long
    )


def test_without_decodes_all_prompts_have_the_same_time():
    made = room(0.25, 0.25)
    assert (made.target, made.long_target) == (0.25, 0.25)
    assert adaptive(made, HOME, 0, 4096, made.target) == 250


def test_a_prompt_of_several_steps_has_less_time_than_short_ones_that_fill_the_objective():
    """100 decodes, of which each may wait a second."""
    made = room(1.0, 0.25, 100)
    assert (made.target, made.long_target) == (1.0, 0.25)
    assert (
        adaptive(made, HOME, 0, 4096, made.target) == 900
        and adaptive(made, HOME, 0, 4096, made.long_target) == 150
    )


def test_it_has_no_more_than_the_objective_of_the_decodes():
    made = room(0.2, 0.25, 100)
    assert (made.target, made.long_target) == (0.2, 0.2)


@pytest.mark.parametrize("long, then", [(0.05, 0.125), (0.12, 0.125), (0.13, 0.13)])
def test_a_long_prompt_has_a_quarter_of_the_decodes_time_however_short_its_steps_shall_be(
    long, then
):
    assert room(1.0, long, 100).long_target == pytest.approx(then)


def test_a_share_is_of_what_the_decodes_leave():
    made = room(1.0, 0.25, 100)
    assert [made.limit(0, share) for share in (0, 0.5, 1)] == pytest.approx([0.1, 0.55, 1.0])


def test_what_was_taken_is_there_no_more():
    """50 tokens take one tile of 64."""
    made = room(0.25, 0.25, tile=64, tokens=256)
    made.add(HOME, 0, 50)
    assert made.tokens_left == [192] and made.lane_seconds == pytest.approx([0.05])
    assert adaptive(made, HOME, 0, 192, made.target) == 192
    made.add(HOME, 0, 192)
    assert made.tokens_left == [0] and made.lane_seconds == pytest.approx([0.242])


def test_a_spread_chunk_takes_time_and_tokens_of_all_lanes_of_its_group():
    made = room(0.25, 0.25, 0, 100, tile=4, tokens=256)
    assert made.seconds(HOME) == 0 and made.seconds(SPREAD) == made.seconds(
        ChunkPlace(1)
    ) == pytest.approx(0.1)
    assert made.seconds_with(SPREAD, 0, 40) == pytest.approx(0.12) and made.seconds_with(
        HOME, 0, 40
    ) == pytest.approx(0.04)
    made.add(SPREAD, 0, 40)
    assert made.lane_seconds == pytest.approx([0.02, 0.12]) and made.tokens_left == [236, 236]


@settings(max_examples=examples(300), deadline=None)
@given(
    most=st.integers(1, 3000),
    tile=st.sampled_from([1, 16, 64]),
    cached=st.sampled_from([0, 100, 100_000]),
    until=st.floats(0, 4),
    before=st.lists(st.integers(1, 500), max_size=3),
    decodes=st.integers(0, 300),
    costs=st.builds(
        Costs,
        layers=st.just(2),
        launch=st.sampled_from([0, 0.1]),
        linear_floor=st.sampled_from([0, 0.1]),
        linear_token=st.sampled_from([0, 1e-4, 1e-3]),
        pair=st.sampled_from([0, 1e-8]),
        chunk=st.sampled_from([0, 0.01]),
    ),
)
def test_an_adaptive_chunk_is_the_most_whole_tiles_that_are_in_time(
    most, tile, cached, until, before, decodes, costs
):
    """It takes all there is otherwise, even if that ends within a tile."""
    made = room(1.0, 1.0, decodes, tile=tile, costs=costs)
    for chunk in before:
        made.add(HOME, 0, chunk)
    lengths = [*range(tile, most, tile), most]
    fitting = [length for length in lengths if made.seconds_with(HOME, cached, length) <= until]
    chosen = adaptive(made, HOME, cached, most, until)
    assert chosen == (max(fitting, default=0) if until > made.seconds(HOME) else 0)
    left = made.tokens_left[0]
    pace = made.lane_seconds[0]
    if chosen:
        made.add(HOME, cached, chosen)
        assert pace <= made.lane_seconds[0] <= until and made.tokens_left[0] == max(
            0, left - math.ceil(chosen / tile) * tile
        )


@given(most=st.integers(1, 3000), until=st.floats(0, 4))
def test_a_static_chunk_is_all_there_is_room_for(most, until):
    assert CHUNKING["static"](room(1.0, 1.0), HOME, 0, most, until) == most
