"""A replica without devices: the scheduler and the cache that serve, steps that take as long as the
predictor says or as is drawn around that, and a clock that its caller advances.

Batches are issued as the live engine issues them, up to `lookahead` ahead of the stages and no
earlier than need be, so what is decided when is the same. A stage runs one batch at a time; the
next one enters as soon as the one before has left it (Medha, 3.3). Sampled tokens mean nothing:
see `guesses`.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxserve.api.batch import Batch, PageStores
from jaxserve.api.errors import RequestError
from jaxserve.api.request import Request
from jaxserve.checkpoint.model import ModelConfig
from jaxserve.clock import VirtualClock
from jaxserve.costs.predictor import Predictor
from jaxserve.lab.simulate.guesses import Guesses
from jaxserve.lab.simulate.noise import NO_NOISE, Noise
from jaxserve.lab.simulate.tiers import VirtualTiers
from jaxserve.observe.metric_rows import READ
from jaxserve.replica.core import ReplicaCore
from jaxserve.replica.info import ReplicaInfo
from jaxserve.replica.protocol import Sink
from jaxserve.scheduling import Scheduler
from jaxserve.scheduling.batch_reader import StepResults
from jaxserve.scheduling.events import StepIssued, StepRead
from jaxserve.scheduling.prefill_facts import prefill_facts
from jaxserve.settings.schema import AdapterConfig, CacheConfig, MeshConfig
from jaxserve.settings.schema.adapters import MAX_HELD

SOME_RIGHT = Guesses()
NO_SHAPE = ModelConfig(
    name="",
    layers=1,
    d_model=1,
    heads=1,
    kv_heads=1,
    head_dim=1,
    d_ff=1,
    vocab=2**31 - 1,
    max_len=2**31 - 1,
)
NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class StagePassage:
    """Passage of a batch through the stages. start, end: clock seconds at which it enters the first
    and leaves the last. seconds: that it takes in a stage, however long was predicted."""

    start: float
    end: float
    seconds: float


class NoFiles:
    """Adapters without files: those with equal folders are equal."""

    def load(self, number: int, folder: str) -> str:
        return folder

    def take_lost(self) -> list[int]:
        """Returns []: nothing is lost."""
        return []

    def drop(self, number: int) -> None:
        """Does nothing: no memory is held."""


class StepListener(Protocol):
    """Listener to a replica's steps."""

    def step_issued(self, batch: Batch, passage: StagePassage) -> None:
        """A batch was issued to the stages."""

    def step_read(self, batch: Batch, now: float) -> None:
        """The tokens of the oldest batch in flight were read; the scheduler has not heard yet."""


class Pipeline:
    """Pipeline stages: when each is free again, and when the last token of each slot left the last
    one.

    Steps take what `predictor` predicts when this is made, times a drawn factor: what it learns of
    them later, as of devices, does not make them faster. noise: spread of the factors; a step takes
    the same one in all stages, for what it consists of is the same in all."""

    def __init__(self, predictor: Predictor, stages: int, slots: int, noise: Noise = NO_NOISE):
        self.predictor = predictor
        self._lanes = predictor.mesh.kvp
        self.free = [0.0] * stages
        self._left = np.zeros(slots)
        self._draw = noise.draws()
        self._scale = predictor.scale
        self._partial = StagePassage(0.0, 0.0, 0.0)  # of the batch that enters in parts

    def enter(self, now: float, batch: Batch) -> StagePassage:
        """Puts a batch into the stages."""
        factor = self._factor()
        now += batch.drafting
        hop = self.predictor.hop(sum(batch.length.tolist()))
        samples = batch.first_chunk
        if self._lanes > 1:
            samples = int(np.bincount(batch.lane[:samples]).max(initial=0))
        head = self.predictor.head(samples)
        began = at = max(now, self.free[0], self._fed(batch))
        for stage, free in enumerate(self.free):
            last = stage + 1 == len(self.free)
            begun = max(at, free)
            self.free[stage] = at = (
                begun + batch.seconds * factor - (0.0 if last else head * factor)
            )
            at += 0.0 if last else hop
        self._left[batch.slot[batch.sample].astype(np.intp)] = at
        return StagePassage(began, at, batch.seconds * factor)

    def enter_part(self, now: float, batch: Batch, parts: int, first: bool) -> StagePassage:
        """Puts one of `parts` equal parts of a batch into the only stage, the `first` or another.
        Returns the passage of the batch up to the end of this part."""
        if first:
            began = max(now, self.free[0], self._fed(batch))
            self._partial = StagePassage(began, began, batch.seconds * self._factor())
        passage = self._partial
        end = max(now, self.free[0], passage.start) + passage.seconds / parts
        self.free[0] = end
        self._left[batch.slot[batch.sample]] = end
        return StagePassage(passage.start, end, passage.seconds)

    def _fed(self, batch: Batch) -> float:
        """Clock second at which the last tokens of all that a batch decodes are there."""
        decodes = np.count_nonzero(batch.is_decode)  # come first
        slots = batch.slot[:decodes].astype(np.intp)  # by which numpy looks up fastest
        return max(self._left[slots].tolist(), default=0.0)

    def _factor(self) -> float:
        """Draws what a step takes, over what is predicted for it now."""
        return self._scale / self.predictor.scale * self._draw()


