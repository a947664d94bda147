"""The wavefront over stages, as the engine issues it: a slot is the time one stage takes for one
batch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxserve.api.batch import Batch
from jaxserve.checkpoint import zoo
from jaxserve.engine.engine import Engine
from jaxserve.scheduling.events import StepIssued, StepRead
from tests.engine.harness import Runner, engine, fresh

CHUNK = 16
CHUNKS = 64
MANY = 192  # prefill tokens of a step in which several prompts may start


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.matrix), 3])
def piped(request) -> Engine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(zoo.MODELS, "tiny-3", dataclasses.replace(zoo.MODELS["tiny"], layers=3))
        yield engine(
            "random:tiny-3", f"spp={request.param}", chunk=MANY, seqs=4, pages=150, max_len=2048
        )


class Trace:
    """The slots in which each batch leaves each stage. A batch enters a stage after it left the one
    before, and after the batch before it left that stage; the first stage waits for the token that
    the batch feeds, and for what the host had read before it issued the batch."""

    def __init__(self, real: Engine):
        self.stages = real.config.mesh.spp
        self.left: list[list[int]] = []  # per batch and stage
        self.batches: list[Batch] = []
        self.made_by: list[int | None] = [None]  # by version of the sampled tokens
        self.read = 0
        real.bus.subscribe(StepIssued, self._step_issued)
        real.bus.subscribe(StepRead, self._step_read)

    def _step_issued(self, step: StepIssued) -> None:
        self.batches.append(step.batch)
        waits = [self.made_by[step.command.reads], self.read - 1 if self.read else None]
        ready = max([self.left[batch][-1] for batch in waits if batch is not None], default=0)
        before = self.left[-1] if self.left else [0] * self.stages
        slots = []
        for stage in range(self.stages):
            ready = max(ready, before[stage]) + 1
            slots.append(ready)
        self.left.append(slots)
        if step.command.variant >= 0:
            self.made_by.append(len(self.left) - 1)

    def _step_read(self, step: StepRead) -> None:
        self.read += 1

    def bubbles(self, first: int, last: int) -> int:
        """Slots in which the last stage has nothing to do, between two batches."""
        return self.left[last][-1] - self.left[first][-1] - (last - first)


@pytest.fixture
def traced(piped) -> tuple[Engine, Trace]:
    real = fresh(piped, "grow")
    budget(real, CHUNK)
    return real, Trace(real)


def budget(real: Engine, tokens: int) -> None:
    real.scheduler.packer.config = dataclasses.replace(
        real.scheduler.packer.config, chunk_tokens=tokens
    )


def chunk_batches(trace: Trace, number: int) -> list[int]:
    """Batches with a chunk of the prompt of sequence `number`."""
    return [
        at
        for at, batch in enumerate(trace.batches)
        if (batch.seq[~batch.is_decode] == number).any()
    ]


def long_prompt() -> np.ndarray:
    return np.arange(CHUNK * CHUNKS) % 500 + 3


def test_a_prompt_of_64_chunks_fills_the_stages(traced):
    real, trace = traced
    runner = Runner(real)
    runner.submit(long_prompt(), max_tokens=1)
    runner.run()
    assert chunk_batches(trace, 0) == list(range(CHUNKS))
    assert trace.left[-1][-1] <= CHUNKS + trace.stages - 1


def test_decodes_ride_along_without_making_a_bubble(traced):
    real, trace = traced
    runner = Runner(real)
    decodes = [runner.submit([5 + i], max_tokens=200, ignore_eos=True) for i in range(trace.stages)]
    while min(len(runner.events[id]) for id in decodes) < 4:
        real.step()
    first = len(trace.batches)
    runner.submit(long_prompt(), max_tokens=1)
    runner.run()
    chunks = chunk_batches(trace, trace.stages)
    assert chunks == list(range(chunks[0], chunks[0] + CHUNKS)) and chunks[0] <= first + 1
    assert trace.left[chunks[-1]][-1] - trace.left[chunks[0]][0] + 1 <= CHUNKS + trace.stages - 1
    for sequence in range(trace.stages):  # and every one of them speaks every P-th slot
        said = sum(
            (batch.seq[batch.is_decode] == sequence).any()
            for batch in trace.batches[chunks[0] : chunks[-1] + 1]
        )
        assert said >= CHUNKS // trace.stages - 1


@pytest.mark.parametrize("tokens", [CHUNK, MANY])
def test_as_many_decodes_as_stages_leave_no_bubble_whether_they_start_apart_or_at_once(
    traced, tokens
):
    real, trace = traced
    budget(real, tokens)
    runner = Runner(real)
    for i in range(trace.stages):
        runner.submit([5 + i], max_tokens=40, ignore_eos=True)
    runner.run()
    assert len(trace.batches[0].seq) == (1 if tokens == CHUNK else trace.stages)
    steady = trace.stages * 2, trace.stages * 38
    assert trace.bubbles(*steady) == 0


def test_prompts_behind_a_prompt_fill_its_bubbles(traced):
    real, trace = traced
    runner = Runner(real)
    for i in range(4):
        runner.submit(long_prompt()[i : i + 20 * CHUNK], max_tokens=1)
    runner.run()
    last = max(chunk_batches(trace, 3))
    assert last < 4 * 20 and trace.bubbles(0, last) == 0


def test_a_lone_decode_takes_a_round_through_the_stages_per_token(traced):
    real, trace = traced
    runner = Runner(real)
    runner.submit([5], max_tokens=20, ignore_eos=True)
    runner.run()
    assert trace.left[19][-1] == 20 * trace.stages
