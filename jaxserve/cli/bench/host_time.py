"""What a decode step costs the host, and what it sends to the devices, with many sequences running.

Stopwatches stand around calls that the engine itself makes: scheduler.start (schedule), issuing a
batch up to stages.step (arrays) and from there on (dispatch), scheduler.finish (finish), and the
sinks of the callers (events). The engine is not changed. Prompts are prefilled in the bookkeeping
alone: the KV of the context stays empty, which bears on nothing that is measured, and makes
contexts possible that would take the device hours. Where the device is the host's own CPU, its
threads compete with the host for the cores.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxserve.api.events import Event
from jaxserve.api.request import Request
from jaxserve.api.sampling import SamplingParams
from jaxserve.engine.arrays import Arrays
from jaxserve.engine.stages import DELTAS
from jaxserve.scheduling import Batch
from jaxserve.settings.schema import MeshConfig

PARTS = ("schedule", "arrays", "issue", "finish", "events")
WARM = 24  # turns before those that count


@dataclass(frozen=True)
class Crowd:
    """Sequences that decode: `context` tokens that all have in common, and a tail of up to a block,
    so that they fill pages in turn."""

    sequences: int
    context: int
    steps: int

    @property
    def turns(self) -> int:
        """Of the engine, those included that do not count."""
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


@dataclass
class Watch:
    """Seconds per turn by part, and bytes sent per turn."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    bytes: list[int] = field(default_factory=list)
    issuing: float = 0.0  # when the batch began to be issued

    def begin(self) -> None:
        for times in self.seconds.values():
            times.append(0.0)
        self.bytes.append(0)

    def time(self, part: str, call: Callable) -> Callable:
        """`call`, adding the time it takes to a part of the turn."""

        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = call(*arguments)
            self.seconds[part][-1] += time.perf_counter() - began
            return result

        return timed

    def step(self, call: Callable, mesh: MeshConfig) -> Callable:
        """`call`, which is stages.step: noting what it sends, and that the arrays are ready."""

        def noted(arrays: Arrays, *rest: Any) -> Any:
            self.seconds["arrays"][-1] += time.perf_counter() - self.issuing
            self.bytes[-1] += sent(arrays, mesh)
            return call(arrays, *rest)

        return noted

    def issue(self, call: Callable) -> Callable:
        """`call`, which issues a batch."""

        def noted(batch: Batch) -> Any:
            self.issuing = time.perf_counter()
            return call(batch)

        return self.time("issue", noted)

    def micros(self) -> dict[str, np.ndarray]:
        """Microseconds of each turn that counts; the total is the sum of the three parts before
        it."""
        of = {part: np.array(times)[WARM:] * 1e6 for part, times in self.seconds.items()}
        total = of["schedule"] + of["issue"]
        return {
            "schedule": of["schedule"],
            "arrays": of["arrays"],
            "dispatch": of["issue"] - of["arrays"],
            "total": total,
            "finish": of["finish"],
            "events": of["events"],
        }


@dataclass(frozen=True)
class HostTime:
    """Microseconds per step by part, and bytes to all devices together, of every step."""

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


def host_time(engine: Any, crowd: Crowd, done: Callable[[str], None]) -> HostTime:
    """Measures decode steps. The engine was not started, reuses prefixes, and has room for the
    crowd; it is empty afterwards.

    Errors: RequestError where a sequence does not fit.
    """
    ids = _gather(engine, crowd)
    watch = Watch()
    with _watched(engine, watch):
        for _ in range(crowd.turns):
            watch.begin()
            engine.turn()
            done(f"{crowd.sequences} sequences of {crowd.context}")
    for id in ids:
        engine.cancel(id)
    while engine.turn():
        pass
    return HostTime(engine.info.model, crowd, watch.micros(), np.array(watch.bytes)[WARM:])


def _gather(engine: Any, crowd: Crowd) -> list[str]:
    """Hands the crowd in and has the scheduler prefill it, the first alone, so that the others find
    its blocks. Returns the ids."""
    block = engine.stages.plan.block_size
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
        scheduler.finish(batch, np.zeros(len(batch.slot), np.int32), now)


def _nobody(events: Sequence[Event]) -> None:
    """Hears the events and does nothing."""


@contextlib.contextmanager
def _watched(engine: Any, watch: Watch) -> Iterator[None]:
    """The engine with stopwatches, which are gone afterwards."""
    scheduler = engine.scheduler
    stages = engine.stages
    calls = [
        (scheduler, "expire", watch.time("schedule", scheduler.expire)),
        (scheduler, "start", watch.time("schedule", scheduler.start)),
        (engine, "_issue", watch.issue(engine._issue)),
        (stages, "step", watch.step(stages.step, engine.info.mesh)),
        (scheduler, "finish", watch.time("finish", scheduler.finish)),
        (engine, "_send", watch.time("events", engine._send)),
    ]
    for owner, name, call in calls:
        setattr(owner, name, call)
    try:
        yield
    finally:
        for owner, name, _ in calls:
            delattr(owner, name)


def sent(arrays: Arrays, mesh: MeshConfig) -> int:
    """Bytes of a step to all devices: each stage and each rank gets the lanes' rows, and the table
    entries the rows have no room for."""
    early = -(-len(arrays.early) // DELTAS) * DELTAS * 4 * np.dtype(np.int32).itemsize * mesh.kvp
    return (arrays.ints.nbytes + early) * mesh.spp * mesh.tp
