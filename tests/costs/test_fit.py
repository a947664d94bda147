"""Costs found from steps whose true costs are known, and their way through a file."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping

import numpy as np
import pytest

from jaxserve.costs.coefficients import Costs, ShapeCost, SpreadShape
from jaxserve.costs.fit import (
    SpreadSample,
    StepSample,
    fit_costs,
    fit_decodes,
    fit_spread,
    from_json,
    predicted,
    to_json,
)
from jaxserve.costs.predictor import Predictor
from jaxserve.engine.profiling.measure import MeasurePoint, batch_of
from jaxserve.lanes.choice import Correction, ExchangeChooser
from jaxserve.lanes.cost import lane_costs
from jaxserve.lanes.exchange import EXCHANGES, decode_exchanges
from jaxserve.lanes.rates import Link
from jaxserve.lanes.work import Heads
from jaxserve.settings.schema import ConfigError, MeshConfig

SHAPES = [
    ShapeCost(1, 0, 0, 1e-3),
    ShapeCost(4, 0, 0, 1.2e-3),
    ShapeCost(0, 1, 64, 2e-3),
    ShapeCost(4, 1, 64, 2.4e-3),
    ShapeCost(4, 4, 64, 6e-3),
]
TRUE = Costs(
    layers=8, pair=2e-9, read=1e-7, decode_kv=3e-8, head=4e-3, shapes=tuple(SHAPES), tile=64
)


def points() -> list[tuple]:
    """(decodes, context, chunks, cached, new, samples, shape)"""
    base = [
        (1, 1, 0, 0, 0, 1),
        (4, 1, 0, 0, 0, 4),
        (0, 0, 1, 0, 64, 0),
        (3, 1, 1, 0, 64, 4),
        (2, 1, 2, 0, 128, 4),
        (1, 1, 0, 0, 0, 0),
    ]
    far = [(count, context, 0, 0, 0, count) for count in (1, 4) for context in (256, 1024, 4096)]
    far += [(0, 0, 1, cached, new, 0) for cached in (256, 1024, 4096) for new in (16, 64)]
    far += [(3, cached, 1, cached, 64, 4) for cached in (256, 1024, 4096)]
    return base + far


def shape_of(decodes: int, chunks: int, new: int) -> tuple[int, int, int]:
    if not chunks:
        return (1 if decodes <= 1 else 4), 0, 0
    return (4 if decodes else 0), (1 if chunks == 1 else 4), 64


def samples(costs: Costs, noise: float = 0.0) -> list[StepSample]:
    dice = np.random.default_rng(0)
    out = []
    for decodes, context, chunks, cached, new, sampled in points():
        sample = StepSample(
            decodes, context, chunks, cached, new, sampled, shape_of(decodes, chunks, new), 0.0
        )
        seconds = predicted(costs, MeshConfig(), sample) * (1 + noise * dice.standard_normal())
        out.append(dataclasses.replace(sample, seconds=seconds))
    return out


@pytest.mark.parametrize("longest", [False, True])
def test_known_costs_are_found_again(longest):
    true = dataclasses.replace(TRUE, longest=longest)
    found = fit_costs(samples(true), 8, MeshConfig(), longest)
    assert found.fitted < 0.02 and found.held_out < 0.02
    assert found.costs.head == pytest.approx(true.head, rel=0.02)
    assert found.costs.decode_kv == pytest.approx(true.decode_kv, rel=0.05)
    assert [shape.seconds for shape in found.costs.shapes] == pytest.approx(
        [shape.seconds for shape in SHAPES], rel=0.05
    )


def test_noise_of_three_percent_costs_no_more_than_ten():
    found = fit_costs(samples(TRUE, 0.03), 8, MeshConfig(), False)
    assert found.fitted < 0.06 and found.held_out < 0.10


def test_shapes_that_were_not_measured_cost_what_lies_between_those_that_were():
    """A first start measures when a few programs are compiled."""
    extents = [(1, 0, 0), (2, 0, 0), (4, 0, 0), (0, 1, 64), (4, 1, 64), (4, 2, 64), (4, 4, 64)]
    found = fit_costs(samples(TRUE), 8, MeshConfig(), False, extents).costs
    seconds = {(each.decodes, each.rows, each.width): each.seconds for each in found.shapes}
    assert list(seconds) == extents
    assert seconds[2, 0, 0] == pytest.approx(1e-3 + 0.2e-3 / 3, rel=0.05)
    assert seconds[4, 2, 64] == pytest.approx(2.4e-3 + 3.6e-3 / 3, rel=0.05)


def test_stages_share_the_layers():
    mesh = MeshConfig(spp=2)
    found = fit_costs(
        [dataclasses.replace(s, seconds=predicted(TRUE, mesh, s)) for s in samples(TRUE)],
        8,
        mesh,
        False,
    )
    assert found.costs.shapes[1].seconds == pytest.approx(SHAPES[1].seconds, rel=0.05)


def test_a_fit_needs_steps_with_and_without_sampling():
    with pytest.raises(ConfigError, match="with and without sampled tokens"):
        fit_costs([s for s in samples(TRUE) if s.samples], 8, MeshConfig(), False)


def test_costs_pass_through_json_and_strangers_do_not():
    for costs in (TRUE, LIVE):
        assert from_json(json.loads(json.dumps(to_json(costs)))) == costs
    for damaged in (
        {**to_json(TRUE), "color": 1},
        {**to_json(TRUE), "pair": "fast"},
        {"layers": 8, "shapes": [{"rows": 1}]},
        [],
    ):
        with pytest.raises(ConfigError, match="profile"):
            from_json(damaged)


# --- steps with spread chunks

FOUR = MeshConfig(kvp=4)
STRIPE = 4  # blocks of 16 tokens: a row
SPREAD_SHAPES = tuple(
    SpreadShape(size, exchange, 4, rows, 4 + 64 * rows)
    for rows in (2, 5)
    for size in (2, 4)
    for exchange in EXCHANGES
)
LIVE = dataclasses.replace(
    TRUE, spread_shapes=SPREAD_SHAPES, padding=0.3, shared=0.4, linear_base=1e-3, linear_token=2e-5
)
HEADS = Heads(9, 3, 64, 4)
LINK = Link(1e-4, 1e9)
RATES = dataclasses.replace(TRUE.exchange_rates(HEADS), hop=LINK, all_gather=LINK, all_to_all=LINK)
CORRECTIONS = {
    "gather": Correction(5e-4, 1.5),
    "pass_q": Correction(2e-3, 0.8),
    "pass_kv": Correction(1e-3, 2.0),
}


def chooser(strategy: str, **fields) -> ExchangeChooser:
    return ExchangeChooser(
        4, HEADS, RATES, piece=2048, costs=TRUE, chooser=strategy, block=16, **fields
    )


def spread_samples(noise: float = 0.0) -> list[SpreadSample]:
    """Samples, as many as `spread_grid` has at most, of an engine of LIVE and CORRECTIONS."""
    dice = np.random.default_rng(0)
    out = []
    for size, exchange in itertools.product((2, 4), EXCHANGES):
        known = Predictor(
            LIVE, FOUR, lane_costs(LIVE, 4, chooser(exchange, corrections=CORRECTIONS))
        )
        points = [
            dict(cached=cached, new=rows * 64 * size)
            for cached in (0, 2048, 16_384)
            for rows in (1, 4)
        ]
        points += [dict(cached=2048, new=256 * size, decodes=1, context=2048)]
        points += [dict(cached=16_384, new=256 * size, groups=1)] if size == 2 else []
        for point in points:
            made = MeasurePoint(
                chunks=1, group_size=size, exchange=exchange, **{"sample": False, **point}
            )
            batch = batch_of(made, 4, 16, STRIPE)
            seconds = known.seconds(batch) * (1 + noise * dice.standard_normal())
            out.append(SpreadSample(batch, seconds))
    return out


def test_what_spread_steps_take_besides_is_found_again():
    found = fit_spread(LIVE, FOUR, chooser("auto"), spread_samples())
    assert found.costs.padding == pytest.approx(LIVE.padding, abs=0.05)
    assert found.costs.shared == pytest.approx(LIVE.shared, abs=0.05)
    for name, true in CORRECTIONS.items():
        assert found.corrections[name].factor == pytest.approx(true.factor, rel=0.1)
    assert set(found.held_out) == set(itertools.product(EXCHANGES, (2, 4)))
    assert max(found.held_out.values()) < 0.03


def test_noise_of_five_percent_costs_spread_steps_no_more_than_fifteen():
    found = fit_spread(LIVE, FOUR, chooser("auto"), spread_samples(0.05))
    assert np.mean(list(found.held_out.values())) < 0.10
    assert max(found.held_out.values()) < 0.15


def test_a_fit_of_spread_steps_needs_some():
    with pytest.raises(ConfigError, match="points with spread chunks"):
        fit_spread(LIVE, FOUR, chooser("auto"), [])


# --- steps whose spread rows are decodes alone

OF_DECODES = {
    "gather": Correction(5e-4, 1.5),
    "pass_q": Correction(2e-3, 0.8),
    "visit": Correction(1e-3, 2.0),
}


def decode_samples(
    noise: float = 0.0, corrections: Mapping[str, Correction] = OF_DECODES
) -> list[SpreadSample]:
    """Samples, as many as `spread_decode_grid` has, of an engine of TRUE and corrections."""
    dice = np.random.default_rng(0)
    out = []
    for size, exchange in itertools.product((2, 4), decode_exchanges()):
        fixed = chooser("gather", decode_chooser=exchange, decode_corrections=corrections)
        known = Predictor(TRUE, FOUR, lane_costs(TRUE, 4, fixed))
        for context, count in itertools.product((512, 4096, 65_535), (1, 4)):
            point = MeasurePoint(decodes=count, context=context, group_size=size, exchange=exchange)
            batch = batch_of(point, 4, 16, STRIPE)
            seconds = known.seconds(batch) * (1 + noise * dice.standard_normal())
            out.append(SpreadSample(batch, seconds))
    return out


def test_what_spread_decodes_take_besides_is_found_again():
    found = fit_decodes(TRUE, FOUR, chooser("auto"), decode_samples())
    for name, true in OF_DECODES.items():
        assert found.corrections[name].factor == pytest.approx(true.factor, rel=0.05)
        assert found.corrections[name].seconds == pytest.approx(true.seconds, rel=0.05)
    assert set(found.held_out) == set(itertools.product(decode_exchanges(), (2, 4)))
    assert max(found.held_out.values()) < 0.01


def test_noise_of_five_percent_costs_spread_decodes_no_more_than_ten():
    found = fit_decodes(TRUE, FOUR, chooser("auto"), decode_samples(0.05))
    assert max(found.held_out.values()) < 0.10


def test_measurements_that_are_mere_noise_correct_nothing():
    dice = np.random.default_rng(0)
    exact = decode_samples(corrections={})
    samples = [
        dataclasses.replace(sample, seconds=sample.seconds * float(np.exp(dice.normal(0, 1.5))))
        for sample in exact
    ]
    found = fit_decodes(TRUE, FOUR, chooser("auto"), samples)
    assert Correction() in found.corrections.values()
    for name, correction in found.corrections.items():
        if correction == Correction():
            plain = [
                abs(true.seconds / seen.seconds - 1)
                for true, seen in zip(exact, samples)
                if true.batch.decode_exchange == name
            ]
            held_out = [found.held_out[name, size] for size in (2, 4)]
            assert np.mean(held_out) == pytest.approx(np.mean(plain))


def test_a_fit_of_spread_decodes_needs_some():
    with pytest.raises(ConfigError, match="points with spread decodes"):
        fit_decodes(TRUE, FOUR, chooser("auto"), [])
