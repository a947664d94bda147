"""Border B: what the host tells the devices is a list of commands; their bytes are all there is to
tell, and as many as the batch asks for, however long the context is."""

from __future__ import annotations

import dataclasses
import functools
import operator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.api.batch import Batch, PageStores
from jaxserve.api.request import KvSource, Request
from jaxserve.api.sampling import SamplingParams
from jaxserve.cache import CacheManager, LaneRules
from jaxserve.cache.hashes import KEY_BYTES
from jaxserve.cache.tiers import Fetch, SourceBlocks
from jaxserve.engine.command import (
    NO_SAMPLING,
    NO_STEP,
    VERSION,
    CommandCodec,
    CommandError,
    StepCommand,
    StepResult,
)
from jaxserve.engine.engine import Engine
from jaxserve.engine.sampling_rows import admissions
from jaxserve.engine.step_demand import StepDemand
from jaxserve.engine.step_rows import StepRows
from jaxserve.engine.step_shapes import layout, shapes
from jaxserve.engine.worker import Worker
from jaxserve.lanes.cost import moves_per_pair
from jaxserve.lanes.planner import PlanPart
from jaxserve.scheduling import Scheduler
from jaxserve.scheduling.batch_reader import StepResults
from jaxserve.settings.schema import CacheConfig, MeshConfig, SchedulerConfig
from tests.engine.harness import SHARED, Plans, Runner, engine, fresh
from tests.examples import examples

BLOCK = 16


class Recording:
    """Passes commands on to a worker, and keeps their bytes."""

    def __init__(self, worker: Worker):
        self.worker = worker
        self.plan = worker.plan
        self.messages: list[bytes] = []
        self.tokens: list[np.ndarray] = []

    def __getattr__(self, name: str):
        return getattr(self.worker, name)

    def execute(self, command: StepCommand) -> None:
        self.messages.append(self.worker.plan.codec().encode(command))
        self.worker.execute(command)

    def wait(self):
        result = self.worker.wait()
        if result.tokens is not None:
            self.tokens.append(result.tokens)
        return result


def replay(worker: Worker, messages: list[bytes]) -> list[np.ndarray]:
    """The tokens that a worker gives for recorded commands."""
    codec = worker.plan.codec()
    found = []
    pending = 0
    for message in messages:
        command = codec.decode(message)
        worker.execute(command)
        pending += command.shape != NO_STEP
        while pending > worker.plan.mesh.spp:
            found.append(worker.wait().tokens)
            pending -= 1
    found += [worker.wait().tokens for _ in range(pending)]
    return [tokens for tokens in found if tokens is not None]


@pytest.mark.parametrize(
    "mesh",
    [*(pytest.param(mesh, marks=pytest.mark.matrix) for mesh in ("", "spp=2")), "kvp=2"],
)
def test_a_recorded_run_replayed_by_a_fresh_worker_gives_equal_tokens(mesh):
    planned = "kvp" in mesh
    real = engine(mesh=mesh, planned=planned, **SHARED)
    recording = Recording(real.worker)
    planner = Plans(3, lanes=2) if planned else None
    again = fresh(real, "striped" if planner else "grow", pages=60, planner=planner)
    recorded = Engine(again.config, recording, again.scheduler)
    runner = Runner(recorded)
    prompt = list(range(5, 105))
    runner.submit(prompt, max_tokens=12)
    runner.submit(prompt, max_tokens=9, temperature=1.0, seed=4, frequency_penalty=0.5)
    runner.submit(prompt[:40], max_tokens=5, logprobs=2, prompt_logprobs=1)
    runner.submit(prompt[:7], max_tokens=8, logit_bias={7: 3.5}, stop_token_ids=[9])
    runner.run()
    runner.submit(prompt, max_tokens=6)  # after a prefix hit
    runner.run()
    other = engine(mesh=mesh, planned=planned, **SHARED)
    found = replay(other.worker, recording.messages)
    assert len(found) == len(recording.tokens) > 10
    assert all(np.array_equal(a, b) for a, b in zip(found, recording.tokens))


