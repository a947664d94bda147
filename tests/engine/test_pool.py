"""Tokens are those of the reference wherever blocks lie in the pool of all lanes: before every step
published blocks are copied to other lanes, and sequences read other copies, at random, while pages
are few and blocks are evicted.

By default a tiny model runs on eight lanes, which says there what it says on one; `-m matrix` adds
the real model, its first layers and whole, all exchanges, stages, ranks, sliding windows, lower
tiers and several processes.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

import pytest

from jaxserve.engine.engine import Engine
from jaxserve.engine.step_shapes import StepShape
from jaxserve.lanes.cdsp import Latency
from jaxserve.scheduling.pool.elastic import BatchTimes
from jaxserve.scheduling.pool.elastic_scheduler import ElasticScheduler
from jaxserve.scheduling.pool.interface import (
    Pool,
    PoolChunk,
    PoolDecision,
    PoolScheduler,
    PoolStep,
)
from jaxserve.scheduling.slots import DECODE, PREFILL
from tests.engine.groups import led
from tests.engine.harness import (
    Plans,
    Runner,
    assert_empty,
    engine,
    fresh,
    generate,
    shapes_of,
    watch_batches,
)

COPIES = 4  # tried before each step
SHARE = 0.5  # of the blocks with several copies that are read on another one from now on
# segments of one block: what is anywhere at all may be on every lane
HASHED = dict(placement="hashed", segment_tokens=16, prefix_copies=True, pages=8)
FEW = dict(chunk=16, seqs=4, max_len=512, **HASHED)
VISITS = dict(exchange="visit", decode_exchange="visit")


class Case(NamedTuple):
    prompt: list[int]
    tokens: list[int]


def continued(case: dict, first: int, count: int) -> Case:
    """The case after the first of its tokens: it shares the prompt, and the next tokens are the
    reference's too."""
    said = case["output_ids"]
    return Case(case["prompt_ids"] + said[:first], said[first : first + count])


class Chaos:
    """Copies and re-points blocks of an engine at random before every step, and counts them.
    resting: the share of steps before which nothing is copied."""

    def __init__(self, real: Engine, seed: int, resting: float):
        self.cache = real.scheduler.cache
        self.copied = self.repointed = self.moved = self.spread = 0
        self._slots = real.scheduler.slots
        self._rng = random.Random(seed)
        self._lost = self._keys_lost()
        packer = real.scheduler.packer
        pack = packer.pack

        def after_chaos(number: int, now: float):
            if self._rng.random() >= resting:
                self._copy()
            self._repoint()
            return pack(number, now)

        packer.pack = after_chaos
        watch_batches(real, self._see)

    @property
    def evicted(self) -> int:
        """Pages that have lost their block since the beginning."""
        return self._keys_lost() - self._lost

    def _keys_lost(self) -> int:
        return int(self.cache.pages.generation.sum())

    def _see(self, batch) -> None:
        self.moved += len(batch.moves)
        self.spread += int(batch.spread.any())

    def _copy(self) -> None:
        published = list(self.cache.pages.key_of)
        for page in self._rng.sample(published, min(COPIES, len(published))):
            if page in self.cache.pages.key_of:  # else a copy took it
                copy = self.cache.copy(page, self._rng.randrange(self.cache.pages.lanes))
                self.copied += copy is not None

    def _repoint(self) -> None:
        for layout in self.cache.layouts:
            slot = layout.slot
            if self._slots.phase[slot] not in (PREFILL, DECODE):
                continue
            issued = int(self._slots.issued[slot]) // self.cache.block_size
            for block, page in enumerate(layout.pages[:issued]):
                others = [copy for copy in self.cache.pages.copies(page) if copy != page]
                if others and self._rng.random() < SHARE:
                    self.cache.repoint(slot, block, self._rng.choice(others), issued)
                    self.repointed += 1
        self.cache.check()

    def __str__(self) -> str:
        return (
            f"copied {self.copied} (in {self.moved} moves), re-pointed {self.repointed}, "
            f"evicted {self.evicted}, spread steps {self.spread}"
        )


def assert_equal_under_chaos(
    real: Engine, cases: list[Case], seed: int = 0, laps: int = 2, resting: float = 0.0
) -> list[StepShape]:
    """Runs all cases at once, then again, so that their prefixes are found. Returns the shapes of
    the steps."""
    chaos = Chaos(real, seed, resting)
    shapes = shapes_of(real)
    hits = 0
    chunk = real.config.scheduler.chunk_tokens
    for lap in range(laps):
        runner = Runner(real)
        ids = [
            runner.submit(case.prompt, max_tokens=len(case.tokens), ignore_eos=True)
            for case in cases
        ]
        runner.run((7, chunk), seed)
        for id, case in zip(ids, cases):
            assert runner.ids(id) == case.tokens, f"lap {lap}, prompt of {len(case.prompt)}"
        hits += sum(runner.completion(id).finished.usage.cached for id in ids)
    assert_empty(real)
    print(f"{chaos}, cached tokens {hits}, steps {len(shapes)}")
    assert min(chaos.copied, chaos.moved, chaos.spread, hits) >= 20
    assert chaos.repointed >= 50 and chaos.evicted >= 5
    assert any(shape.moves and not shape.spread_prefill.rows for shape in shapes)
    return shapes


