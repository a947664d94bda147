"""Spread prompts meet in groups of lanes: tokens and what crosses lanes stay in the group of each,
several groups run in the same steps, and a step takes a chunk for each lane of a group."""

from __future__ import annotations

import dataclasses
import re

import pytest

from jaxserve.engine.step_shapes import layout
from jaxserve.lanes.choice import ExchangeChooser
from jaxserve.lanes.groups import group_around, group_sizes, size_around, size_of
from jaxserve.lanes.planner import PlanPart
from jaxserve.lanes.rates import ExchangeRates, Link
from jaxserve.lanes.work import Heads
from jaxserve.scheduling.events import StepIssued
from tests.engine.harness import Runner, assert_empty, engine, fresh, generate

LANES = 8
CHUNK = 32
MESH = dict(chunk=CHUNK, seqs=4, pages=40, max_len=512)
PROMPTS = [list(range(3, 3 + 300)), list(range(400, 400 + 250, 1)), list(range(9, 9 + 20))]
PROMPTS = [[3 + token % 500 for token in prompt] for prompt in PROMPTS]


class Lanes:
    """A planner that gives each prompt the lanes of `by_length`, by its tokens."""

    def __init__(self, by_length: dict[int, tuple[int, ...]]):
        self.by_length = by_length

    def arrived(self, now: float) -> None:
        pass

    def __call__(self, pending: list[float], start: int, target: int) -> tuple[PlanPart, ...]:
        return (PlanPart(target, self.by_length.get(target, (3,))),)


@pytest.fixture(scope="module")
def right():
    return generate(engine(**MESH), PROMPTS, max_tokens=6)


@pytest.fixture(
    scope="module", params=["pass_kv", pytest.param("pass_q", marks=pytest.mark.matrix), "gather"]
)
def lanes(request):
    return engine(mesh=f"kvp={LANES}", exchange=request.param, planned=True, **MESH)


def issued(real) -> list:
    """Steps from now on: shape, and by lane the slots of its rows."""
    steps = []
    plan = real.worker.plan

    def see(step: StepIssued) -> None:
        shape = plan.shapes[step.command.shape]
        rows = layout(shape, plan.block_size).views(step.command.rows)["rows"]
        slots = [{slot for slot, _, length, _ in mine if length} for mine in rows.tolist()]
        steps.append((shape, slots, step.batch))

    real.bus.subscribe(StepIssued, see)
    return steps


def hops(real, shape) -> set[tuple[int, int]]:
    """The pairs of lanes between which a compiled step sends around rings."""
    text = real.worker.stages.programs.compiled[f"layers_0_{shape}"].as_text()
    found = re.findall(r"source_target_pairs=\{((?:\{\d+,\d+\},?)+)\}", text)
    return {
        (int(source), int(target))
        for pairs in found
        for source, target in re.findall(r"(\d+),(\d+)", pairs)
    }


def test_tokens_and_hops_stay_in_the_group_of_each_prompt(lanes, right):
    """Lanes 0 and 1 of eight compute one prompt while others compute another: on 6 and 7, in
    groups of two; on 4 to 7, in groups of four."""
    exchange = lanes.config.scheduler.exchange
    for others, size in (((6, 7), 2), ((4, 5, 6, 7), 4)):
        real = fresh(lanes, "striped", planner=Lanes({300: (0, 1), 250: others}))
        steps = issued(real)
        runner = Runner(real)
        ids = [runner.submit(prompt, max_tokens=6) for prompt in PROMPTS]
        runner.run()
        assert [runner.ids(id) for id in ids] == right
        both = 0
        for shape, slots, batch in steps:
            where = dict(zip(batch.slot.tolist(), zip(batch.seq.tolist(), batch.spread.tolist())))
            for lane, mine in enumerate(slots):
                for slot in mine:
                    seq, spread = where[slot]
                    assert not spread or lane in ((0, 1), others)[seq]
            spread = {seq for seq, spread in where.values() if spread}
            if spread == {0, 1}:
                both += 1
                assert shape.group_size == size
            elif spread:
                assert shape.group_size == (2 if spread == {0} else size)
            if shape.prefill_ring:
                rings = {
                    (lane, lane - lane % shape.group_size + (lane + 1) % shape.group_size)
                    for lane in range(LANES)
                }
                assert hops(real, shape) == rings
        assert both > 2
        assert any(shape.exchange == exchange for shape, _, _ in steps)
        assert_empty(real)


