"""The live replica: one thread that turns requests into steps and steps into events.

A request enters by `submit`, from any thread, and waits in the scheduler. Each step of the loop
takes in what came, starts batches while there is room in flight, writes their commands for the
worker, and reads the tokens of the oldest batch: one step behind with one stage, so that the
devices never wait for the host. A batch that would wait for the devices is started only shortly
before they are predicted to be free: what is decided late serves requests that came late. Events go
to each request's sink, from this thread, once per step. The engine knows tokens, not text, and
touches no device: all that it tells them are commands (`command`), executed by a `Worker`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from jaxserve.api.errors import RequestError
from jaxserve.api.request import Request
from jaxserve.cache.block_events import BlockEvents
from jaxserve.cache.tiers import LowerTiers, TierCounts
from jaxserve.clock import Clock, WallClock
from jaxserve.engine import results
from jaxserve.engine.block_export import TierExporter
from jaxserve.engine.block_mover import Arrival
from jaxserve.engine.command import DeviceError, WorkersLost
from jaxserve.engine.command_builder import CommandBuilder
from jaxserve.engine.executor import CommandExecutor
from jaxserve.engine.results import InFlightBatch
from jaxserve.engine.watchdog import STARTING_ANEW, Watchdog, lost_error, request_error
from jaxserve.observe.journal import Journal
from jaxserve.observe.kv_view import kv_view
from jaxserve.observe.metrics import Metrics
from jaxserve.observe.view import Snapshot
from jaxserve.replica.info import ReplicaInfo
from jaxserve.replica.protocol import Sink
from jaxserve.replica.registry import Registry
from jaxserve.scheduling import Load, Scheduler
from jaxserve.scheduling.batch_reader import Events
from jaxserve.scheduling.events import Rejected, StepFinished, StepIssued, StepRead, StepsLost
from jaxserve.scheduling.sequence import Sequence
from jaxserve.settings.schema import EngineConfig
from jaxserve.store.peers import BlockExporter

TICK = 0.001  # seconds between looks at a step that may end early
# Other threads wait this many seconds for the lock before they look whether the step hangs.
LOCK_WAIT = 1.0
LOCK_WAITS = 10
IDLE_WAIT = 0.5  # seconds between looks at deadlines while nothing runs
log = logging.getLogger(__name__)


def replica_info(config: EngineConfig, worker: CommandExecutor, max_model_len: int) -> ReplicaInfo:
    """What a live replica with these settings and devices is."""
    plan = worker.plan
    model = plan.model
    return ReplicaInfo(
        served_name=(config.source.served_model_name or (config.source.model,))[0],
        other_names=config.source.served_model_name[1:],
        model=model.name,
        vocab=model.vocab,
        layers=model.layers,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        d_model=model.d_model,
        bos_id=model.bos_id,
        eos_ids=model.eos_ids,
        max_model_len=max_model_len,
        mesh=plan.mesh,
        dtype=str(np.dtype(plan.dtype)),
        kv_dtype=str(np.dtype(plan.kv_dtype)),
        platform=worker.platform,
        block_size=plan.block_size,
        pages_per_lane=plan.pages,
        max_seqs=plan.slots,
        max_queue=config.scheduler.max_queue,
        chunk_tokens=config.scheduler.chunk_tokens,
        class_names=tuple(config.scheduler.class_names),
        settings=dataclasses.asdict(config),
        role=config.role,
    )


def _tier_readings(tiers: LowerTiers | None) -> dict[str, float]:
    """See metric_rows.READ."""
    counts = tiers.counts() if tiers is not None else TierCounts()
    return {
        "kv_blocks_stored": counts.stored,
        "kv_blocks_from_host": counts.host_reads,
        "kv_blocks_from_disk": counts.disk_reads,
        "kv_blocks_from_peers": counts.peer_reads,
        "kv_blocks_from_store": counts.shared_reads,
        "kv_blocks_to_store": counts.to_shared,
        "kv_blocks_not_put": counts.shared_dropped,
        "kv_blocks_prefetched": counts.prefetched,
        "kv_blocks_wrong": counts.wrong,
        "kv_blocks_in_host": counts.host_blocks,
        "kv_blocks_on_disk": counts.disk_blocks,
    }


class Engine:
    """See the module. `scheduler` decides, `worker` executes; the engine owns both, and the thread
    between them. Implements `replica.protocol.Replica`."""

    def __init__(
        self,
        config: EngineConfig,
        worker: CommandExecutor,
        scheduler: Scheduler,
        clock: Clock | None = None,
    ):
        self.config = config
        self.worker = worker
        self.scheduler = scheduler
        self.bus = scheduler.bus
        self.clock = clock or WallClock()
        self.alive = True
        self.available = True
        self.info = dataclasses.replace(
            replica_info(config, worker, scheduler.max_len),
            cache_fingerprint=scheduler.cache.fingerprint,
            cache_dtype=scheduler.cache.dtype,
        )
        self._registry = Registry()
        self._builder = CommandBuilder(
            worker.plan,
            scheduler,
            self._registry,
            lambda: worker.uncompiled,
        )
        self._flights: deque[InFlightBatch] = deque()
        self._read_at = -1.0  # clock seconds at which the last batch was read
        self._free_at = 0.0  # clock seconds at which the first stage should be free again
        self._compiles = 0
        self._watchdog = Watchdog(config.hang_timeout)
        self._lock = threading.RLock()
        self._posted: deque[Callable[[], object]] = deque()
        self._wake = threading.Event()
        self._draining = False
        self._closing = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.journal = Journal(config.mesh.spp, self.clock.now())
        self.journal.listen(self.bus)
        self._metrics = self._make_metrics()
        self.bus.subscribe(StepRead, self._correct_predictor)
        self.block_exporter = self._make_exporter()
        worker.on_arrival(lambda arrival: self.post(lambda: self._load(arrival)))

    def _make_exporter(self) -> BlockExporter | None:
        """What offers its blocks to other replicas: where it has host memory for them."""
        tiers = self.worker.lower_tiers
        if tiers is None:
            return None
        return TierExporter(self.scheduler.cache, tiers, self._registry, self.post)

    def _make_metrics(self) -> Metrics:
        config = self.config
        plan = self.worker.plan
        metrics = Metrics(
            plan.slots, config.scheduler.class_names, self._readings, self.worker.members
        )
        metrics.configured(
            block_size=plan.block_size,
            num_gpu_blocks=plan.pages * plan.mesh.kvp,
            cache_dtype=np.dtype(plan.kv_dtype),
            enable_prefix_caching=config.cache.prefix_caching,
            placement=config.cache.placement,
        )
        metrics.listen(self.bus, config.cache.prefix_caching)
        return metrics

    # --- for other threads

    def start(self) -> None:
        """Starts the engine's thread."""
        self._thread.start()

    def now(self) -> float:
        """Seconds on the engine's clock."""
        return self.clock.now()

    def post(self, command: Callable[[], object]) -> None:
        """Runs a command on the engine's thread before its next step; at once where that thread has
        ended. It must not raise.

        Whoever calls `submit` and the others below by way of it never waits for a step that is
        being issued.
        """
        self._posted.append(command)
        self._wake.set()
        if self._ended:
            self._run_posted()

    def _run_posted(self) -> None:
        with contextlib.suppress(IndexError):  # it is empty
            while True:
                self._posted.popleft()()

    def submit(self, request: Request, sink: Sink) -> None:
        """Takes a request; its events go to `sink`, which is called from the engine's thread and
        must not block. A sink that raises hears no more, and its request is cancelled.

        Errors: RequestError for an id in use, a full queue, a request that can never fit or could
        not be in time, or an engine that is drained, closed or broken.
        """
        with self._lock:
            if self._draining or self._closing or not self.alive:
                raise RequestError("", "the engine is not running", "UNAVAILABLE")
            if not self.available:
                raise RequestError("", STARTING_ANEW, "UNAVAILABLE")
            events = self.scheduler.add(request, self.clock.now())
            seed = request.sampling.seed
            self._registry.add(request, sink, random.getrandbits(63) if seed is None else seed)
            self._wake.set()
            self._notify([(request.id, event) for event in events])

    def cancel(self, request_id: str, reason: str = "cancelled") -> bool:
        """Ends a request; its sink hears Finished. False where the id is unknown (it may just have
        ended)."""
        return self._end(request_id, reason, None)

    def stop(self, request_id: str, index: int) -> bool:
        """Ends one completion of a request with the reason 'stop'. False where it has ended."""
        return self._end(request_id, "stop", index)

    def _end(self, request_id: str, reason: str, index: int | None) -> bool:
        with self._bounded_lock():
            if request_id not in self._registry:
                return False
            ends = self.scheduler.cancel(request_id, self.clock.now(), reason, index)
            self._notify(ends)
            self._wake.set()
            return bool(ends)

    @contextlib.contextmanager
    def _bounded_lock(self) -> Iterator[None]:
        """The lock, for any thread. Errors: RequestError, UNAVAILABLE, where a step that hangs or
        is slow to issue keeps it."""
        for _ in range(LOCK_WAITS):
            if self._lock.acquire(timeout=LOCK_WAIT):
                break
            if self.overdue() is not None:
                raise RequestError("", "the devices do not answer", "UNAVAILABLE")
        else:
            raise RequestError("", "a step takes long to be issued", "UNAVAILABLE")
        try:
            yield
        finally:
            self._lock.release()

    def load(self) -> Load:
        """How busy the engine is."""
        with self._bounded_lock():
            return self.scheduler.load()

    def overdue(self) -> float | None:
        """Seconds by which the step that the loop waits for is overdue; None where none is. Takes
        no lock: those that do wait for a step which hangs while it is issued."""
        return self._watchdog.overdue(self.clock.now())

    def flush_cache(self) -> int:
        """Forgets the prefixes that no request uses just now; returns how many pages that frees."""
        with self._bounded_lock():
            return self.scheduler.cache.flush()

    @property
    def block_events(self) -> BlockEvents:
        """Tells which blocks of KV the cache stores and loses."""
        return self.scheduler.cache.events

    @property
    def metrics_registry(self) -> CollectorRegistry:
        """The engine's metrics, for Prometheus."""
        return self._metrics.registry

    def count_rejected(self, reason: str) -> None:
        """Counts a request that was refused before it got here."""
        self.bus.publish(Rejected(reason))

    def _readings(self) -> dict[str, float]:
        """See metric_rows.READ."""
        load = self.load()
        held = load.pages_total - load.pages_free - load.pages_cached
        return {
            "num_requests_running": load.running,
            "num_requests_waiting": load.waiting,
            "kv_cache_usage_perc": held / load.pages_total,
            "queued_prefill_seconds": load.queued_prefill_seconds,
            "predictor_scale": self.scheduler.predictor.scale,
            "num_preemptions": self.scheduler.preemptions,
            **_tier_readings(self.worker.lower_tiers),
            "xla_compiles": self.worker.compiles,
            "xla_recompiles": self.worker.recompiles,
        }

    def view(self, since: int = 0) -> dict[str, Any]:
        """What runs and what ran lately, steps from number `since` on, as plain data for the
        dashboard: see observe.view."""
        with self._bounded_lock():
            snapshot = Snapshot.take(self.journal, self.scheduler, self.clock.now(), since)
        return {
            "model": self.info.model,
            "mesh": str(self.info.mesh),
            "alive": self.alive,
            "workers": self.worker.members(),
            "kv": kv_view(self.worker.lower_tiers, self._metrics.hit_tokens, self.info.block_size),
            **snapshot.shown(),
        }

    def drain(self) -> None:
        """Takes no new requests from now on; those that it has go on."""
        self._draining = True

    def close(self) -> None:
        """Stops the loop. Requests that still run end with an error of status UNAVAILABLE. A step
        that hangs is left behind."""
        if self._closing:
            return
        self._closing = True
        self._wake.set()
        while self._thread.is_alive():
            if self.overdue() is not None:
                self.worker.close()
                return
            self._thread.join(0.1)
        self._fail(RequestError("", "the engine was closed", "UNAVAILABLE"))
        if self.alive:
            with contextlib.suppress(DeviceError):
                self.worker.keep(self.scheduler.cache.stores_at_the_end())
        self.worker.close()

    # --- the loop

    def _run(self) -> None:
        try:
            while not self._closing:
                self._wake.clear()
                if not self._safe_step():
                    self._wake.wait(timeout=TICK if self.scheduler.waiting else IDLE_WAIT)
        except Exception:
            log.exception("the engine's loop failed")
            self.alive = False
            self._fail(RequestError("", "the engine failed; see its log", "INTERNAL"))
        finally:
            self._ended = True
            self._run_posted()

    def _safe_step(self) -> bool:
        """A step. Where it fails on the devices, its requests end with an error and the others
        begin anew, unless that goes on."""
        try:
            return self.step()
        except DeviceError as error:
            batch = self._watchdog.failed()
            if batch is None:
                raise
            log.exception("step %d failed", batch.number)
            numbers = set(batch.seq.tolist())
            with self._lock:
                self.worker.execute(self._builder.reset())
                self._begin_anew(lambda sequence: sequence.number in numbers, request_error(error))
        except WorkersLost as lost:
            self._watchdog.clear()
            with self._lock:
                self.available = False
                self._begin_anew(self._ended_by_loss, lost_error(lost))
            self._wait_for_workers()
        return True

    def _begin_anew(self, ends: Callable[[Sequence], bool], error: RequestError) -> None:
        """What was on the devices is lost: steps that failed had it. Sequences that `ends` names
        end with the error, the others begin anew. The caller holds the lock."""
        self._flights.clear()
        self.scheduler.cache.recheck_lower_tiers()
        self.bus.publish(StepsLost())
        self._free_at = 0.0
        self._notify(self.scheduler.reset(ends, self.clock.now(), error))

    def _ended_by_loss(self, sequence: Sequence) -> bool:
        """Whether a request ends when workers are lost: see the setting `replay`."""
        if self.config.replay == "unsent":
            return self.scheduler.requests[sequence.id].had_token
        return self.config.replay == "none"

    def _wait_for_workers(self) -> None:
        """Until there are devices to go on with; cancellations and deadlines are heeded."""
        while not self._closing:
            if self.worker.formed(IDLE_WAIT):
                with contextlib.suppress(WorkersLost):
                    self.worker.execute(self._builder.reset())
                    self.available = True
                    return
            with self._lock:
                self._run_posted()
                self._notify(self.scheduler.expire(self.clock.now()))

    def step(self) -> bool:
        """Issues what can be issued and reads at most one batch. False where there was nothing to
        do."""
        with self._lock:
            self._run_posted()
            self.scheduler.cache.tell_of_lower_tiers()
            self.worker.check()
            now = self.clock.now()
            self._notify(self.scheduler.expire(now))
            pause = self._pause(now)
            issued = not pause and self._has_room and self._start_batch(now)
        if issued and len(self._flights) < self._depth:
            return True
        if pause and not self.worker.ready():
            time.sleep(min(pause, TICK))
            return True
        if self._flights:
            self._read(self._flights.popleft())
            return True
        return False

    def _pause(self, now: float) -> float:
        """Seconds until the next batch should be started; 0 where a stage waits for it, or it for a
        token."""
        full = len(self._flights) >= self._depth
        if self._samples_later or full or len(self._flights) < self.config.mesh.spp:
            return 0.0
        early = self.scheduler.predictor.early(self._flights[-1].batch.seconds)
        return max(0.0, self._free_at - early - now)

    @property
    def _depth(self) -> int:
        """Batches in flight: one for each stage, and those issued ahead."""
        return self.config.mesh.spp + self.config.lookahead

    @property
    def _has_room(self) -> bool:
        return not self._samples_later and len(self._flights) < self._depth

    @property
    def _samples_later(self) -> bool:
        """Whether the newest batch is still to be sampled: nothing is issued behind it."""
        return bool(self._flights) and self._flights[-1].sample_later

    # --- issuing

    def _start_batch(self, now: float) -> bool:
        """Has the scheduler decide the next batch, and issues it. False where there is none."""
        began = time.perf_counter()
        batch = self.scheduler.start(now)
        for fetch in self.scheduler.cache.take_fetches():
            self.worker.fetch(fetch)
        if batch is None:
            self._flush_stores()
            return False
        self._watchdog.watch(batch, now)
        decided = time.perf_counter()
        command, flight = self._builder.step(batch)
        built = time.perf_counter()
        # devices of the CPU may compute while a command is issued
        flight.issued = self.clock.now()
        self.worker.execute(command)
        self._flights.append(flight)
        if flight.sample_later:
            self._sample_with_masks(flight)
        self._watchdog.clear()
        shape = flight.arrays.shape
        self.bus.publish(
            StepIssued(
                batch,
                command,
                flight.issued,
                exchange=shape.exchange if shape.spread else "",
                schedule=decided - began,
                build=built - decided,
                dispatch=time.perf_counter() - built,
            )
        )
        self._free_at = max(now, self._free_at) + batch.seconds
        return True

    def _flush_stores(self) -> None:
        """Has pages read that somebody waits for, while no batch comes that would do it."""
        if self.scheduler.cache.stores:
            self.worker.execute(self._builder.stores(self.scheduler.cache.take_stores()))

    def _load(self, arrival: Arrival) -> None:
        """Has blocks that were fetched written to their pages, if somebody waits for them still."""
        if self._closing or not self.scheduler.fetches.awaited(arrival.ticket):
            self.worker.drop(arrival)
            return
        stores = self.scheduler.cache.take_stores()
        self.worker.execute(self._builder.load(arrival.ticket, arrival.piece, stores))
        self.scheduler.fetches.arrived(
            arrival.ticket, arrival.blocks, arrival.last, self.clock.now()
        )

    def _sample_with_masks(self, flight: InFlightBatch) -> None:
        """Samples the newest batch, unless a guide has to hear first of a token that was not
        read."""
        unread = [other.batch for other in self._flights if other is not flight]
        command, ends = self._builder.masked_sampling(flight, unread, self.clock.now())
        self._notify(ends)
        if command is not None:
            self.worker.execute(command)

    # --- reading

    def _read(self, flight: InFlightBatch) -> None:
        """Waits for a batch and tells what came of it."""
        batch = flight.batch
        self._watchdog.watch(batch, self.clock.now())
        result = self.worker.wait()
        assert result.number == batch.number, f"step {result.number} came for {batch.number}"
        tokens, logprobs = results.tokens_of(self.scheduler, flight, result)
        scores = results.scores_of(self.scheduler, flight, result)
        embeddings = results.embeddings_of(flight, result)
        self._watchdog.success()
        self._publish_read(flight)
        # those that have not left the first stage
        behind = list(self._flights)[self.config.mesh.spp - 1 :]
        self._free_at = self._read_at + sum(other.batch.seconds for other in behind)
        with self._lock:
            now = self.clock.now()
            began = time.perf_counter()
            events = self.scheduler.finish(batch, tokens, now, logprobs, scores, embeddings)
            finished = time.perf_counter()
            self._notify(events)
            notified = time.perf_counter()
            self.bus.publish(StepFinished(batch, finished - began, notified - finished))
            if self._samples_later:
                self._watchdog.watch(self._flights[-1].batch, now)
                self._sample_with_masks(self._flights[-1])
                self._watchdog.clear()

    def _publish_read(self, flight: InFlightBatch) -> None:
        """Tells how long a step took: since it was issued, or since the one before it left the
        stages."""
        now = self.clock.now()
        before = max(self._read_at, flight.issued)
        compiles = self._compiles
        self._compiles = self.worker.compiles
        self._read_at = now
        one_stage = self.config.mesh.spp == 1
        comparable = compiles == self._compiles and (one_stage or before > flight.issued)
        with self._lock:
            self.bus.publish(StepRead(flight.batch, now, now - before, comparable))

    def _correct_predictor(self, step: StepRead) -> None:
        if step.comparable:
            self.scheduler.predictor.seen(step.batch.seconds, step.seconds)

    def _notify(self, events: Events) -> None:
        """Tells events to the sinks of their requests; requests whose sinks raise are cancelled."""
        for request_id in self._registry.notify(events):
            self._end(request_id, "cancelled", None)

    def _fail(self, error: RequestError) -> None:
        """Ends all requests with an error."""
        with self._lock:
            now = self.clock.now()
            for request_id in self._registry.ids():
                self._notify(self.scheduler.cancel(request_id, now, "error", error=error))