def has_visits(shapes: list[StepShape]) -> bool:
    """Returns True if a step computed where the blocks are."""
    return any("visit" in shape.exchanges for shape in shapes)


def few_of(cases: list[dict]) -> list[Case]:
    """A prompt of many blocks that most share, and short ones of their own."""
    by_length = {len(case["prompt_ids"]): case for case in cases}
    shared = [continued(by_length[333], first, 6) for first in (0, 5, 15)]
    return [*shared, continued(by_length[37], 0, 6), continued(by_length[38], 9, 6)]


def behind_one_prefix(model: str) -> list[Case]:
    """Random prompts, with what the model says alone on one lane."""
    rng = random.Random(3)
    shared = [rng.randrange(1, 200) for _ in range(200)]
    prompts = [
        shared[:length] + [rng.randrange(1, 200) for _ in range(tail)]
        for length, tail in ((200, 9), (200, 40), (160, 70), (0, 37), (120, 5), (200, 30))
    ]
    alone = engine(model, "", chunk=16, seqs=4, pages=100, max_len=512)
    return [*map(Case, prompts, generate(alone, prompts, max_tokens=20, ignore_eos=True))]


class Subject(NamedTuple):
    """A model and what it says."""

    model: str | Path
    cases: list[Case]


@pytest.fixture(
    scope="module", params=["random:tiny", pytest.param("first layers", marks=pytest.mark.matrix)]
)
def subject(request: pytest.FixtureRequest) -> Subject:
    if request.param != "first layers":
        return Subject(request.param, behind_one_prefix(request.param))
    cases = request.getfixturevalue("golden_first_layers")["cases"]
    return Subject(request.getfixturevalue("smollm2_first_layers"), few_of(cases))


@pytest.fixture
def few(golden_first_layers) -> list[Case]:
    return few_of(golden_first_layers["cases"])


@pytest.fixture(scope="module")
def pooled(subject) -> Engine:
    """Eight lanes, for tests to give other schedulers."""
    return engine(subject.model, "kvp=8", **FEW)


def test_tokens_do_not_depend_on_where_blocks_lie_in_a_pool_of_eight_lanes(subject, pooled):
    assert_equal_under_chaos(fresh(pooled, "hashed"), subject.cases)


class AnyBatches(PoolScheduler):
    """Cuts prompts into batches at random, on any numbers of lanes."""

    def __init__(self, seed: int):
        self._rng = random.Random(seed)

    def decide(self, pool: Pool, step: PoolStep) -> PoolDecision:
        batches: list[list[PoolChunk]] = []
        degrees: list[int] = []
        for prompt, most in step.prompts:
            chunk = PoolChunk(prompt, self._rng.randint(1, most))
            degree = self._rng.choice(pool.degrees)
            if sum(degrees) + degree <= pool.lanes:
                batches.append([chunk])
                degrees.append(degree)
            elif batches:
                self._rng.choice(batches).append(chunk)
        return PoolDecision(batches, degrees)


ELASTIC = {  # a step takes 1 ms, a token 0.1 ms on one lane
    degree: Latency(1e-3, 1e-4 / degree, 0.0, 1e-7 / degree) for degree in (1, 2, 4, 8)
}


@pytest.mark.parametrize(
    ("scheduler", "least"),
    [
        (AnyBatches(0), 10),
        pytest.param(ElasticScheduler(BatchTimes.of(ELASTIC)), 3, marks=pytest.mark.matrix),
    ],
    ids=["any", "elastic"],
)
def test_rows_are_computed_on_lanes_that_do_not_hold_their_blocks(
    scheduler, least, subject, pooled
):
    """Batches on other lanes than all of the pool, in turns with copies and other blocks read."""
    real = fresh(pooled, "hashed", planner=scheduler)
    dealt: list[int] = []
    watch_batches(real, lambda batch: dealt.extend(map(len, batch.dealt.values())))
    assert_equal_under_chaos(real, subject.cases, resting=0.4)
    assert len(dealt) > least


@pytest.mark.matrix
@pytest.mark.parametrize("pool, tokens", [(2, 16), (4, 48), (8, 64)])
def test_segments_over_groups_of_lanes(pool, tokens, few, smollm2_first_layers):
    size = {**FEW, "pool_lanes": pool, "segment_tokens": tokens, "pages": 10}
    assert_equal_under_chaos(engine(smollm2_first_layers, "kvp=8", **size), few, laps=3)


