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
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry

from jaxserve.api.errors import RequestError
from jaxserve.api.request import Request
from jaxserve.cache.block_events import BlockEvents
from jaxserve.clock import Clock, WallClock
from jaxserve.engine.block_export import TierExporter
from jaxserve.engine.block_mover import Arrival
from jaxserve.engine.command import DeviceError, WorkersLost
from jaxserve.engine.description import replica_info, replica_metrics
from jaxserve.engine.executor import CommandExecutor
from jaxserve.engine.steps import Steps
from jaxserve.engine.watchdog import RESTARTING, lost_error, request_error
from jaxserve.observe.journal import Journal
from jaxserve.observe.kv_view import kv_view
from jaxserve.observe.view import Snapshot
from jaxserve.replica.protocol import Sink
from jaxserve.replica.registry import Registry
from jaxserve.scheduling import Load, Scheduler
from jaxserve.scheduling.events import Rejected
from jaxserve.scheduling.batch_reader import Events
from jaxserve.scheduling.sequence import Sequence
from jaxserve.settings.schema import EngineConfig
from jaxserve.store.peers import BlockExporter

TICK = 0.001  # seconds between looks at a step that may end early
# Other threads wait this many seconds for the lock before they look whether the step hangs.
LOCK_WAIT = 1.0
LOCK_WAITS = 10
IDLE_WAIT = 0.5  # seconds between looks at deadlines while nothing runs
log = logging.getLogger(__name__)


class Engine:
    """The loop over a scheduler, which decides, and a worker, which executes; the engine owns both.
    Implements `replica.protocol.Replica`."""

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
        self.info = replica_info(config, worker, scheduler)
        self.registry = Registry()
        self._lock = threading.RLock()
        self._posted: deque[Callable[[], object]] = deque()
        self._wake = threading.Event()
        self._draining = False
        self._closing = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.journal = Journal(config.mesh.spp, self.clock.now())
        self.journal.listen(self.bus)
        self.metrics = replica_metrics(config, worker, scheduler, self.load)
        self.steps = Steps(config, worker, scheduler, self.registry, self.now, self._notify)
        self.block_exporter: BlockExporter | None = None
        if worker.lower_tiers is not None:
            self.block_exporter = TierExporter(
                scheduler.cache, worker.lower_tiers, self.registry, self.post
            )
        worker.on_arrival(lambda arrival: self.post(lambda: self._load(arrival)))

    # --- for other threads

    def start(self) -> None:
        """Starts the engine's thread."""
        self._thread.start()

    def now(self) -> float:
        """Seconds on the engine's clock."""
        return self.clock.now()

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
            if self._draining or self._closing or not self.alive:
                raise RequestError("", "the engine is not running", "UNAVAILABLE")
            if not self.available:
                raise RequestError("", RESTARTING, "UNAVAILABLE")
            events = self.scheduler.add(request, self.clock.now())
            seed = request.sampling.seed
            self.registry.add(request, sink, random.getrandbits(63) if seed is None else seed)
            self._wake.set()
            self._notify([(request.id, event) for event in events])

    def cancel(self, request_id: str, reason: str = "cancelled") -> bool:
        """Ends a request; its sink gets Finished. False where the id is unknown (it may just have
        ended)."""
        return self._end(request_id, reason, None)

    def stop(self, request_id: str, index: int) -> bool:
        """Ends one completion of a request with the reason 'stop'. False where it has ended."""
        return self._end(request_id, "stop", index)

    def _end(self, request_id: str, reason: str, index: int | None) -> bool:
        with self._bounded_lock():
            if request_id not in self.registry:
                return False
            ends = self.scheduler.cancel(request_id, self.clock.now(), reason, index)
            self._notify(ends)
            self._wake.set()
            return bool(ends)

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

    def load(self) -> Load:
        """Returns how busy the engine is."""
        with self._bounded_lock():
            return self.scheduler.load()

    def overdue(self) -> float | None:
        """Seconds by which the step that the loop waits for is overdue; None where none is. Takes
        no lock, which a step that hangs while it is issued keeps."""
        return self.steps.watchdog.overdue(self.clock.now())

    def flush_cache(self) -> int:
        """Forgets the prefixes that no request uses now; returns how many pages that frees."""
        with self._bounded_lock():
            return self.scheduler.cache.flush()

    @property
    def block_events(self) -> BlockEvents:
        """Publishes which blocks of KV the cache stores and loses."""
        return self.scheduler.cache.events

    @property
    def metrics_registry(self) -> CollectorRegistry:
        """The engine's metrics, for Prometheus."""
        return self.metrics.registry

    def count_rejected(self, reason: str) -> None:
        """Counts a request that was refused before it got here."""
        self.bus.publish(Rejected(reason))

    def view(self, since: int = 0) -> dict[str, Any]:
        """Describes what runs and what ran lately, steps from number `since` on, as plain data for
        the dashboard: see observe.view."""
        with self._bounded_lock():
            snapshot = Snapshot.take(self.journal, self.scheduler, self.clock.now(), since)
        return {
            "model": self.info.model,
            "mesh": str(self.info.mesh),
            "alive": self.alive,
            "workers": self.worker.members(),
            "kv": kv_view(self.worker.lower_tiers, self.metrics.hit_tokens, self.info.block_size),
            **snapshot.shown(),
        }

    def drain(self) -> None:
        """Refuses new requests from now on; those that it has go on."""
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

    def _ended_by_loss(self, sequence: Sequence) -> bool:
        """Whether a request ends when workers are lost: see the setting `replay`."""
        if self.config.replay == "unsent":
            return self.scheduler.requests[sequence.id].had_token
        return self.config.replay == "none"

    def _wait_for_workers(self) -> None:
        """Waits until there are devices again; meanwhile requests can be cancelled, and end at
        their deadlines."""
        while not self._closing:
            if self.worker.formed(IDLE_WAIT):
                with contextlib.suppress(WorkersLost):
                    self.steps.reset_devices()
                    self.available = True
                    return
            with self._lock:
                self._run_posted()
                self._notify(self.scheduler.expire(self.clock.now()))

    def step(self) -> bool:
        """Issues what can be issued and reads at most one batch. False where there was nothing to
        do."""
        in_flight = self.steps.in_flight
        with self._lock:
            self._run_posted()
            self.scheduler.cache.tell_of_lower_tiers()
            self.worker.check()
            now = self.clock.now()
            self._notify(self.scheduler.expire(now))
            pause = self.steps.pause(now)
            issued = not pause and in_flight.has_room and self.steps.start_batch(now)
        if issued and not in_flight.full:
            return True
        if pause and not self.worker.ready():
            time.sleep(min(pause, TICK))
            return True
        if not len(in_flight):
            return False
        outcome = self.steps.wait()
        with self._lock:
            self.steps.finish(outcome)
        return True

    def _load(self, arrival: Arrival) -> None:
        if self._closing:
            self.worker.drop(arrival)
        else:
            self.steps.load(arrival)

    def _notify(self, events: Events) -> None:
        """Hands events to the sinks of their requests; requests whose sinks raise are cancelled."""
        for request_id in self.registry.notify(events):
            self._end(request_id, "cancelled", None)

    def _fail(self, error: RequestError) -> None:
        """Ends all requests with an error."""
        with self._lock:
            now = self.clock.now()
            for request_id in self.registry.ids():
                self._notify(self.scheduler.cancel(request_id, now, "error", error=error))
