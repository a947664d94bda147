"""Prompts computed chunk by chunk by growing groups of lanes (Tetris): the same tokens for any
legal plan, and no page is lost."""

from __future__ import annotations

import random
import re

import pytest

from jaxserve.engine.build import build
from jaxserve.engine.engine import Engine
from jaxserve.lanes.planner import LanePlanner, PlanPart
from jaxserve.settings.schema import (
    CacheConfig,
    EngineConfig,
    MeshConfig,
    ModelSource,
    SchedulerConfig,
)
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

LANES = 8
PROMPTS = [list(range(3, 3 + n)) for n in (5, 90, 200, 333, 450, 17)]


@pytest.fixture(scope="module")
def alone():
    """One lane, to which there is no plan."""
    return engine(max_len=1024)


@pytest.fixture(scope="module")
def right(alone):
    return generate(alone, PROMPTS, max_tokens=12)


@pytest.fixture(scope="module")
def lanes():
    return engine(
        mesh=f"kvp={LANES}",
        chunk=64,
        seqs=4,
        pages=60,
        max_len=1024,
        exchange="pass_kv",
        planned=True,
    )


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.matrix) for seed in (1, 2, 3))]
)
def test_tokens_do_not_depend_on_the_plan(lanes, right, seed):
    plans = Plans(seed)
    real = fresh(lanes, "striped" if seed % 2 else "zigzag", planner=plans)
    batches: list = []
    watch_batches(real, batches.append)
    shapes = shapes_of(real)
    runner = Runner(real)
    ids = [runner.submit(prompt, max_tokens=12) for prompt in PROMPTS]
    while real.step():
        real.scheduler.check()
        for sequence in real.scheduler.sequences.values():  # plans change between chunks
            done = int(real.scheduler.slots.issued[sequence.slot]) if sequence.slot >= 0 else 0
            if sequence.plan and done < sequence.prefill_len and plans.rng.random() < 0.3:
                sequence.plan = plans(
                    [], done, sequence.prefill_len, sequence.plan_at(max(0, done - 1)).lanes
                )
    assert [runner.ids(id) for id in ids] == right
    assert sum(len(batch.moves) for batch in batches) > 5 and "pass_kv" in {
        shape.exchange for shape in shapes
    }
    assert_empty(real)


class Growing:
    """Plans lane 0 for the first tokens of every prompt, and all lanes for the rest."""

    def __init__(self, alone: int, lanes: int):
        self.alone = alone
        self.all = tuple(range(lanes))

    def arrived(self, now: float) -> None:
        pass

    def __call__(self, pending: list[float], start: int, target: int) -> tuple[PlanPart, ...]:
        return PlanPart(self.alone, (0,)), PlanPart(target, self.all)


@pytest.mark.parametrize("most", [4, 1])
def test_tokens_stay_while_history_moves_ahead_and_while_they_decode(alone, most):
    """most: pages that a step moves from a lane to another. With 4 the history moves before the
    group grows; with 1 what is left moves in steps that only decode."""
    prompt = list(range(3, 3 + 250))
    (right,) = generate(alone, [prompt], max_tokens=12)
    real = engine(mesh="kvp=2", chunk=64, seqs=2, pages=60, max_len=1024, planned=True)
    real = fresh(real, "zigzag", planner=Growing(192, 2))
    real.scheduler.cache.moves.limit = most
    batches: list = []
    watch_batches(real, batches.append)
    assert generate(real, [prompt], max_tokens=12) == [right]
    moved = {int(batch.start[0]): len(batch.moves) for batch in batches}
    held = {int(batch.start[0]): batch.blocks_per_lane[0].tolist() for batch in batches}
    assert moved[64] + moved[128] > 0 and (held[192] == [8, 8]) == (most == 4)
    decoding = sum(len(batch.moves) for batch in batches if batch.is_decode.all())
    assert (decoding > 0) == (most == 1)
    assert abs(batches[-1].blocks_per_lane[0, 0] - batches[-1].blocks_per_lane[0, 1]) <= 1
    assert_empty(real)


@pytest.mark.matrix
@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("pages", [60, 7])
def test_a_plan_that_is_cut_short_leaves_every_page_accounted_for(lanes, right, pages, seeds):
    """Cancelled at random moments, or short of pages: then blocks stay where they were, and what
    runs says what it says alone."""
    full = 0  # times that blocks had to stay since no page was free where they belong
    for seed in range(seeds):
        rng = random.Random(seed)
        real = fresh(lanes, "striped", pages, planner=Plans(seed))
        cache = real.scheduler.cache
        rebalance = cache.rebalance

        def counted(slot, before, rebalance=rebalance, cache=cache):
            nonlocal full
            full += bool(cache.layouts[slot].target) and 0 in cache.pages.available()
            return rebalance(slot, before)

        cache.rebalance = counted
        runner = Runner(real)
        for lap in range(40):  # until pages were short at least once, and 4 times at least
            if lap >= 4 and (full or pages == 60):
                break
            ids = [
                runner.submit(prompt, max_tokens=12, rest=dict(cache_salt=str(lap % 2)))
                for prompt in PROMPTS * 2
            ]
            doomed = rng.sample(ids, 5)
            while real.step():
                real.scheduler.check()
                if doomed and rng.random() < 0.3:
                    real.cancel(doomed.pop())
            for id, said in zip(ids, right * 2):
                got = runner.completion(id)
                assert (
                    got.ids == said
                    if got.finished.reason != "cancelled"
                    else got.ids == said[: len(got.ids)]
                )
            assert_empty(real)
    assert (full > 0) == (pages == 7)