def test_a_step_takes_a_chunk_for_each_lane_of_a_group(lanes, right):
    real = fresh(lanes, "striped", planner=Lanes({300: (0, 1, 2, 3)}))
    steps = issued(real)
    assert generate(real, PROMPTS[:1], max_tokens=6) == right[:1]
    lengths = [int(batch.length[0]) for _, _, batch in steps if not batch.is_decode[0]]
    assert lengths == [4 * CHUNK, 4 * CHUNK, 300 - 8 * CHUNK]
    assert all(shape.group_size == 4 for shape, _, _ in steps)


LINK = Link(1e-6, 1e9)
RATES = ExchangeRates(1e15, 1e6, 1e-6, LINK, LINK, LINK)


@pytest.fixture(scope="module")
def rings():
    return engine(mesh="kvp=4", decode_exchange="pass_q", profiled=False, **MESH)


@pytest.mark.parametrize(
    ("gather", "hop", "ring"),
    [(Link(1e-6, 1e3), Link(1e-6, 1e12), True), (Link(1e-6, 1e12), Link(1e-3, 1e12), False)],
    ids=["narrow-gather", "slow-hop"],
)
def test_decodes_go_round_a_ring_where_that_is_predicted_to_be_faster(
    rings, right, gather, hop, ring
):
    """By the step, alone and beside chunks of prompts; alone in the smallest group."""
    # visits need three
    slow = Link(0.1, 1e9)
    rates = dataclasses.replace(RATES, hop=hop, all_gather=gather, all_to_all=slow)
    block = rings.config.cache.block_size
    chooser = ExchangeChooser(4, Heads(4, 2, 16), rates, block=block, decode_chooser="auto")
    chooser = dataclasses.replace(chooser, chooser="gather")
    real = fresh(rings, "striped", planner=Lanes({300: (0, 1), 250: (2, 3)}), chooser=chooser)
    steps = []
    plan = real.worker.plan
    real.bus.subscribe(
        StepIssued, lambda step: steps.append((plan.shapes[step.command.shape], step.batch))
    )
    assert generate(real, PROMPTS, max_tokens=6) == right
    decodes = [pair for pair in steps if (pair[1].is_decode & pair[1].spread).any()]
    alone = [shape for shape, batch in decodes if batch.is_decode.all()]
    mixed = [shape for shape, batch in decodes if not batch.is_decode.all()]
    assert len(alone) > 3 and mixed
    assert {shape.decode_ring for shape in alone + mixed} == {ring}
    assert {shape.group_size for shape in alone} == {2}
    assert_empty(real)


@pytest.mark.parametrize(
    "lanes, sizes", [(1, (1,)), (2, (1, 2)), (3, (1, 3)), (6, (1, 2, 6)), (8, (1, 2, 4, 8))]
)
def test_groups_of_one_size_lie_within_those_of_the_next(lanes, sizes):
    assert group_sizes(lanes) == sizes
    for lane in range(lanes):
        around = [set(group_around(lane, size)) for size in sizes]
        assert around[0] == {lane} and around[-1] == set(range(lanes))
        assert all(small <= large for small, large in zip(around, around[1:]))
        assert [size_around(members, lanes) for members in around] == list(sizes)


def test_a_group_has_the_home_lane_and_all_blocks():
    assert size_of(0, [5, 0, 0, 0]) == 1
    assert size_of(0, [0, 5, 0, 0]) == size_of(1, [3, 1, 0, 0]) == 2
    assert size_of(1, [0, 5, 1, 0]) == size_of(3, [1, 0, 0, 0]) == 4