@pytest.mark.matrix
@pytest.mark.parametrize("exchange", ["pass_q", "pass_kv"])
def test_chunks_and_decodes_go_round_rings(exchange, few, smollm2_first_layers):
    """Decodes where nothing is copied in the step: beside copies they are gathered."""
    real = engine(smollm2_first_layers, "kvp=8", exchange=exchange, decode_exchange="pass_q", **FEW)
    shapes = assert_equal_under_chaos(real, few, laps=3, resting=0.4)
    assert any(shape.prefill_ring for shape in shapes)
    assert any(shape.prefill_ring and shape.moves for shape in shapes)
    assert any(shape.decode_ring for shape in shapes)


def test_chunks_and_decodes_visit_lanes(subject):
    """By programs with room for few visitors and for all, alone and beside chunks."""
    real = engine(subject.model, "kvp=8", **FEW, **VISITS)
    shapes = assert_equal_under_chaos(real, subject.cases, laps=3, resting=0.5)
    visits = [shape for shape in shapes if "visit" in shape.exchanges]
    for kind in (True, False):
        rooms = {shape.room for shape in visits if bool(shape.spread_prefill.rows) == kind}
        print(f"chunks {kind}: rooms {rooms}, {len(visits)} of {len(shapes)} steps")
        assert min(rooms) < 1


@pytest.mark.matrix
@pytest.mark.parametrize(
    "mesh, pages", [("spp=2,kvp=4", 16), ("kvp=4,tp=3", 16), ("spp=2,kvp=2,tp=3", 21)]
)
@pytest.mark.parametrize("exchange", ["gather", "visit"])
def test_stages_and_ranks(mesh, pages, exchange, few, smollm2_first_layers):
    settings = {**FEW, "pages": pages, "exchange": exchange, "decode_exchange": exchange}
    assert_equal_under_chaos(engine(smollm2_first_layers, mesh, **settings), few)


@pytest.mark.matrix
@pytest.mark.parametrize("exchange", ["gather", "visit"])
def test_sliding_windows(exchange):
    cases = behind_one_prefix("random:tiny-window")
    settings = {**FEW, "exchange": exchange, "decode_exchange": exchange}
    real = engine("random:tiny-window", "kvp=8", **settings)
    assert_equal_under_chaos(real, cases, laps=3, resting=0.4)


@pytest.mark.matrix
@pytest.mark.parametrize("exchange", ["gather", "pass_kv"])
def test_blocks_that_a_plan_moves_are_copied_too(exchange):
    size = dict(chunk=16, seqs=4, max_len=512, prefix_copies=True, planned=True)
    real = engine("random:tiny", "kvp=8", exchange=exchange, **size)
    real = fresh(real, "striped", pages=8, planner=Plans(5, longest=60))
    shapes = assert_equal_under_chaos(real, behind_one_prefix("random:tiny"), laps=4)
    assert any(shape.prefill_ring for shape in shapes) == (exchange == "pass_kv")


@pytest.mark.matrix
@pytest.mark.parametrize("exchanges", [{}, VISITS], ids=["default", "visit"])
def test_lower_tiers(exchanges, few, golden_first_layers, smollm2_first_layers):
    """A prompt of most pages drives out the others' blocks, which come back from host memory."""
    long = max(golden_first_layers["cases"], key=lambda case: len(case["prompt_ids"]))
    cases = [*few, continued(long, 0, 4), *few]
    size = {**FEW, "pages": 13, "max_len": 2048, **exchanges}
    real = engine(smollm2_first_layers, "kvp=8", host_cache_gib=0.1, **size)
    try:
        shapes = assert_equal_under_chaos(real, cases, resting=0.4)
        assert has_visits(shapes) == bool(exchanges)
        counts = real.worker.lower_tiers.counts()
        print(counts)
        assert counts.stored > 10 and counts.host_reads > 10 and not counts.wrong
    finally:
        real.close()


@pytest.mark.matrix
@pytest.mark.parametrize("exchanges", [{}, VISITS], ids=["default", "visit"])
def test_a_replica_over_two_processes(exchanges, few, smollm2_first_layers, monkeypatch):
    size = dict(chunk_tokens=16, max_seqs=4, max_model_len=512, **HASHED, **exchanges)
    with led(monkeypatch, smollm2_first_layers, "kvp=8", 2, **size) as (real, _):
        shapes = assert_equal_under_chaos(real, few, resting=0.4)
        assert has_visits(shapes) == bool(exchanges)


@pytest.mark.matrix
@pytest.mark.parametrize("exchanges", [{}, VISITS], ids=["default", "visit"])
def test_tokens_of_the_whole_model_equal_the_reference(exchanges, golden, smollm2_gguf):
    real = engine(smollm2_gguf, "kvp=8", **FEW, **exchanges)
    shapes = assert_equal_under_chaos(real, few_of(golden["cases"]), seed=1, resting=0.4)
    assert has_visits(shapes) == bool(exchanges)
