"""A replica serves as soon as the programs are compiled that hold every batch; the others follow
beside traffic."""

from __future__ import annotations

import itertools
import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.build import build
from jaxserve.engine.step_demand import LaneSlice, LongChunk, StepDemand
from jaxserve.engine.step_shapes import first_shapes, shapes
from jaxserve.lanes.exchange import EXCHANGES, decode_exchanges
from jaxserve.lanes.groups import group_around
from jaxserve.settings.schema import CacheConfig, EngineConfig, ModelSource, SchedulerConfig
from tests.engine.harness import Runner, engine

CONFIGS = st.builds(
    SchedulerConfig,
    max_seqs=st.integers(1, 80),
    chunk_tokens=st.sampled_from([1, 16, 64, 100, 512]),
    exchange=st.sampled_from([*EXCHANGES, "auto"]),
    decode_exchange=st.sampled_from([*decode_exchanges(), "auto"]),
    planner=st.sampled_from(["none", "cdsp"]),
)
# lane, length, group size
LONG = st.tuples(st.integers(0, 3), st.integers(2, 600), st.sampled_from([1, 2, 4]))


@given(
    CONFIGS,
    st.sampled_from([1, 2, 4]),
    st.integers(0, 80),
    st.integers(0, 40),
    st.lists(LONG, max_size=3),
    st.booleans(),
    st.integers(0, 40),
    st.booleans(),
    st.sampled_from([1, 2, 4]),
)
def test_what_fits_a_shape_fits_one_of_the_first_with_the_same_exchange(
    config, lanes, local, spread, long, moves, ring, copies, pool
):
    chunks = tuple(
        LongChunk(row, home, length, size, group_around(home, size))
        for row, (home, length, size) in enumerate(
            (lane % lanes, length, min(size, lanes)) for lane, length, size in long
        )
    )
    largest = max((chunk.group_size for chunk in chunks), default=1)
    rows = tuple(LaneSlice(0, at, 1, 0) for at in range(ring if largest > 1 else 0))
    demand = StepDemand(local, spread if lanes > 1 else 0, chunks, lanes, largest, moves, rows)
    every = shapes(config, lanes, 16, min(pool, lanes), copies)
    first = first_shapes(every)
    assert len(first) <= (16 if config.planner != "none" or copies else 12)
    for shape in filter(demand.fits, every):
        assert any(one.exchange == shape.exchange and demand.fits(one) for one in first), shape


@pytest.mark.parametrize("decode_exchange", ["gather", "pass_q", "auto"])
@pytest.mark.parametrize(("lanes", "more"), [(1, 0), (2, 2), (4, 3), (8, 4)])
def test_spread_decodes_need_a_program_for_each_group_size_and_one_for_all(
    lanes, more, decode_exchange
):
    """The largest group has one for few spread decodes and one for as many as there may be; all of
    them again beside local chunks."""
    every = shapes(SchedulerConfig(decode_exchange=decode_exchange), lanes, 16)
    assert len(set(map(str, every))) == len(every)
    for beside in (False, True):
        decodes = Counter(
            shape.decode_exchange
            for shape in every
            if shape.spread and not shape.spread_prefill.rows and beside == bool(shape.prefill.rows)
        )
        assert decodes["gather"] == more
        assert decodes["pass_q"] == (decode_exchange != "gather") * more
        # in groups of two lanes one, in others one for each room
        of_two = min(more, 1 + (lanes == 2))
        assert decodes["visit"] == (decode_exchange == "auto") * (3 * more - 2 * of_two)


@pytest.mark.parametrize(
    ("decode_exchange", "pairs"),
    [
        ("gather", {(exchange, "gather") for exchange in EXCHANGES}),
        ("pass_q", {("gather", "gather"), *((exchange, "pass_q") for exchange in EXCHANGES)}),
        (
            "auto",
            {
                *itertools.product(("gather", "pass_q", "pass_kv"), ("gather", "pass_q")),
                ("visit", "visit"),
            },
        ),
    ],
)
def test_decodes_beside_spread_chunks_have_programs_of_few_pairs_of_exchanges(
    decode_exchange, pairs
):
    config = SchedulerConfig(exchange="auto", decode_exchange=decode_exchange, planner="cdsp")
    of_chunks = [shape for shape in shapes(config, 4, 16) if shape.spread_prefill.rows]
    assert {(shape.exchange, shape.decode_exchange) for shape in of_chunks} == pairs | {
        (exchange, "gather")
        for exchange in EXCHANGES
        if decode_exchange == "pass_q" and exchange != "pass_q"
    }
    moving = {(shape.exchange, shape.decode_exchange) for shape in of_chunks if shape.moves}
    assert all(of_decodes in ("gather", exchange) for exchange, of_decodes in moving)


def test_nothing_is_compiled_to_choose_from_where_it_is_not_known_what_steps_cost():
    for exchange in ("gather", "visit"):
        every = shapes(SchedulerConfig(exchange=exchange), 4, 16, timed=False)
        mixed = [shape for shape in every if shape.spread_prefill.rows]
        alone = [shape for shape in every if shape.spread and not shape.spread_prefill.rows]
        assert {shape.decode_exchange for shape in alone} == {"gather"}
        pairs = {(shape.exchange, shape.decode_exchange) for shape in mixed}
        assert pairs == {("gather", "gather"), (exchange, exchange)}


@pytest.fixture
def real():
    real = engine("random:tiny", "", chunk=32, seqs=4, pages=64, max_len=256)
    yield real
    real.worker.close()


def test_batches_run_before_all_programs_are_compiled_and_say_the_same(real):
    prompts = [list(range(3, 3 + length)) for length in (1, 5, 40)]
    expected = [said(real, prompt) for prompt in prompts]
    other = engine("random:tiny", "", chunk=32, seqs=4, pages=64, max_len=256)
    few = first_shapes(other.worker.plan.shapes)
    other.worker.warm_up(lambda name: None, shapes=few)
    compiled = other.worker.compiles
    assert other.worker.uncompiled == set(other.worker.plan.shapes) - set(few) != set()
    assert [said(other, prompt) for prompt in prompts] == expected
    assert other.worker.compiles == compiled, "a shape was used that is not compiled"
    other.worker.close()


def test_a_replica_that_does_not_live_long_compiles_no_others():
    config = EngineConfig(
        ModelSource("random:tiny", max_model_len=256),
        cache=CacheConfig(pages=64),
        scheduler=SchedulerConfig(max_seqs=1, chunk_tokens=32),
        compile_all=False,
    )
    real = build(config, progress=False)
    assert real.worker.uncompiled
    assert not any(thread.name == "compiler" for thread in threading.enumerate())
    real.worker.close()


def test_the_others_are_compiled_beside_traffic(real):
    worker = real.worker
    worker.warm_up(lambda name: None, shapes=first_shapes(worker.plan.shapes))
    worker.compile_others()
    while any(thread.name == "compiler" for thread in threading.enumerate()):
        assert len(said(real, [5, 6, 7])) == 4
    assert worker.uncompiled == set()
    assert worker.compiles == len(worker.programs(worker.plan.shapes))
    assert worker.recompiles == 0


def said(real, prompt: list[int]) -> list[int]:
    runner = Runner(real)
    request = runner.submit(np.array(prompt), max_tokens=4)
    runner.run()
    return runner.completion(request).ids
