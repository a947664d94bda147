"""Profiles of an engine: measured on it, kept, found again, and refused where they belong to
another."""

from __future__ import annotations

import dataclasses
import json

import pytest

from jaxserve.engine.build import build
from jaxserve.engine.profiling import profile_file as profile
from jaxserve.engine.profiling.measure import MeasurePoint, StepTimer, grid
from jaxserve.settings.schema import (
    CacheConfig,
    ConfigError,
    EngineConfig,
    MeshConfig,
    ModelSource,
    SchedulerConfig,
)
from tests.engine.harness import Runner, assert_empty, engine

SETTINGS = dict(max_seqs=4, chunk_tokens=32, min_chunk=8)
MAX_LEN = 300
PAGES = 80


@pytest.fixture(scope="module")
def real():
    config = EngineConfig(
        ModelSource("random:tiny", max_model_len=MAX_LEN),
        MeshConfig(),
        CacheConfig(pages=PAGES),
        SchedulerConfig(**SETTINGS),
    )
    return build(config, progress=False, warm_up=False)


@pytest.fixture(scope="module")
def found(real):
    return profile.measure_costs(real.worker, MAX_LEN, 1, False)


def test_every_compiled_shape_is_measured_and_the_engine_is_left_as_it_was(real, found):
    fit, points = found
    assert {str(one.shape) for one in points} == {str(shape) for shape in real.worker.plan.shapes}
    assert all(one.seconds > 0 for one in points)
    assert (
        len(fit.costs.shapes) == len({one.shape for one in points})
        and fit.costs.layers == 2
        and fit.costs.tile == 8
    )
    before = Runner(engine("random:tiny", chunk=32, seqs=4, pages=PAGES, max_len=MAX_LEN))
    after = Runner(real)
    for runner in (before, after):
        runner.submit(range(1, 60), "r", max_tokens=8, ignore_eos=True)
        runner.run()
    assert before.ids("r") == after.ids("r")
    assert_empty(real)


def test_a_grid_stays_within_slots_and_length():
    for slots in (1, 3, 8):
        shapes = engine(
            "random:tiny", chunk=64, seqs=slots, pages=64, max_len=300
        ).worker.plan.shapes
        for point in grid(shapes, 300, slots):
            assert point.decodes + point.chunks <= slots and point.longest() <= 300


def test_a_point_that_fits_nowhere_is_refused(real):
    with pytest.raises(ValueError, match="fits no compiled shape"):
        StepTimer(real.worker).measure(MeasurePoint(decodes=1, context=10_000))


def test_a_profile_is_written_read_and_refused_by_another_engine(real, found, tmp_path):
    file = tmp_path / "deep" / "profile.json"
    identity = profile.identity_of(real.worker, real.info.max_model_len)
    profile.write(file, identity, real.worker, *found)
    assert profile.read(
        file, profile.identity_of(real.worker, real.info.max_model_len)
    ) == profile.EngineProfile(found[0].costs, {})
    assert not [left for left in file.parent.iterdir() if left != file]
    other = json.loads(file.read_text()) | {"model": "another"}
    file.write_text(json.dumps(other))
    with pytest.raises(ConfigError, match="measured with model 'another'; here it is 'tiny'"):
        profile.read(file, profile.identity_of(real.worker, real.info.max_model_len))
    for text, said in (
        ("{", "not a profile"),
        ("[]", "not a profile"),
        (json.dumps({"model": "tiny"}), "not a profile"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=said):
            profile.read(file, profile.identity_of(real.worker, real.info.max_model_len))
    with pytest.raises(ConfigError, match="No such file"):
        profile.read(
            tmp_path / "none.json", profile.identity_of(real.worker, real.info.max_model_len)
        )


def test_slack_scheduling_measures_once_and_keeps_it(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path))
    scheduler = SchedulerConfig(policy="slack", chunking="adaptive", **SETTINGS)
    config = EngineConfig(
        ModelSource("random:tiny", max_model_len=MAX_LEN),
        MeshConfig(),
        CacheConfig(pages=PAGES),
        scheduler,
        compile_cache="",
    )
    first = build(config, progress=False, warm_up=False)
    kept = list((tmp_path / "profiles").iterdir())
    assert len(kept) == 1 and first.scheduler.predictor.costs.shapes
    monkeypatch.setattr(profile, "measure_costs", None)  # a second measurement would fail
    second = build(config, progress=False, warm_up=False)
    assert second.scheduler.predictor.costs == first.scheduler.predictor.costs
    plain = build(dataclasses.replace(config, profile="none"), progress=False, warm_up=False)
    assert not plain.scheduler.predictor.costs.shapes
    runner = Runner(second)
    for length in (5, 90, 200):
        runner.submit(range(1, length), max_tokens=6, ignore_eos=True)
    runner.run()
    assert all(len(runner.ids(f"r{number}")) == 6 for number in range(3))
    assert second.scheduler.predictor.scale != 1.0  # it has learnt from its own steps
    assert_empty(second)
