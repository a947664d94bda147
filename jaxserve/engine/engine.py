"""The live replica: one thread that turns requests into steps and steps into events.

A request enters by `submit`, from any thread, and waits in the scheduler. Each step of the loop
takes in what came, starts batches while there is room in flight, and reads the tokens of the oldest
batch: one step behind with one stage, so that the devices never wait for the host. A batch that
would wait for the devices is started only shortly before they are predicted to be free. Events go
to each request's sink, from this thread, once per step. The engine knows tokens, not text, and
touches no device: `Steps` writes commands, which a `Worker` executes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from jaxserve.api.errors import RequestError
from jaxserve.api.request import Request
from jaxserve.cache.tiers import Fetched
from jaxserve.clock import Clock, WallClock
from jaxserve.engine.block_export import BlockWishes
from jaxserve.engine.block_files import TierFiles
from jaxserve.engine.command import DeviceError, WorkersLost
from jaxserve.engine.description import replica_info, tier_readings, transfer_readings
from jaxserve.engine.device_drafter import DeviceDrafter, WeightsWithDraft
from jaxserve.engine.executor import CommandExecutor
from jaxserve.engine.fetched_pieces import Arrival
from jaxserve.engine.profiling.repair import ProfileRepair, ProfileTrust
from jaxserve.engine.steps import Steps
from jaxserve.engine.watchdog import RESTARTING, lost_error, request_error
from jaxserve.engine.weight_loop import WeightLoop
from jaxserve.observe.kv_view import kv_view
from jaxserve.observe.view import Snapshot
from jaxserve.replica.core import ReplicaCore
from jaxserve.replica.kv_pool import KvPool
from jaxserve.replica.protocol import Sink
from jaxserve.replica.weights import LocalWeights
from jaxserve.scheduling import Load, Scheduler
from jaxserve.scheduling.prefill_facts import prefill_facts
from jaxserve.scheduling.sequence import Sequence
from jaxserve.settings.schema import EngineConfig
from jaxserve.store.peers import BlockExporter, PartedExporter
from jaxserve.store.tiered import TieredBlocks

T = TypeVar("T")

TICK = 0.001  # seconds between looks at a step that may end early
# Other threads wait this many seconds for the lock before they look whether the step hangs.
LOCK_WAIT = 1.0
LOCK_WAITS = 10
IDLE_WAIT = 0.5  # seconds between looks at deadlines while nothing runs
log = logging.getLogger(__name__)


class Engine(ReplicaCore):
    """The loop over a scheduler, which decides, and a worker, which executes; the engine owns both,
    and the draft model, if there is one. Implements `replica.protocol.Replica`."""

    def __init__(
        self,
        config: EngineConfig,
        worker: CommandExecutor,
        scheduler: Scheduler,
        clock: Clock | None = None,
        draft_model: DeviceDrafter | None = None,
    ):
        self.config = config
        self.worker = worker
        self.draft_model = draft_model
        self._lock = threading.RLock()
        info = replica_info(config, worker, scheduler)
        super().__init__(scheduler, info, config.cache, clock or WallClock(), worker.members)
        self._serve_adapters(worker.adapters, config.adapters)
        self.steps = Steps(config, worker, scheduler, self.registry, self.now, self._notify)
        loop = WeightLoop(
            scheduler, self.steps, self._patiently, self.now, self._notify, self._weights_changed
        )
        weights = worker.weights
        if draft_model is not None:
            draft_model.follow(self.registry, scheduler, worker)
            scheduler.propose_by(draft_model)
            weights = WeightsWithDraft(weights, draft_model)
        self.weights: LocalWeights = LocalWeights(scheduler, weights, loop)
        self.block_exporter: BlockExporter | PartedExporter | None = None
        if worker.lower_tiers is not None:
            self.block_exporter = worker.exporter(
                BlockWishes(scheduler.cache, worker.lower_tiers, self.registry, self.post)
            )
        self.trust: ProfileTrust | None = None
        self._posted: deque[Callable[[], object]] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        worker.on_arrival(lambda arrival: self.post(lambda: self._load(arrival)))

    # --- for other threads

    def start(self) -> None:
        """Starts the engine's thread."""
        self._thread.start()

    def post(self, command: Callable[[], object]) -> None:
        """Runs a command on the engine's thread before its next step; at once where that thread has
        ended. It must not raise. A `submit` that is posted never waits for a step that is being
        issued."""
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
        must not block. A sink that raises is not called again, and its request is cancelled.

        Errors: RequestError for an id in use, a full queue, a request that can never fit or could
        not be in time, or an engine that is drained, closed or broken.
        """
        with self._lock:
            if self.draining or self._closing or not self.alive:
                raise RequestError("", "the engine is not running", "UNAVAILABLE")
            if not self.available:
                raise RequestError("", RESTARTING, "UNAVAILABLE")
            seed = request.sampling.seed
            if seed is None:
                seed = random.getrandbits(63)
            self._enter(request, sink, seed)
            self._wake.set()

    def _end(self, request_id: str, reason: str, index: int | None) -> bool:
        with self._bounded_lock():
            ended = super()._end(request_id, reason, index)
            self._wake.set()
            return ended

    @contextlib.contextmanager
    def _bounded_lock(self) -> Iterator[None]:
        """Takes the lock, on any thread. Errors: RequestError, UNAVAILABLE, where a step that hangs
        or is slow to issue keeps it."""
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

    @functools.cached_property
    def kv_pool(self) -> KvPool:
        """The cached blocks, as operators ask for them; as files too with host memory."""
        exporter, tiers = self.block_exporter, self.worker.lower_tiers
        if not isinstance(tiers, TieredBlocks):  # other processes have the bytes
            return super().kv_pool
        assert exporter is not None and not isinstance(exporter, PartedExporter)
        return TierFiles(self.scheduler.cache, self._exclusively, self.now, exporter, tiers)

    def _exclusively(self, work: Callable[[], T]) -> T:
        with self._bounded_lock():
            return work()

    def _patiently(self, work: Callable[[], T]) -> T:
        """Runs work as `_exclusively` does, however long a step takes to be issued. Errors:
        RequestError, UNAVAILABLE, where one hangs, or none will be issued any more."""
        while not self._lock.acquire(timeout=LOCK_WAIT):
            if self.overdue() is not None:
                raise RequestError("", "the devices do not answer", "UNAVAILABLE")
        try:
            if self._closing or not self.alive:
                raise RequestError("", "the engine is not running", "UNAVAILABLE")
            return work()
        finally:
            self._lock.release()
            self._wake.set()

    def _weights_changed(self) -> None:
        fingerprint = self.scheduler.cache.identity.fingerprint
        self.info = dataclasses.replace(self.info, cache_fingerprint=fingerprint)

    @property
    def doubt(self) -> str:
        """The reason why predicted times cannot be trusted, for people; "" where they can, or where
        none are predicted."""
        return "" if self.trust is None else self.trust.doubt

    def kv_fetched(self) -> list[Fetched]:
        """Counts of KV that came from other replicas; see `store.peers.FetchesBlocks`."""
        tiers = self.worker.lower_tiers
        return [] if tiers is None else tiers.fetched()

    def load(self) -> Load:
        with self._bounded_lock():
            return super().load()

    def snapshot(self, since: int) -> Snapshot:
        with self._bounded_lock():
            return super().snapshot(since)

    def flush_cache(self) -> int:
        with self._bounded_lock():
            return super().flush_cache()

    def fail(self, error: RequestError) -> None:
        with self._lock:
            super().fail(error)

    def overdue(self) -> float | None:
        """Seconds by which the step that the loop waits for is overdue; None where none is. Takes
        no lock, which a step that hangs while it is issued keeps."""
        return self.steps.watchdog.overdue(self.clock.now())

    def _readings(self) -> dict[str, float]:
        return {
            **super()._readings(),
            **tier_readings(self.worker.lower_tiers),
            "predictions_doubtful": float(bool(self.doubt)),
            "draft_model_seconds": 0.0 if self.draft_model is None else self.draft_model.spent,
            "xla_compiles": self.worker.compiles,
            "xla_recompiles": self.worker.recompiles,
        }

    def _transfers(self) -> dict[tuple[str, str], dict[str, float]]:
        return transfer_readings(self.worker.lower_tiers)

    def view(self, since: int = 0) -> dict[str, Any]:
        """Describes what runs and what ran lately, steps from number `since` on, as plain data for
        the dashboard: see observe.view."""
        return {
            **super().view(since),
            "doubt": self.doubt,
            "workers": self.worker.members(),
            "kv": kv_view(self.worker.lower_tiers, self.metrics.hit_tokens, self.info.block_size),
        }

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
        self.fail(RequestError("", "the engine was closed", "UNAVAILABLE"))
        if self.alive:
            with contextlib.suppress(DeviceError):
                self.worker.keep(self.scheduler.cache.below.stores_at_the_end())
        self.worker.close()
        if self.draft_model is not None:
            self.draft_model.close()

    # --- the loop

    def _run(self) -> None:
        try:
            while not self._closing:
                self._wake.clear()
                if not self._safe_step() and not self.measure_again():
                    waits = self.scheduler.slots.waiting and not self.weights.stopped
                    self._wake.wait(timeout=TICK if waits else IDLE_WAIT)
        except Exception:
            log.exception("the engine's loop failed")
            self.alive = False
            self.fail(RequestError("", "the engine failed; see its log", "INTERNAL"))
        finally:
            self._ended = True
            self._run_posted()

    def _safe_step(self) -> bool:
        """Runs a step. Where it fails on the devices, its requests end with an error and the others
        begin again, unless that keeps happening."""
        try:
            return self.step()
        except DeviceError as error:
            batch = self.steps.watchdog.failed()
            if batch is None:
                raise
            log.exception("step %d failed", batch.number)
            numbers = set(batch.seq.tolist())
            with self._lock:
                self.steps.reset_devices()
                self.steps.lose(lambda sequence: sequence.number in numbers, request_error(error))
        except WorkersLost as lost:
            self.steps.watchdog.clear()
            with self._lock:
                self.available = False
                self.steps.lose(self._ended_by_loss, lost_error(lost))
            self._wait_for_workers()
        return True

    def measure_again(self) -> bool:
        """Measures a step, while there are no requests, where the profile is in doubt. False where
        there was nothing to measure."""
        if not isinstance(self.trust, ProfileRepair):
            return False
        with self._lock:
            flying = len(self.steps.in_flight) or self.steps.in_flight.partial is not None
            busy = flying or self.scheduler.sequences or self.scheduler.cache.stores
            if busy or self._posted or self._closing or self.weights.stopped:
                return False
            if self.config.compile_all and self.worker.uncompiled:
                return False
            costs = self.scheduler.predictor.costs
            try:
                worked = self.trust.work()
            except DeviceError:
                log.exception("steps could not be measured again")
                self.trust.give_up()
                self.steps.reset_devices()
                self.steps.lose(lambda sequence: False, RequestError("", "", "INTERNAL"))
                return True
            if self.scheduler.predictor.costs is not costs:
                self.info = dataclasses.replace(self.info, prefill=prefill_facts(self.scheduler))
            return worked

    def _ended_by_loss(self, sequence: Sequence) -> bool:
        """Returns whether a request ends when workers are lost: see the setting `replay`."""
        if self.config.replay == "unsent":
            return self.scheduler.requests.entries[sequence.id].had_token
        return self.config.replay == "none"

    def _wait_for_workers(self) -> None:
        """Waits until there are devices again; meanwhile requests can be cancelled, and end at
        their deadlines."""
        while not self._closing:
            if self.worker.formed(IDLE_WAIT):
                with contextlib.suppress(WorkersLost):
                    self.steps.reset_devices()
                    with self._lock:
                        self._end_without_adapters()
                    self.available = True
                    return
            with self._lock:
                self._run_posted()
                self._notify(self.scheduler.expire(self.clock.now()))

    def _end_without_adapters(self) -> None:
        """Ends the requests whose adapters new workers do not have, or could not be read again."""
        lost = self.adapters.withdraw_lost()
        if not lost:
            return
        error = RequestError("model", "its adapter could not be read again", "UNAVAILABLE")
        requests = [entry.request for entry in self.scheduler.requests.entries.values()]
        for request in requests:
            if request.adapter in lost:
                self._notify(self.scheduler.cancel(request.id, self.now(), "error", error=error))
        self.adapters.settle()

    def step(self) -> bool:
        """Issues what can be issued and reads at most one batch. False where there was nothing to
        do."""
        in_flight = self.steps.in_flight
        with self._lock:
            self._run_posted()
            self.scheduler.cache.below.tell()
            self.worker.check()
            now = self.clock.now()
            self._notify(self.scheduler.expire(now))
            self._end_without_adapters()
            pause = self.steps.pause(now)
            if in_flight.partial is not None:
                issued = not pause
                if issued:
                    self.steps.go_on(now)
            else:
                may = not pause and in_flight.has_room and not self.weights.stopped
                issued = may and self.steps.start_batch(now)
                self.adapters.read_missing()
        if issued and (in_flight.partial is not None or not in_flight.full):
            return True
        if pause and not self.worker.ready():
            time.sleep(min(pause, TICK))
            return True
        if not len(in_flight):
            return False
        outcome = self.steps.wait()
        with self._lock:
            self.steps.finish(outcome)
            self.adapters.settle()
        return True

    def _load(self, arrival: Arrival) -> None:
        with contextlib.suppress(WorkersLost):  # the next step notices
            if self._closing:
                self.steps.drop(arrival)
            else:
                self.steps.load(arrival)
