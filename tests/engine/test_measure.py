"""Profiles of an engine: measured on it, kept, found again, and refused where they belong to
another."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter

import pytest

from jaxserve.engine.build import build
from jaxserve.engine.profiling import profile_file as profile
from jaxserve.engine.profiling.measure import (
    MeasurePoint,
    StepTimer,
    batch_of,
    grid,
    move_grid,
    spread_decode_grid,
    spread_grid,
)
from jaxserve.engine.step_shapes import shapes
from jaxserve.lanes.exchange import EXCHANGES, decode_exchanges
from jaxserve.lanes.groups import group_sizes
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
    costs = found.profile.costs
    points = found.points
    assert {str(one.shape) for one in points} == {str(shape) for shape in real.worker.plan.shapes}
    assert all(one.seconds > 0 for one in points)
    assert (
        len(costs.shapes) == len({one.shape for one in points})
        and costs.layers == 2
        and costs.tile == 8
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
        compiled = engine(
            "random:tiny", chunk=64, seqs=slots, pages=64, max_len=300
        ).worker.plan.shapes
        for point in grid(compiled, 300, slots):
            assert point.decodes + point.chunks <= slots and point.longest() <= 300


def test_a_point_that_fits_nowhere_is_refused(real):
    with pytest.raises(ValueError, match="fits no compiled shape"):
        StepTimer(real.worker).measure(MeasurePoint(decodes=1, context=10_000))


def test_a_profile_is_written_read_and_refused_by_another_engine(real, found, tmp_path):
    file = tmp_path / "deep" / "profile.json"
    identity = profile.identity_of(real.worker, real.info.max_model_len)
    profile.write(file, identity, found)
    assert (
        profile.read(file, profile.identity_of(real.worker, real.info.max_model_len))
        == found.profile
    )
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


# --- several lanes


@pytest.fixture(scope="module")
def two_lanes():
    config = EngineConfig(
        ModelSource("random:tiny", max_model_len=MAX_LEN),
        MeshConfig(kvp=2),
        CacheConfig(pages=PAGES, block_size=8, lane_tokens=64, placement="striped"),
        SchedulerConfig(
            max_seqs=4, chunk_tokens=32, min_chunk=32, exchange="auto", decode_exchange="auto"
        ),
    )
    return build(config, progress=False, warm_up=False)


def test_a_spread_point_lies_evenly_and_ends_at_home():
    """Two groups of two lanes: 40 blocks of 8 tokens, 20 on each lane, the last one at home."""
    point = MeasurePoint(chunks=1, cached=256, new=64, group_size=2, exchange="pass_q")
    batch = batch_of(point, 4, 8, stripe=1)
    assert batch.blocks_per_lane.tolist() == [[20, 20, 0, 0], [0, 0, 20, 20]]
    assert batch.block_lane.tolist() == [0, 1] * 4 + [2, 3] * 4
    assert batch.lane.tolist() == [1, 3] and batch.group_size.tolist() == [2, 2]
    one = batch_of(dataclasses.replace(point, groups=1, decodes=1, context=9), 4, 8)
    assert one.lane.tolist() == [0, 1, 2, 3, 1] and one.is_decode.tolist() == [True] * 4 + [False]


@pytest.mark.parametrize("lanes", [2, 4, 6, 8])
def test_a_grid_of_spread_points_is_bounded(lanes):
    config = SchedulerConfig(exchange="auto")
    compiled = shapes(config, lanes, 16)
    points = list(spread_grid(compiled, lanes, 8192, 4))
    kinds = Counter((point.exchange, point.group_size) for point in points)
    assert set(kinds) == set(itertools.product(EXCHANGES, group_sizes(lanes)[1:]))
    assert max(kinds.values()) <= 10
    assert all(point.longest() <= 8192 for point in points)
    assert len({point.cached for point in points}) >= 3
    assert any(point.decodes for point in points)
    assert any(point.groups for point in points) == (lanes > 2)
    few = spread_grid(compiled, lanes, 8192, 4, pairs=0)
    assert {point.cached for point in few} == {0}


def test_spread_decodes_have_homes_on_all_lanes_and_blocks_on_those_of_their_group():
    point = MeasurePoint(decodes=1, context=319, group_size=2, exchange="visit")
    batch = batch_of(point, 4, 8)
    assert batch.blocks_per_lane.tolist() == [[20, 20, 0, 0]] * 2 + [[0, 0, 20, 20]] * 2
    assert batch.lane.tolist() == [0, 1, 2, 3] and batch.decode_exchange == "visit"
    assert batch.spread.all() and batch.is_decode.all() and not len(batch.block_lane)


@pytest.mark.parametrize("lanes", [2, 4, 8])
def test_a_grid_of_spread_decodes_is_bounded(lanes):
    compiled = shapes(SchedulerConfig(exchange="auto", decode_exchange="auto"), lanes, 16)
    points = list(spread_decode_grid(compiled, 8192, 4))
    kinds = Counter((point.exchange, point.group_size) for point in points)
    assert set(kinds) == set(itertools.product(decode_exchanges(), group_sizes(lanes)[1:]))
    assert set(kinds.values()) == {6}
    assert all(point.longest() <= 8192 and not point.chunks for point in points)
    assert {point.decodes for point in points} == {1, 4}
    assert not list(spread_decode_grid(compiled, 8192, 4, pairs=0))


@pytest.fixture(scope="module")
def found_on_two(two_lanes):
    return profile.measure_costs(two_lanes.worker, MAX_LEN, 1, False)


def test_steps_with_spread_decodes_are_measured_and_correct_predictions(two_lanes, found_on_two):
    points = found_on_two.points
    decodes = [one for one in points if one.point.group_size > 1 and not one.point.chunks]
    assert {one.shape.decode_exchange for one in decodes} == set(decode_exchanges())
    assert all(one.shape.spread_decode.rows for one in decodes)
    assert not any(one.shape.spread_prefill.rows for one in decodes)
    assert set(found_on_two.decode_held_out) == {(name, 2) for name in decode_exchanges()}
    kept = found_on_two.profile
    sizes = profile.replica_sizes(
        two_lanes.worker.plan, CacheConfig(), SchedulerConfig(decode_exchange="auto"), MAX_LEN
    )
    bare = dataclasses.replace(sizes.chooser(kept), decode_corrections={})
    for name, seconds in sizes.chooser(kept).decodes(2, 300).seconds.items():
        predicted = bare.decodes(2, 300).seconds[name]
        assert seconds == kept.decode_corrections[name](predicted)


def test_steps_with_spread_chunks_are_measured_and_kept(two_lanes, found_on_two, tmp_path):
    worker = two_lanes.worker
    found = found_on_two
    spread = [one for one in found.points if one.point.group_size > 1 and one.point.chunks]
    assert {one.shape.exchange for one in spread} == set(EXCHANGES)
    assert all(one.shape.exchange == one.point.exchange for one in spread)
    assert set(found.spread_held_out) == {(exchange, 2) for exchange in EXCHANGES}
    kept = found.profile
    assert set(kept.corrections) == set(EXCHANGES) and kept.costs.spread_shapes
    assert set(kept.decode_corrections) == set(decode_exchanges())
    assert 0 <= kept.costs.padding <= 1 and 0 <= kept.costs.shared <= 1
    identity = profile.identity_of(worker, two_lanes.info.max_model_len)
    file = tmp_path / "kept.json"
    profile.write(file, identity, found)
    assert profile.read(file, identity) == kept and list(kept.links) == [2]
    older = json.loads(file.read_text())
    older["links"] = older["links"]["2"]  # one set, for all sizes
    file.write_text(json.dumps(older))
    assert profile.read(file, identity) == kept
    sizes = profile.replica_sizes(worker.plan, CacheConfig(), SchedulerConfig(), MAX_LEN)
    assert sizes.chooser(kept).corrections == kept.corrections
    runner = Runner(two_lanes)
    runner.submit(range(1, 200), "r", max_tokens=4, ignore_eos=True)
    runner.run()
    assert len(runner.ids("r")) == 4
    assert_empty(two_lanes)


# --- moves of pages


def test_pages_move_between_all_lanes_of_a_group_and_no_page_is_written_twice():
    point = MeasurePoint(decodes=1, context=9, group_size=2, moves=3)
    moves = batch_of(point, 4, 8).moves
    pairs = Counter(map(tuple, moves[:, [0, 2]].tolist()))
    assert pairs == {(0, 1): 3, (1, 0): 3, (2, 3): 3, (3, 2): 3}
    assert len({tuple(row) for row in moves[:, 2:].tolist()}) == len(moves)
    assert moves[:, [1, 3]].max() < 2 * 3


@pytest.mark.parametrize("lanes", [2, 4, 8])
def test_a_grid_of_moves_is_bounded_and_has_few_pages_and_many(lanes):
    config = SchedulerConfig(planner="cdsp", exchange="auto")
    compiled = shapes(config, lanes, 16)
    points = list(move_grid(compiled, 8192, 4, 1000))
    kinds = Counter(point.group_size for point in points)
    assert set(kinds) == {*group_sizes(lanes)[1:]} and max(kinds.values()) <= 8
    most = max(shape.moves for shape in compiled)
    assert {point.moves for point in points} == {most // 4, most}
    assert {bool(point.chunks) for point in points} == {True, False}
    assert all(point.longest() <= 8192 for point in points)
    few = list(move_grid(compiled, 8192, 4, lanes * 2))
    assert max(point.moves * point.group_size for point in few) <= lanes * 2
    assert not list(move_grid(shapes(SchedulerConfig(), lanes, 16), 8192, 4, 1000))