def same(a: StepCommand, b: StepCommand) -> bool:
    """Compares two commands, arrays by value and type."""
    for field in dataclasses.fields(StepCommand):
        one = getattr(a, field.name)
        two = getattr(b, field.name)
        if field.name == "admissions":
            pairs = [
                (getattr(x, name.name), getattr(y, name.name))
                for x, y in zip(one, two, strict=True)
                for name in dataclasses.fields(x)
            ]
        elif field.name == "fetches":
            pairs = [(x.places, y.places) for x, y in zip(one, two, strict=True)]
            rests = ([each._replace(places=0) for each in fetches] for fetches in (one, two))
            if operator.ne(*rests):
                return False
        elif field.name in ("stores", "computed"):
            if one.keys != two.keys:
                return False
            pairs = [
                (getattr(one, name), getattr(two, name)) for name in ("lanes", "pages", "retention")
            ]
        else:
            pairs = [(one, two)]
        for x, y in pairs:
            equal = np.array_equal(x, y) and np.asarray(x).dtype == np.asarray(y).dtype
            if not equal and np.size(x) + np.size(y):
                return False
    return True


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data())
def test_bytes_give_the_result_back(data):
    codec = CommandCodec(shapes(SchedulerConfig(max_seqs=4, chunk_tokens=32), 2, BLOCK), 2, BLOCK)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    lanes, samples, k = 2, data.draw(st.integers(1, 5)), data.draw(st.integers(0, 3))
    floats = lambda *shape: rng.normal(size=shape).astype(np.float32)
    ints = lambda *shape: rng.integers(-5, 50000, shape).astype(np.int32)
    scored = lambda n: (floats(lanes, n), floats(lanes, n, k), ints(lanes, n, k))
    result = StepResult(
        data.draw(st.integers(0, 2**31 - 1)),
        ints(lanes, samples) if data.draw(st.booleans()) else None,
        scored(samples) if data.draw(st.booleans()) else (),
        tuple(scored(64) for _ in range(data.draw(st.integers(0, 2)))),
        tuple(floats(lanes, 3, 8) for _ in range(data.draw(st.integers(0, 2)))),
    )
    found = codec.decode_result(codec.encode_result(result))
    assert found.number == result.number
    assert (found.tokens is None) == (result.tokens is None)
    pairs = [(found.tokens, result.tokens)] if result.tokens is not None else []
    pairs += list(zip(found.logprobs, result.logprobs, strict=True))
    pairs += list(zip(found.pooled, result.pooled, strict=True))
    for ours, theirs in zip(found.scores, result.scores, strict=True):
        pairs += list(zip(ours, theirs, strict=True))
    for ours, theirs in pairs:
        assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs)
    whole = codec.encode_result(result)
    for damaged in (whole[:-1], bytes([VERSION + 1]) + whole[1:], b""):
        with pytest.raises(CommandError):
            codec.decode_result(damaged)


def fetches(ints, rng) -> list[Fetch]:
    """Fetches from lower tiers, from another replica, and from one with larger blocks."""
    keys = [rng.bytes(KEY_BYTES) for _ in range(3)]
    source = KvSource("10.0.0.1:8480", 5, "job-ü", 64)
    return [
        Fetch(0, keys, ints(3, 2)),
        Fetch(2**31 - 1, keys[:1], ints(1, 2), KvSource("h:1", 1), None, 0.25),
        Fetch(7, keys, ints(3, 2), source, SourceBlocks(keys[:2], 64, 3), 2.0),
    ]


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data())
def test_bytes_give_the_command_back(data):
    config = SchedulerConfig(max_seqs=4, chunk_tokens=32, planner="cdsp")
    compiled = shapes(config, 2, BLOCK)
    codec = CommandCodec(compiled, 2, BLOCK)
    index = data.draw(st.integers(-1, len(compiled) - 1))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    ints = lambda *shape: rng.choice([0, 1, -1, 2**30, 7, 8, 9], shape).astype(np.int32)
    rows = np.zeros((0, 1), np.int32)
    if index >= 0:
        rows = ints(2, layout(compiled[index], BLOCK).size)
    params = SamplingParams.make(
        temperature=0.5, logit_bias={3: 1.5, 9: -2.0}, frequency_penalty=0.25, stop_token_ids=[4]
    )
    launches = admissions(params, 1, 2, np.arange(1500), [5, 5], 7, (1,))
    stores = lambda n: PageStores(ints(n), ints(n), ints(n), [rng.bytes(KEY_BYTES)] * n)
    command = StepCommand(
        number=data.draw(st.integers(0, 2**31 - 1)),
        shape=index,
        reads=3,
        variant=data.draw(st.integers(-2, 3)),
        reset=data.draw(st.booleans()),
        admissions=tuple(launches[: data.draw(st.integers(0, 2))]),
        stores=stores(data.draw(st.integers(0, 4))),
        computed=stores(data.draw(st.integers(0, 4))),
        loads=ints(data.draw(st.integers(0, 2)), 4),
        fetches=tuple(fetches(ints, rng)[: data.draw(st.integers(0, 3))]),
        table_updates=ints(data.draw(st.integers(0, 5)), 5),
        rows=rows,
        masks=ints(2, 2, 3) if data.draw(st.booleans()) else np.zeros((0, 1), np.int32),
        scores=ints(data.draw(st.integers(0, 2)), 2, 2, 64),
        pools=ints(data.draw(st.integers(0, 2)), 2, 64),
    )
    message = codec.encode(command)
    assert same(codec.decode(message), command)
    cut = data.draw(st.integers(0, len(message) - 1))
    with pytest.raises(CommandError):
        codec.decode(message[:cut])