class VirtualReplica(ReplicaCore):
    """Runs requests on a scheduler in virtual time: see `Replica` and the module.

    Nothing happens by itself: `advance` moves the clock and runs what is due by then. All calls
    come from one thread, the one that advances the clock, and sinks are called within them.

    cache: what the scheduler's cache was made with. lookahead: batches issued ahead of the stages.
    Tiers below the scheduler's cache must be `VirtualTiers`, by whose clock the replica goes then.
    name, shape, platform: for `info`, the model and the kind of device that `scheduler` has the
    costs of. noise: spread of the times of steps around their prediction, which `scheduler` does
    not know; the online correction learns from what steps took.
    """

    clock: VirtualClock

    def __init__(
        self,
        scheduler: Scheduler,
        cache: CacheConfig,
        mesh: MeshConfig,
        lookahead: int = 1,
        *,
        name: str = "virtual",
        shape: ModelConfig = NO_SHAPE,
        platform: str = "virtual",
        noise: Noise = NO_NOISE,
    ):
        info = _info(scheduler, cache, mesh, lookahead, name, shape, platform)
        tiers = scheduler.cache.lower
        assert tiers is None or isinstance(tiers, VirtualTiers)
        clock = VirtualClock() if tiers is None else tiers.clock
        super().__init__(scheduler, info, cache, clock)
        self._serve_adapters(NoFiles(), AdapterConfig(lora_root="/", max_cpu_loras=MAX_HELD))
        self.listeners: list[StepListener] = []
        self._depth = mesh.spp + lookahead  # batches in flight
        self._stages = mesh.spp
        self._pipeline = Pipeline(scheduler.predictor, mesh.spp, info.max_seqs, noise)
        self._flights: deque[tuple[StagePassage, Batch]] = deque()
        self._tiers = tiers
        self.propose(SOME_RIGHT)
        self._fetched: list[tuple[float, int, int]] = []  # a heap: when, ticket and blocks
        # clock seconds at which the scheduler was last asked for batches and could have had news
        self._asked_at = self.clock.now()
        self._started = self._closed = False

    def propose(self, guesses: Guesses) -> None:
        """Has proposed tokens, if the scheduler checks some, be right as often as `guesses` say."""
        self._sampler = guesses.sampler()
        if self.scheduler.config.drafts != "none":
            self.scheduler.propose_by(guesses.drafter())

    # --- time

    def next_event(self) -> float:
        """Clock second at which something happens next; infinity where nothing will."""
        if not self._started:
            return NEVER
        read = self._flights[0][0].end if self._flights else NEVER
        if self._fetched:
            read = min(read, self._fetched[0][0])
        issue = self._issue_due
        if issue > self._asked_at:
            return min(read, max(issue, self.now()))
        return read

    def advance(self, to: float, *, through: bool = True) -> None:
        """Moves the clock to the second `to` and runs what is due by then; infinity: until nothing
        is left to do, and not further.

        through: also what is due at that very moment. False leaves it for the next call, so that a
        request that comes at that moment comes first. Errors: ValueError for the past.
        """
        while (at := self.next_event()) < to or (through and at == to < NEVER):
            self._run_events(at)
        if to < NEVER:
            self.clock.advance(to)
            self._notify(self.scheduler.expire(to))

    def _run_events(self, now: float) -> None:
        """Reads the oldest batch if it has left the stages, and issues what can be issued."""
        self.clock.advance(now)
        if self._flights and self._flights[0][0].end <= now:
            self._read(now)
        while self._fetched and self._fetched[0][0] <= now:
            self._take_in(heapq.heappop(self._fetched), now)
        expired = self.scheduler.expire(now)
        if expired:
            self._notify(expired)
        self._issue()

    def _take_in(self, fetched: tuple[float, int, int], now: float) -> None:
        """Puts fetched blocks on their pages, if a sequence still waits for them."""
        _, ticket, blocks = fetched
        self._move_blocks(self.scheduler.cache.stores.take())
        self.scheduler.fetches.arrived(ticket, blocks, True, now)

    def _move_blocks(self, stores: PageStores) -> None:
        """Moves blocks to the tiers below, and begins the fetches that were asked for."""
        if self._tiers is None:
            return
        self._tiers.store(stores)
        for fetch in self.scheduler.cache.below.take_fetches():
            blocks, end = self._tiers.fetch(fetch)
            heapq.heappush(self._fetched, (end, fetch.ticket, blocks))

    @property
    def _issue_due(self) -> float:
        """Clock second from which on the next batch may be issued: at once, unless it would wait
        for the stages; where one is issued in part, from which on it is decided what follows its
        last group of layers."""
        step = self.scheduler.partial
        if step is not None:
            return self._pipeline.free[0] - self.scheduler.predictor.early(step.group_seconds)
        if len(self._flights) < self._stages:
            return 0.0
        early = self.scheduler.predictor.early(self._flights[-1][1].seconds)
        return self._pipeline.free[0] - early

    def _issue(self) -> None:
        if not self._started:
            return
        self._asked_at = now = self.clock.now()
        while self._issue_due <= now:
            if self.scheduler.partial is not None:
                self._go_on(now)
                continue
            if len(self._flights) >= self._depth:
                return
            batch = self.scheduler.start(now)
            self._move_blocks(self.scheduler.cache.stores.take() if batch is None else batch.stores)
            if batch is None:
                return
            step = self.scheduler.partial
            if step is None:
                self._issued(batch, self._pipeline.enter(now, batch))
            else:
                self._pipeline.enter_part(now, batch, step.groups, first=True)

    def _go_on(self, now: float) -> None:
        """Issues what follows while some groups of a batch's layers are not issued: another batch
        before them, or the next group."""
        step = self.scheduler.partial
        assert step is not None
        if len(self._flights) < self._depth:
            batch = self.scheduler.interrupt(max(0.0, self._pipeline.free[0] - now), now)
            if batch is not None:
                self._move_blocks(batch.stores)
                self._issued(batch, self._pipeline.enter(now, batch))
                return
        last = self.scheduler.go_on()
        passage = self._pipeline.enter_part(now, step.batch, step.groups, first=False)
        if last:
            self._issued(step.batch, passage)

    def _issued(self, batch: Batch, passage: StagePassage) -> None:
        """Takes in a batch of which all is issued."""
        self._flights.append((passage, batch))
        if self.bus.has_subscribers(StepIssued):
            self.bus.publish(StepIssued(batch, None, self.clock.now()))
        for listener in self.listeners:
            listener.step_issued(batch, passage)

    def _read(self, now: float) -> None:
        passage, batch = self._flights.popleft()
        for listener in self.listeners:
            listener.step_read(batch, now)
        self.scheduler.predictor.seen(batch.seconds, passage.seconds)
        if self.bus.has_subscribers(StepRead):
            self.bus.publish(StepRead(batch, now, passage.seconds, comparable=True))
        results = StepResults(self._sampler.tokens(batch))
        self._notify(self.scheduler.finish(batch, results, now))
        self.adapters.settle()

    # --- requests

    def start(self) -> None:
        self._started = True
        self._issue()

    def submit(self, request: Request, sink: Sink) -> None:
        self.submit_prefilled(request, sink, 0)

    def submit_quiet(self, request: Request, sink: Sink) -> None:
        """Takes a request as `submit` does, whose sink gets only that it was accepted and how it
        ends: no events are made of its progress and its tokens."""
        self._submit(request, sink, 0, quiet=True)

    def submit_prefilled(self, request: Request, sink: Sink, received: int) -> None:
        """Takes a request as `submit` does, with the KV of its first `received` tokens, not all of
        its prompt: these are not computed here."""
        self._submit(request, sink, received)

    def _submit(self, request: Request, sink: Sink, received: int, quiet: bool = False) -> None:
        if self.draining or self._closed:
            raise RequestError("", "the replica takes no requests", "UNAVAILABLE")
        try:
            self._enter(request, sink, 0, received, quiet)
        finally:
            self._issue()

    def _end(self, request_id: str, reason: str, index: int | None) -> bool:
        if request_id not in self.registry:
            return False
        ended = super()._end(request_id, reason, index)
        self._asked_at = -NEVER  # others may have room now
        return ended

    def post(self, command: Callable[[], object]) -> None:
        """Runs a command at once: no step is in progress while the clock stands still."""
        command()

    def overdue(self) -> float | None:
        """Returns None: no step hangs."""
        return None

    def _readings(self) -> dict[str, float]:
        """Returns the values of metric_rows.READ; nothing is compiled in a simulation."""
        return {**dict.fromkeys(READ, 0.0), **super()._readings()}

    def close(self) -> None:
        """Ends what runs or waits with an error of status UNAVAILABLE; nothing happens after."""
        if self._closed:
            return
        self._closed = True
        self.fail(RequestError("", "the replica was closed", "UNAVAILABLE"))
        while self._flights:
            self._read(self.clock.now())


