"""Tetris' figures in miniature: each one's rows, claims and panels; the models behind them; what is
wrong, in one line."""

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest

from experiments.tetris import __main__ as every
from experiments.tetris import figure, model, systems, table2
from experiments.tetris.figure import TetrisSettings
from tests.experiments.figure_checks import made_small

FIGURES = {made.name: made for made in every.PAPER.figures()}
SMALL = TetrisSettings(requests=12)  # generated lengths only
MODELS = systems.MODELS


@pytest.fixture(autouse=True)
def few_loads(monkeypatch):
    """Loads and improvement rates enough for a miniature."""
    monkeypatch.setattr(systems, "LOADS", 4)
    monkeypatch.setattr(systems, "IMPROVEMENT_RATES", (0.1, 0.5))
    monkeypatch.setattr(systems, "STEP", dict.fromkeys(MODELS, 1.0))


@pytest.mark.parametrize("made", FIGURES.values(), ids=FIGURES)
def test_a_figure_in_miniature_gives_csv_and_table(made, tmp_path, monkeypatch):
    rows = made_small(made, SMALL, tmp_path, monkeypatch)
    # so few requests never fill a cluster: two bounds have no quotient
    open_ones = ("recorded", "max load")
    assert all(
        math.isfinite(claim.ours(rows))
        for claim in made.claims
        if not any(word in claim.what for word in open_ones)
    )
    if made.kind == "simulated":
        assert {row["lengths"] for row in rows} == {"generated: tetris mixes"}


# --- the models behind them


def test_table_1_is_fitted_and_composed_within_the_targets():
    points = list(model.table_points())
    errors = lambda found: np.mean(
        [
            abs(found(size, history, tokens) / seconds - 1)
            for size, history, tokens, seconds in points
        ]
    )
    assert errors(lambda size, *rest: model.latencies("llama3-8b")[size](*rest)) < 0.05
    assert errors(lambda size, *rest: model.composed("llama3-8b", size, *rest)) < 0.1


def test_eq_1_fits_what_is_composed_for_70b():
    fitted = model.latencies("llama3-70b")
    errors = [
        abs(fitted[size](history, tokens) / seconds - 1)
        for size, history, tokens, seconds in model.composed_points("llama3-70b")
    ]
    assert np.mean(errors) < 0.03
    assert fitted[1](0, 32_000) > fitted[2](0, 32_000) > fitted[4](0, 32_000) > fitted[8](0, 32_000)


def test_the_largest_groups_of_table_2_are_extrapolated():
    found = table2.largest(128).latencies
    assert list(found) == [1, 2, 4, 8, 16, 32, 64, 128]
    assert found[128].base == pytest.approx(8 * found[16].base) and found[
        128
    ].token == pytest.approx(found[16].token / 8)
    assert list(table2.largest(8).latencies) == [1, 2, 4, 8]


def test_systems_have_the_instances_of_the_paper():
    assert [systems.prefill_instances(name) for name in MODELS] == [16, 8]
    assert "fixed-16" in systems.possible(
        systems.SYSTEMS, MODELS[0]
    ) and "fixed-16" not in systems.possible(systems.SYSTEMS, MODELS[1])
    build = lambda name: systems.server(name, MODELS[0], "short", 1.0, SMALL)
    assert (
        build("loongserve").count == 32
        and build("loongserve-disagg").count == 16
        and build("fixed-8").held is None
    )
    assert 3 < systems.decode_seconds(MODELS[0], figure.Arrival(0.0, 30_000, 340)) < 7


def test_equal_runs_are_simulated_once():
    assert systems.run("fixed-8", MODELS[0], "long", 1.0, SMALL) is systems.run(
        "fixed-8", MODELS[0], "long", 1.0, SMALL
    )


# --- workloads and the command


def recorded(folder: Path, *lengths: int) -> Path:
    file = folder / figure.RECORDED
    file.parent.mkdir(parents=True)
    lines = (
        json.dumps(dict(timestamp=1000 * n, input_length=length, output_length=5))
        for n, length in enumerate(lengths)
    )
    file.write_bytes(gzip.compress("\n".join(lines).encode()))
    return folder


def test_recorded_requests_keep_to_the_short_traces_limits_and_are_stretched(tmp_path):
    settings = TetrisSettings(recorded(tmp_path, 5000, 100, 50_000, 200_000, 90_000), 10)
    assert settings.traces == (*figure.TRACES, "recorded") and "mooncake" in settings.lengths
    assert [(a.time, a.prompt) for a in settings.arrivals("recorded", 2.0)] == [
        (0.0, 5000),
        (0.5, 50_000),
        (1.0, 90_000),
    ]
