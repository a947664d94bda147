"""A replica without devices: the scheduler and the cache that serve, steps that take as long as the
predictor says, and a clock that goes on when it is told to.

Batches are issued as the live engine issues them, up to `lookahead` ahead of the stages and no
earlier than need be, so what is decided when is the same. A stage runs one batch at a time; the
next one enters as soon as the one before has left it (Medha, 3.3). Sampled tokens are all 0.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from prometheus_client import CollectorRegistry

from jaxserve.api.batch import Batch
from jaxserve.api.errors import RequestError
from jaxserve.api.events import Event
from jaxserve.api.request import Request
from jaxserve.cache.block_events import BlockEvents
from jaxserve.checkpoint.model import ModelConfig
from jaxserve.clock import VirtualClock
from jaxserve.costs.predictor import Predictor
from jaxserve.observe.journal import Journal
from jaxserve.observe.metrics import READ, Metrics
from jaxserve.observe.view import Snapshot
from jaxserve.replica.info import ReplicaInfo
from jaxserve.replica.protocol import Sink
from jaxserve.replica.registry import Registry
from jaxserve.scheduling import Load, Scheduler
from jaxserve.scheduling.events import Rejected, StepIssued, StepRead
from jaxserve.settings.schema import CacheConfig, MeshConfig

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


class StepListener(Protocol):
    """Hears of a replica's steps."""

    def step_issued(self, batch: Batch, start: float, end: float) -> None:
        """A batch enters the first stage at clock second `start` and leaves the last at `end`."""

    def step_read(self, batch: Batch, now: float) -> None:
        """The tokens of the oldest batch in flight were read; the scheduler has not heard yet."""


class Pipeline:
    """Pipeline stages: when each is free again, and when the last token of each slot left the last
    one."""

    def __init__(self, predictor: Predictor, stages: int, slots: int):
        self.predictor = predictor
        self.free = [0.0] * stages
        self._left = np.zeros(slots)

    def enter(self, now: float, batch: Batch) -> tuple[float, float]:
        """Puts a batch into the stages; returns when it enters the first and leaves the last."""
        tokens = int(batch.length.sum())
        hop = self.predictor.hop(tokens)
        head = self.predictor.head(int(np.bincount(batch.lane[batch.is_decode]).max(initial=0)))
        began = at = max(
            now, self.free[0], float(self._left[batch.slot[batch.is_decode]].max(initial=0.0))
        )
        for stage, free in enumerate(self.free):
            last = stage + 1 == len(self.free)
            self.free[stage] = at = max(at, free) + batch.seconds - (0.0 if last else head)
            at += 0.0 if last else hop
        self._left[batch.slot[batch.sample]] = at
        return began, at