class UnwatchedReplica(VirtualReplica):
    """Virtual replica whose views and metrics show no steps: it saves the time."""

    observed = False


def _info(
    scheduler: Scheduler,
    cache: CacheConfig,
    mesh: MeshConfig,
    lookahead: int,
    name: str,
    shape: ModelConfig,
    platform: str,
) -> ReplicaInfo:
    config = scheduler.config
    fp8 = cache.kv_cache_dtype == "fp8"
    return ReplicaInfo(
        served_name=name,
        model=name,
        vocab=shape.vocab,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=math.prod(shape.page) // 2,
        d_model=shape.d_model,
        kv_bytes_per_token=shape.kv_bytes_per_token(1 if fp8 else 2),
        bos_id=None,
        eos_ids=(),
        max_model_len=scheduler.max_len,
        mesh=mesh,
        dtype="bfloat16",
        kv_dtype="float8_e4m3fn" if fp8 else "bfloat16",
        platform=platform,
        block_size=scheduler.cache.block_size,
        pages_per_lane=scheduler.cache.total // (mesh.kvp * scheduler.cache.needs.per_block),
        max_seqs=config.max_seqs,
        max_queue=config.max_queue,
        chunk_tokens=config.chunk_tokens,
        class_names=config.class_names,
        settings={
            "mesh": dataclasses.asdict(mesh),
            "cache": dataclasses.asdict(cache),
            "scheduler": dataclasses.asdict(config),
            "lookahead": lookahead,
        },
        cache_fingerprint=scheduler.cache.identity.fingerprint,
        cache_dtype=scheduler.cache.identity.dtype,
        cache_layout=scheduler.cache.identity.layout,
        page_windows=tuple(scheduler.cache.windows),
        prefill=prefill_facts(scheduler),
    )