def test_bytes_of_another_version_or_of_nothing_are_refused():
    codec = CommandCodec([], 1, BLOCK)
    message = codec.encode(StepCommand(number=1))
    for wrong in (b"", b"\x00" + message[1:], message + b"\x00", message[:-1]):
        with pytest.raises(CommandError):
            codec.decode(wrong)


# --- bytes by context


def size_of(batch: Batch, config: SchedulerConfig, lanes: int) -> int:
    """Bytes of a batch's command; one that moves pages has them, and what changes in the page
    tables by that, go with the step."""
    compiled = shapes(config, lanes, BLOCK)
    demand = StepDemand.of(batch, lanes, config.tile, BLOCK)
    shape = next(shape for shape in compiled if demand.fits(shape))
    arrays = StepRows(batch, demand, shape, BLOCK).arrays()
    assert not len(batch.moves) or not len(arrays.early_updates)
    command = StepCommand(
        number=batch.number,
        shape=compiled.index(shape),
        variant=0 if batch.sample.any() else NO_SAMPLING,
        table_updates=arrays.early_updates,
        rows=arrays.rows,
    )
    return len(CommandCodec(compiled, lanes, BLOCK).encode(command))


class OnePlan:
    """Every prompt's tokens up to `stop` on lane 0, what follows on both lanes."""

    def __init__(self, stop: int):
        self.stop = stop

    def arrived(self, now: float) -> None:
        pass

    def __call__(self, pending, start: int, target: int) -> tuple[PlanPart, ...]:
        return PlanPart(self.stop, (0,)), PlanPart(target, (0, 1))


@dataclasses.dataclass
class Sizes:
    """Bytes of decode steps after a context, of the first step after a prefix hit of it, and, by
    how many pages move and how many entries of page tables change, of the longest of the steps with
    which it goes over two lanes."""

    plain: list[int]
    hit: list[int]
    regroup: dict[tuple[int, int], int]


@functools.cache
def sizes(context: int) -> Sizes:
    """Returns bytes of steps after `context` tokens."""
    tail = 3 * BLOCK
    params = SamplingParams(temperature=0, max_tokens=40)
    prompt = np.arange(context + tail, dtype=np.int32) % 997

    def run(lanes: int, planner: OnePlan | None, ids: list[str]) -> list[tuple[Batch, int]]:
        config = SchedulerConfig(
            max_seqs=4, chunk_tokens=8192, planner="cdsp" if planner else "none"
        )
        pages = 2 * context // BLOCK + 200
        placement = "striped" if planner else "grow"
        cache = CacheManager(
            CacheConfig(block_size=BLOCK, pages=pages, placement=placement),
            lanes,
            4,
            rules=LaneRules(most_moves=moves_per_pair(config.chunk_tokens, BLOCK, lanes)),
        )
        scheduler = Scheduler(
            config, cache, MeshConfig(kvp=lanes), 2 * context + 1000, planner=planner
        )
        steps = []
        for id in ids:
            scheduler.add(Request(id, prompt, params))
            while scheduler.sequences:
                batch = scheduler.start(0.0)
                steps.append((batch, size_of(batch, config, lanes)))
                scheduler.finish(batch, StepResults(np.ones(len(batch.slot), np.int32)), 0.0)
        return steps

    steps = run(1, None, ["first", "second"])
    regroup: dict[tuple[int, int], int] = {}
    for batch, size in run(2, OnePlan(context), ["first"]):
        if len(batch.moves):
            alike = len(batch.moves), len(batch.table_updates)
            regroup[alike] = max(size, regroup.get(alike, 0))
    return Sizes(
        [size for batch, size in steps if batch.is_decode.all()][:32],
        [size for batch, size in steps if batch.admitted and batch.start[0]],
        regroup,
    )


def test_a_command_at_a_million_tokens_is_as_long_as_at_a_thousand():
    """Plain and after a prefix hit: pages that a prompt got in a row are sent as a run."""
    short, long, longest = (sizes(context) for context in (2**10, 2**17, 2**20))
    assert len(short.plain) == len(longest.plain) > 0 and len(short.hit) == len(longest.hit) > 0
    assert sorted(short.plain) == sorted(long.plain) == sorted(longest.plain)
    assert max(*long.hit, *longest.hit) <= short.hit[0] + 64
    assert max(longest.plain) < 400 and max(longest.hit) < 1000


def test_a_command_that_moves_pages_is_as_long_for_any_history():
    """Steps that move as many pages and change as many entries of page tables."""
    short, long, longest = (sizes(context).regroup for context in (2**13, 2**17, 2**20))
    for shorter in (short, long):
        alike = shorter.keys() & longest.keys()
        assert alike
        assert all(longest[step] <= shorter[step] + 64 for step in alike)
    assert set(long) <= set(longest)
    # a page that moves has four numbers, an entry that changes five
    assert all(
        size < 4 * (4 * moves + 5 * updates) / 2 for (moves, updates), size in longest.items()
    )