class VirtualReplica:
    """Runs requests on a scheduler in virtual time: see `Replica` and the module.

    Nothing happens by itself: `advance` moves the clock and runs what is due by then. All calls
    come from one thread, the one that advances the clock, and sinks are called within them.

    cache: what the scheduler's cache was made with. lookahead: batches issued ahead of the stages.
    name, shape, platform: for `info`, the model and the kind of device that `scheduler` has the
    costs of.
    """

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
    ):
        self.scheduler = scheduler
        self.clock = VirtualClock()
        self.info = _info(scheduler, cache, mesh, lookahead, name, shape, platform)
        self.alive = True
        self.available = True
        self.listeners: list[StepListener] = []
        config = scheduler.config
        self._depth = mesh.spp + lookahead  # batches in flight
        self._stages = mesh.spp
        self._pipeline = Pipeline(scheduler.predictor, mesh.spp, config.max_seqs)
        self._flights: deque[tuple[float, Batch]] = deque()  # when each leaves the last stage
        # clock seconds at which the scheduler was last asked for batches and could have had news
        self._asked_at = self.clock.now()
        self._started = self._draining = self._closed = False
        self._journal = Journal(mesh.spp, self.clock.now())
        self._metrics = Metrics(config.max_seqs, config.class_names, self._readings)
        self._metrics.configured(
            block_size=self.info.block_size,
            num_gpu_blocks=scheduler.cache.total,
            cache_dtype=self.info.kv_dtype,
            enable_prefix_caching=cache.prefix_caching,
            placement=cache.placement,
        )
        self.bus = scheduler.bus
        self._journal.listen(self.bus)
        self._metrics.listen(self.bus, cache.prefix_caching)
        self._registry = Registry()

    # --- time

    def now(self) -> float:
        return self.clock.now()

    def next_event(self) -> float:
        """Clock second at which something happens next; infinity where nothing will."""
        if not self._started:
            return NEVER
        read = self._flights[0][0] if self._flights else NEVER
        issue = self._issue_due
        return min(read, max(issue, self.now()) if issue > self._asked_at else NEVER)

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
            self._send(self.scheduler.expire(to))

    def _run_events(self, now: float) -> None:
        """Reads the oldest batch if it has left the stages, and issues what can be issued."""
        self.clock.advance(now)
        if self._flights and self._flights[0][0] <= now:
            self._read(now)
        self._send(self.scheduler.expire(now))
        self._issue()

    @property
    def _issue_due(self) -> float:
        """Clock second from which on the next batch may be issued: at once, unless it would wait
        for the stages."""
        if len(self._flights) < self._stages:
            return 0.0
        early = self.scheduler.predictor.early(self._flights[-1][1].seconds)
        return self._pipeline.free[0] - early

    def _issue(self) -> None:
        if not self._started:
            return
        self._asked_at = now = self.clock.now()
        while len(self._flights) < self._depth and self._issue_due <= now:
            batch = self.scheduler.start(now)
            if batch is None:
                return
            start, end = self._pipeline.enter(now, batch)
            self._flights.append((end, batch))
            self.bus.publish(StepIssued(batch, None, now))
            for listener in self.listeners:
                listener.step_issued(batch, start, end)

    def _read(self, now: float) -> None:
        _, batch = self._flights.popleft()
        for listener in self.listeners:
            listener.step_read(batch, now)
        self.bus.publish(StepRead(batch, now, batch.seconds, comparable=True))
        self._send(self.scheduler.finish(batch, np.zeros(len(batch.slot), np.int32), now))

    # --- requests

    def start(self) -> None:
        self._started = True
        self._issue()

    def submit(self, request: Request, sink: Sink) -> None:
        self.submit_prefilled(request, sink, 0)

    def submit_prefilled(self, request: Request, sink: Sink, received: int) -> None:
        """Takes a request as `submit` does, with the KV of its first `received` tokens, not all of
        its prompt: these are not computed here."""
        if self._draining or self._closed:
            raise RequestError("", "the replica takes no requests", "UNAVAILABLE")
        try:
            events = self.scheduler.add(request, self.clock.now(), received)
            self._registry.add(request, sink, seed=0)
            self._send([(request.id, event) for event in events])
        finally:
            self._issue()

    def cancel(self, request_id: str, reason: str = "cancelled") -> bool:
        return self._end(request_id, reason, None)

    def stop(self, request_id: str, index: int) -> bool:
        return self._end(request_id, "stop", index)

    def _end(self, request_id: str, reason: str, index: int | None) -> bool:
        if request_id not in self._registry:
            return False
        events = self.scheduler.cancel(request_id, self.clock.now(), reason, index)
        self._send(events)
        self._asked_at = -NEVER  # others may have room now
        return bool(events)

    def _send(self, events: list[tuple[str, Event]]) -> None:
        if not events:
            return
        for request_id in self._registry.notify(events):
            self._end(request_id, "cancelled", None)

    def post(self, command: Callable[[], object]) -> None:
        """Runs a command at once: no step is in progress while the clock stands still."""
        command()

    # --- questions

    def load(self) -> Load:
        return self.scheduler.load()

    def overdue(self) -> float | None:
        return None

    def view(self, since: int = 0) -> dict[str, Any]:
        snapshot = Snapshot.take(self._journal, self.scheduler, self.clock.now(), since)
        return {
            "model": self.info.model,
            "mesh": str(self.info.mesh),
            "alive": self.alive,
            **snapshot.shown(),
        }

    def count_rejected(self, reason: str) -> None:
        self.bus.publish(Rejected(reason))

    @property
    def metrics_registry(self) -> CollectorRegistry:
        return self._metrics.registry

    def _readings(self) -> Mapping[str, float]:
        """The values of metrics.READ; nothing is compiled here."""
        load = self.load()
        in_use = load.pages_total - load.pages_free - load.pages_cached
        return {
            **dict.fromkeys(READ, 0.0),
            "num_requests_running": load.running,
            "num_requests_waiting": load.waiting,
            "kv_cache_usage_perc": in_use / load.pages_total,
            "queued_prefill_seconds": load.queued_prefill_seconds,
            "predictor_scale": self.scheduler.predictor.scale,
            "num_preemptions": self.scheduler.preemptions,
        }

    @property
    def block_events(self) -> BlockEvents:
        return self.scheduler.cache.events

    def flush_cache(self) -> int:
        return self.scheduler.cache.flush()

    # --- the end

    def drain(self) -> None:
        self._draining = True

    def close(self) -> None:
        """Ends what runs or waits with an error of status UNAVAILABLE; nothing happens after."""
        if self._closed:
            return
        self._closed = True
        now = self.clock.now()
        error = RequestError("", "the replica was closed", "UNAVAILABLE")
        for request_id in self._registry.ids():
            self._send(self.scheduler.cancel(request_id, now, "error", error=error))
        while self._flights:
            self._read(now)


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
    return ReplicaInfo(
        served_name=name,
        model=name,
        vocab=shape.vocab,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        d_model=shape.d_model,
        bos_id=None,
        eos_ids=(),
        max_model_len=scheduler.max_len,
        mesh=mesh,
        dtype="bfloat16",
        kv_dtype="float8_e4m3fn" if cache.kv_cache_dtype == "fp8" else "bfloat16",
        platform=platform,
        block_size=scheduler.cache.block_size,
        pages_per_lane=scheduler.cache.total // mesh.kvp,
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
        cache_fingerprint=scheduler.cache.fingerprint,
        cache_dtype=scheduler.cache.dtype,
    )
