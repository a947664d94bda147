"""Costs found from steps whose true costs are known, and their way through a file."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from jaxserve.costs.fit import StepSample, fit_costs, from_json, predicted, to_json
from jaxserve.costs.predictor import Costs, ShapeCost
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
    assert from_json(json.loads(json.dumps(to_json(TRUE)))) == TRUE
    for damaged in (
        {**to_json(TRUE), "color": 1},
        {**to_json(TRUE), "pair": "fast"},
        {"layers": 8, "shapes": [{"rows": 1}]},
        [],
    ):
        with pytest.raises(ConfigError, match="profile"):
            from_json(damaged)
