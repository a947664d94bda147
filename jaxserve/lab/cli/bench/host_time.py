"""Times the host's work on a decode step, and sizes its command, with many sequences running.

The engine tells its bus how long it took to decide what is in a step (schedule), to write its
command (arrays) and to hand that to the devices (dispatch), to read its tokens (finish) and to
notify callers (events). Prompts are prefilled in the bookkeeping alone: the KV of the context stays
empty, which bears on nothing that is measured, and makes contexts possible that would take the
device hours. Where the device is the host's own CPU, its threads compete with the host for the
cores."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.api.events import Event
from jaxserve.api.request import Request
from jaxserve.api.sampling import SamplingParams
from jaxserve.scheduling.batch_reader import StepResults
from jaxserve.scheduling.events import StepFinished, StepIssued

WARM = 24  # steps before those that count


@dataclass(frozen=True)
class Crowd:
    """Sequences that decode: `context` tokens that all have in common, and a tail of up to a block,
    so that they fill pages in turn."""

    sequences: int
    context: int
    steps: int

    @property
    def turns(self) -> int:
        """Steps of the engine, with those that do not count."""
        return WARM + self.steps

    @property
    def tokens(self) -> int:
        """Most tokens that one of them generates: some of them while the others are still to
        begin."""
        return self.turns + self.sequences + 16

    def length(self, block: int) -> int:
        """Most tokens of a sequence."""
        return self.context + block + self.tokens

    def pages(self, block: int) -> int:
        """Pages that hold all of them."""
        return self.context // block + self.sequences * ((block + self.tokens) // block + 2)


class Stopwatch:
    """Listens to an engine's bus for how long the host took over each step, and sizes its
    commands."""

    def __init__(self, engine: Any):
        self._codec = engine.worker.plan.codec()
        self.issued: list[StepIssued] = []
        self.finished: list[StepFinished] = []
        self.bytes: list[int] = []

    def step_issued(self, step: StepIssued) -> None:
        self.issued.append(step)
        self.bytes.append(len(self._codec.encode(step.command)))

    def micros(self) -> dict[str, np.ndarray]:
        """Microseconds of each step that counts; the total is the sum of the three parts before
        it."""
        of = lambda events, name: np.array([getattr(event, name) for event in events]) * 1e6
        schedule = of(self.issued, "schedule")
        build = of(self.issued, "build")
        dispatch = of(self.issued, "dispatch")
        parts = {
            "schedule": schedule,
            "arrays": build,
            "dispatch": dispatch,
            "total": schedule + build + dispatch,
            "finish": of(self.finished, "finish"),
            "events": of(self.finished, "notify"),
        }
        return {name: times[WARM:] for name, times in parts.items()}


@dataclass(frozen=True)
class HostTime:
    """Microseconds per step by part, and bytes of its command, of every step."""

    model: str
    crowd: Crowd
    micros: dict[str, np.ndarray]
    bytes: np.ndarray

    def record(self) -> dict[str, Any]:
        spread = {
            part: {"p50": float(np.percentile(x, 50)), "p90": float(np.percentile(x, 90))}
            for part, x in self.micros.items()
        }
        return {
            "model": self.model,
            "sequences": self.crowd.sequences,
            "context": self.crowd.context,
            "steps": self.crowd.steps,
            "micros": spread,
            "bytes_per_step": {
                "p50": int(np.percentile(self.bytes, 50)),
                "most": int(self.bytes.max()),
            },
        }


def host_time(engine: Any, crowd: Crowd, step: Callable[[str], None]) -> HostTime:
    """Measures decode steps. The engine was not started, reuses prefixes, and has room for the
    crowd; it is empty afterwards.

    Errors: RequestError where a sequence does not fit.
    """
    ids = _gather(engine, crowd)
    watch = Stopwatch(engine)
    with _subscribed(engine, watch):
        for _ in range(crowd.turns):
            engine.step()
            step(f"{crowd.sequences} sequences of {crowd.context}")
    for id in ids:
        engine.cancel(id)
    while engine.step():
        pass
    return HostTime(engine.info.model, crowd, watch.micros(), np.array(watch.bytes)[WARM:])


def _gather(engine: Any, crowd: Crowd) -> list[str]:
    """Hands the crowd in and has the scheduler prefill it, the first alone, so that the others find
    its blocks. Returns the ids."""
    block = engine.info.block_size
    vocab = engine.info.vocab
    dice = np.random.default_rng(0)
    sampling = SamplingParams.make(temperature=0, max_tokens=crowd.tokens, ignore_eos=True)
    common = dice.integers(0, vocab, crowd.context)
    ids = [f"{crowd.context}-{number}" for number in range(crowd.sequences)]
    for number, id in enumerate(ids):
        prompt = np.concatenate([common, dice.integers(0, vocab, 1 + number % block)])
        engine.submit(
            Request.make(id, prompt, sampling, vocab=vocab, max_len=engine.info.max_model_len),
            _nobody,
        )
        if number in (0, crowd.sequences - 1):
            _prefill(engine)
    return ids


def _prefill(engine: Any) -> None:
    scheduler = engine.scheduler
    while scheduler.load().queued_prefill_tokens:
        now = engine.now()
        batch = scheduler.start(now)
        scheduler.finish(batch, StepResults(np.zeros(len(batch.slot), np.int32)), now)


def _nobody(events: Sequence[Event]) -> None:
    """Ignores the events."""


@contextlib.contextmanager
def _subscribed(engine: Any, watch: Stopwatch) -> Iterator[None]:
    """Lets the stopwatch listen to the engine's steps meanwhile."""
    engine.bus.subscribe(StepIssued, watch.step_issued)
    engine.bus.subscribe(StepFinished, watch.finished.append)
    try:
        yield
    finally:
        engine.bus.unsubscribe(StepIssued, watch.step_issued)
        engine.bus.unsubscribe(StepFinished, watch.finished.append)
