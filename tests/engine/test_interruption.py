"""Prompts that would be late interrupt long steps between two groups of their layers: they have
their tokens before the step ends, and no token of either changes."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from jaxserve.api.batch import Batch
from jaxserve.api.events import Finished, Token
from jaxserve.api.request import Slo
from jaxserve.costs.coefficients import Costs
from jaxserve.engine.command import DeviceError
from jaxserve.engine.engine import Engine
from jaxserve.scheduling.events import StepIssued, StepRead
from tests.engine.harness import Runner, assert_empty, engine, fresh
from tests.engine.test_golden import submit, with_tokens
from tests.waiting import eventually

# predicted seconds are far above those that steps take, so that a busy machine changes nothing:
# with these a chunk of 512 tokens takes 20 s, one of two to five groups of its layers 4 s or more
SLOW = Costs(layers=5, linear_token=8e-3)
SOON = dict(slo=Slo(ttft=8.0))  # below the 10 s of one of two groups: what counts is that it ran
# a chunk of 128 tokens 1.3 s
TINY = Costs(layers=2, linear_token=5e-3)
MATRIX = pytest.mark.matrix
LATE = dict(slo=Slo(ttft=60.0))
SIZES = dict(chunk=512, pages=320)


def interrupted(model, groups: int = 5, mesh: str = "") -> Engine:
    real = engine(model, mesh, layer_groups=groups, profiled=False, **SIZES)
    return unlearning(fresh(real, "grow", costs=SLOW, policy="edf"))


def unlearning(real: Engine) -> Engine:
    """Has an engine keep its predictions, whatever its steps take."""
    real.scheduler.predictor.seen = lambda predicted, seconds: None
    return real


def until_in_part(runner: Runner) -> None:
    """Runs until a step is issued of which some groups of layers are not."""
    while runner.engine.steps.in_flight.partial is None:
        assert runner.engine.step()


def of_length(cases: list[dict], tokens: int) -> dict:
    case = next(case for case in cases if len(case["prompt_ids"]) == tokens)
    return with_tokens(case, 8)


@pytest.mark.parametrize(
    "groups, mesh",
    [
        pytest.param(5, "", id="a layer each", marks=MATRIX),
        pytest.param(2, "", id="two groups"),
        pytest.param(3, "kvp=2,tp=3", id="lanes and ranks", marks=MATRIX),
    ],
)
def test_a_short_prompt_runs_within_a_long_step_and_no_token_changes(
    groups, mesh, golden_first_layers, smollm2_first_layers
):
    real = interrupted(smollm2_first_layers, groups, mesh)
    read: list[Batch] = []
    real.bus.subscribe(StepRead, lambda step: read.append(step.batch))
    runner = Runner(real)
    long, *shorts = (of_length(golden_first_layers["cases"], tokens) for tokens in (1500, 37, 5))
    first = submit(runner, long, rest=LATE)
    others = []
    for number, case in enumerate(shorts, 1):
        until_in_part(runner)
        before = len(read)
        long_step = real.steps.in_flight.partial.batch
        others.append(submit(runner, case, rest=SOON))
        while real.steps.in_flight.partial is not None:
            real.step()
            real.scheduler.check()
        within = read[before:]
        assert any(number in batch.seq for batch in within), "it waited for the step"
        assert all(batch is not long_step for batch in within)
    runner.run()
    assert real.scheduler.interruptions >= 2
    assert runner.ids(first) == long["output_ids"]
    assert [runner.ids(id) for id in others] == [case["output_ids"] for case in shorts]
    assert_empty(real)
    real.close()


def test_a_step_that_fails_in_part_is_forgotten_and_the_next_requests_are_served():
    real = fresh(engine(layer_groups=2, **SIZES), "grow", costs=TINY, policy="edf")
    runner = Runner(real)
    lost = runner.submit(range(3, 403), max_tokens=4, rest=LATE)
    until_in_part(runner)
    run = real.worker.stages.run

    def failing(*work):
        real.worker.stages.run = run
        raise DeviceError("a fault between two groups of layers")

    real.worker.stages.run = failing
    while runner.engine._safe_step():
        pass
    assert runner.events[lost][-1].error.status == "INTERNAL"
    assert real.scheduler.partial is None
    again = runner.submit(range(3, 403), max_tokens=4, rest=LATE)
    runner.run()
    assert len(runner.ids(again)) == 4
    assert_empty(real)
    real.close()


KINDS = ({}, dict(temperature=1.0, seed=1), dict(n=2), dict(top_p=0.5, seed=2))


def random_tokens(real: Engine, policy: str) -> tuple[list[list[tuple[int, int]]], int]:
    """Tokens of random requests that come while others run, many with prefixes of others, some with
    objectives that they miss behind a long step; and how often a step was interrupted."""
    rng = random.Random(0)
    real = unlearning(fresh(real, "grow", costs=TINY, policy=policy))
    runner = Runner(real)
    for number in range(60):
        length = rng.choice((3, 20, 40, 300, 400))
        prompt = range(3, 3 + length)
        if rng.random() < 0.5:
            prompt = [rng.randrange(3, 500) for _ in range(length)]
        kind = {"ignore_eos": True, "max_tokens": rng.choice((1, 5, 12)), **rng.choice(KINDS)}
        slo = Slo(ttft=rng.choice((0.7, 0.9, 1.1)) if length < 50 else 60.0)
        runner.submit(np.array(prompt), id=str(number), rest=dict(slo=slo), **kind)
        for _ in range(rng.randrange(20)):
            real.step()
            real.scheduler.check()
    runner.run()
    assert_empty(real)
    return [tokens_of(events) for events in runner.events.values()], real.scheduler.interruptions


def tokens_of(events: list) -> list[tuple[int, int]]:
    """Completion and id of each token, by completion."""
    assert all(event.error is None for event in events if isinstance(event, Finished))
    found = [(event.index, event.id) for event in events if isinstance(event, Token)]
    return sorted(found, key=lambda token: token[0])


@pytest.mark.parametrize("mesh", ["", pytest.param("kvp=2", marks=MATRIX)])
def test_random_requests_have_the_tokens_that_whole_steps_give(mesh):
    real = engine(mesh=mesh, layer_groups=2, chunk=128, pages=90, max_len=512)
    whole, never = random_tokens(real, "fcfs")
    parts, often = random_tokens(real, "slack")
    assert often and not never
    assert parts == whole
    real.close()


def tokens_beside_tiers(
    real: Engine, policy: str, see: Callable[[Engine, StepIssued], object] = lambda *_: None
) -> tuple[list[list[int]], int]:
    """Tokens of rounds of requests: a new long prompt, the one of two rounds ago, of which blocks
    have left the devices, and a short one that would be late behind a long step; and how often a
    step was interrupted. see: gets the engine and each step once it is issued."""
    rng = random.Random(0)
    real = unlearning(fresh(real, "grow", costs=TINY, policy=policy))
    real.bus.subscribe(StepIssued, lambda step: see(real, step))
    runner = Runner(real)
    long = [[rng.randrange(3, 500) for _ in range(390)] for _ in range(8)]
    for number, prompt in enumerate(long):
        runner.submit(prompt, rest=LATE, max_tokens=8, ignore_eos=True)
        if number > 1:
            runner.submit(long[number - 2], rest=LATE, max_tokens=8, ignore_eos=True)
        while real.steps.in_flight.partial is None and real.step():
            real.scheduler.check()
        soon = dict(slo=Slo(ttft=1.1))
        runner.submit(prompt[:20], rest=soon, max_tokens=4, ignore_eos=True)
        runner.run()
    assert_empty(real)
    return [runner.ids(id) for id in runner.events], real.scheduler.interruptions


@pytest.mark.parametrize("mesh, pages", [("", 56), pytest.param("kvp=2", 28, marks=MATRIX)])
def test_blocks_go_to_host_memory_and_back_beside_interrupted_steps(mesh, pages):
    """Tokens are those that whole steps give, and nothing is left over on the way."""
    sizes = dict(chunk=128, pages=pages, max_len=512)
    real = engine(mesh=mesh, layer_groups=2, host_cache_gib=0.02, **sizes)
    moving = []

    def within(running: Engine, step: StepIssued) -> None:
        if running.steps.in_flight.partial is not None and len(step.command.stores):
            moving.append(step)

    parts, often = tokens_beside_tiers(real, "edf", within)
    assert often >= 4
    assert moving, "no block left the devices while a step was issued in part"
    counts = real.worker.lower_tiers.counts()
    assert counts.host_reads and not counts.missed and not counts.wrong
    eventually(lambda: real.worker.mover.idle)
    assert not real.worker.lower_tiers.host.expected
    assert (parts, 0) == tokens_beside_tiers(real, "fcfs")
    real.close()