@pytest.mark.matrix
@pytest.mark.parametrize("tokens", [32, 128])
def test_the_planner_gives_long_prompts_more_lanes(tokens, alone, tmp_path, monkeypatch):
    """The engine measures its profile and fits latencies by size of group, from which it plans.
    tokens: of a step."""
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path))
    config = EngineConfig(
        ModelSource("random:tiny", max_model_len=1024),
        MeshConfig(kvp=4),
        CacheConfig(pages=100, placement="striped"),
        SchedulerConfig(
            max_seqs=2,
            chunk_tokens=tokens,
            exchange="pass_q",
            planner="cdsp",
            improvement=0.05,
        ),
        compile_cache=str(tmp_path),
    )
    real = build(config, progress=False, warm_up=False)
    plan = real.scheduler.packer.prefill.chunks.planner
    for queues in ([0.0] * 4, [0.0, 9.0, 0.0, 9.0]):
        parts = plan(queues, 32, 1000)
        assert parts[-1].stop == 1000 and [part.stop for part in parts] == sorted(
            part.stop for part in parts
        )
        assert all(set(one.lanes) <= set(other.lanes) for one, other in zip(parts, parts[1:]))
        assert all((part.stop - 32) % 16 == 0 for part in parts[:-1]) and parts[0].lanes[0] in (
            0,
            2,
        )
    always = LanePlanner("fixed-2", plan.instances, {0.0: 0.0})
    assert always([9.0, 9.0, 0.0, 1.0], 32, 1000) == (PlanPart(1000, (2, 3)),)
    said = generate(real, [PROMPTS[3]], max_tokens=4)
    assert said == generate(alone, [PROMPTS[3]], max_tokens=4)

    # pages move in the programs of steps, beside layers
    real = fresh(real, "striped", planner=Plans(5, lanes=4))
    shapes = shapes_of(real)
    moves: list[int] = []
    watch_batches(real, lambda batch: moves.append(len(batch.moves)))
    prompts = [list(reversed(prompt)) for prompt in PROMPTS]
    assert generate(real, prompts, max_tokens=6) == generate(alone, prompts, max_tokens=6)
    assert sum(count for shape, count in zip(shapes, moves) if shape.moves) > 10
    assert_moves_need_no_layer(real)


def test_pages_move_beside_the_layers_of_a_step(lanes):
    assert_moves_need_no_layer(lanes)


def assert_moves_need_no_layer(real: Engine) -> None:
    """Checks that the pages of each layer are sent as they came in: on no path from a product of
    the layers."""
    plan = real.worker.plan
    programs = real.worker.stages.programs
    moving = next((name, lower) for name, lower in programs.all() if "moves" in name)
    text = programs.get(*moving).as_text()
    made = dict(
        re.findall(r"^\s*(?:ROOT )?%([\w.-]+) = (.*)$", text[text.index("\nENTRY") :], re.M)
    )
    page = f"{plan.model.kv_heads},2,{plan.block_size},{plan.model.head_dim}]"
    sends = [
        name
        for name, what in made.items()
        if " all-to-all(" in what and page in what.split(" all-to-all(")[0]
    ]
    assert len(sends) == plan.model.layers
    seen = set()
    front = set(sends)
    while front:
        name = front.pop()
        seen.add(name)
        front |= {
            source
            for source in re.findall(r"%([\w.-]+)", made[name].split("metadata=")[0])
            if source in made
        } - seen
    assert not [
        name
        for name in seen
        if re.search(r" (dot|while|all-gather|collective-permute|custom-call)\(", made[name])
    ]


def test_a_layers_pages_are_sent_beside_the_layer_before(lanes):
    """In the order in which layers need them, and no earlier than the hidden states are there that
    go into the layer before."""
    programs = lanes.worker.stages.programs
    lower = next(lower for name, lower in programs.all() if "moves" in name)
    bodies = lower().as_text().split("func.func")
    body = next(body for body in bodies if "call @_run_block" in body)
    issued = re.findall(r"optimization_barrier|all_to_all|call @_run_block", body)
    before = ["optimization_barrier", "all_to_all", "call @_run_block"]
    others = lanes.worker.plan.model.layers - 1
    assert issued == ["all_to_all", *before * others, "call @_run_block"]
