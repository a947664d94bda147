"""Times of moves found from steps whose true times are known."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from jaxserve.costs.coefficients import Costs
from jaxserve.costs.move_fit import MoveSample, fit_moves
from jaxserve.costs.predictor import Predictor
from jaxserve.engine.profiling.measure import MeasurePoint, batch_of
from jaxserve.lanes.choice import Correction, ExchangeChooser, MoveTimes
from jaxserve.lanes.cost import lane_costs
from jaxserve.lanes.rates import LaneLinks, Link
from jaxserve.lanes.work import Heads
from jaxserve.settings.schema import ConfigError, MeshConfig

FOUR = MeshConfig(kvp=4)
COSTS = Costs(layers=8, linear_base=1e-3, linear_token=2e-5, pair=2e-9, read=1e-7, decode_kv=3e-8)
HEADS = Heads(9, 3, 64, 4)
LINKS = {2: LaneLinks.alike(Link(1e-4, 4e9)), 4: LaneLinks.alike(Link(3e-4, 1e9))}
CHOOSER = ExchangeChooser(
    4, HEADS, COSTS.exchange_rates(HEADS), costs=COSTS, block=16, moves=64, links=LINKS
)
# a move that is longer than the linear parts of few tokens and shorter than those of many
TIMES = MoveTimes(Correction(5e-4, 1.5), 0.7)


def samples(times: MoveTimes | None, noise: float = 0.0, seed: int = 0) -> list[MoveSample]:
    """Samples, as many as `move_grid` has at most, of an engine with these times."""
    dice = np.random.default_rng(seed)
    known = dataclasses.replace(CHOOSER, move_times=times)
    predictor = Predictor(COSTS, FOUR, lane_costs(COSTS, 4, known))
    out = []
    for size, moves in itertools.product((2, 4), (16, 64)):
        points = [MeasurePoint(decodes=count, context=512, group_size=size) for count in (1, 4)]
        points += [
            MeasurePoint(chunks=1, new=rows * 64 * size, sample=False, group_size=size)
            for rows in (1, 16)
        ]
        for point in points:
            batch = batch_of(dataclasses.replace(point, moves=moves), 4, 16)
            unmoved = dataclasses.replace(batch, moves=batch.moves[:0])
            moved, without = (
                predictor.seconds(each) * (1 + noise * dice.standard_normal())
                for each in (batch, unmoved)
            )
            out.append(MoveSample(batch, moved, without))
    return out


def test_times_of_moves_and_what_is_hidden_of_them_are_found_again():
    found = fit_moves(COSTS, FOUR, CHOOSER, samples(TIMES))
    assert found.times is not None
    assert found.times.correction.seconds == pytest.approx(TIMES.correction.seconds, rel=0.05)
    assert found.times.correction.factor == pytest.approx(TIMES.correction.factor, rel=0.05)
    assert found.times.hidden == pytest.approx(TIMES.hidden, abs=0.05)
    assert set(found.held_out) == {("gather", 2), ("gather", 4)}
    assert max(found.held_out.values()) < 0.01


def test_noise_of_three_percent_costs_steps_that_move_pages_no_more_than_ten():
    found = fit_moves(COSTS, FOUR, CHOOSER, samples(TIMES, 0.03))
    assert found.times is not None and max(found.held_out.values()) < 0.10


def test_moves_that_take_what_links_say_are_left_to_them():
    found = fit_moves(COSTS, FOUR, CHOOSER, samples(None))
    assert found.times is None and max(found.held_out.values()) == pytest.approx(0)


def test_measurements_that_are_mere_noise_correct_nothing():
    fits = [fit_moves(COSTS, FOUR, CHOOSER, samples(None, 0.1, seed)) for seed in range(6)]
    uncorrected = [found for found in fits if found.times is None]
    assert len(uncorrected) >= 3
    assert all(0 < error < 0.3 for found in uncorrected for error in found.held_out.values())


def test_a_profile_with_times_of_moves_changes_predictions_of_steps_that_move_pages_alone():
    plain = Predictor(COSTS, FOUR, lane_costs(COSTS, 4, CHOOSER))
    timed = dataclasses.replace(CHOOSER, move_times=MoveTimes(Correction(0.0, 3.0), 0.0))
    slow = Predictor(COSTS, FOUR, lane_costs(COSTS, 4, timed))
    batch = batch_of(MeasurePoint(decodes=2, context=512, group_size=4, moves=8), 4, 16)
    unmoved = dataclasses.replace(batch, moves=batch.moves[:0])
    assert slow.seconds(unmoved) == plain.seconds(unmoved)
    sent = CHOOSER.for_groups(4).move_seconds()
    moved = slow.seconds(batch) - slow.seconds(unmoved)
    assert moved == pytest.approx(3 * sent * COSTS.layers)  # nothing is hidden
    assert 0 < plain.seconds(batch) - plain.seconds(unmoved) < moved


def test_a_fit_of_moves_needs_some():
    with pytest.raises(ConfigError, match="points that move pages"):
        fit_moves(COSTS, FOUR, CHOOSER, [])


def test_more_cannot_be_hidden_than_there_is():
    with pytest.raises(ConfigError, match="hidden"):
        MoveTimes(hidden=1.5)
