"""The live replica: one thread that turns requests into steps and steps into events.

A request enters by `submit`, from any thread, and waits in the scheduler. Each turn of the loop
takes in what came, starts batches while there is room in flight, issues them to the stages, and
reads the tokens of the oldest batch: one step behind with one stage, so that the device never waits
for the host. A batch that would wait for the devices is started only shortly before they are
predicted to be free: what is decided late serves requests that came late. Events go to each
request's sink, from this thread, once per step. The engine knows tokens, not text.
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

import jax
import numpy as np
from prometheus_client import CollectorRegistry

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Event
from jaxserve.api.request import Request
from jaxserve.clock import Clock, WallClock
from jaxserve.costs.exchange_choice import ExchangeChooser
from jaxserve.engine import results, sampling
from jaxserve.engine import token_masks as guides
from jaxserve.engine.arrays import RingSlice, StepDemand, StepShape, fullest, ring_rows, to_arrays
from jaxserve.engine.results import InFlightBatch
from jaxserve.engine.stages import Stages
from jaxserve.engine.watchdog import Watchdog, told
from jaxserve.observe.journal import Journal
from jaxserve.observe.metrics import Metrics
from jaxserve.observe.view import Snapshot
from jaxserve.replica.info import ReplicaInfo
from jaxserve.replica.registry import Sink, Subscriber, Subscribers
from jaxserve.scheduling import Batch, Load, Scheduler
from jaxserve.settings.schema import EngineConfig

TICK = 0.001  # seconds between looks at a step that may end early
# seconds that other threads wait for the lock before they look at the step, how often
LOOK = 1.0
LOOKS = 10
log = logging.getLogger(__name__)


def replica_info(
    config: EngineConfig, stages: Stages, max_model_len: int, platform: str
) -> ReplicaInfo:
    """What a live replica with these settings and stages is."""
    plan = stages.plan
    model = plan.model
    return ReplicaInfo(
        served_name=config.source.model,
        model=model.name,
        vocab=model.vocab,
        layers=model.layers,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        bos_id=model.bos_id,
        eos_ids=model.eos_ids,
        max_model_len=max_model_len,
        mesh=plan.mesh,
        dtype=str(np.dtype(plan.dtype)),
        kv_dtype=str(np.dtype(plan.kv_dtype)),
        platform=platform,
        block_size=plan.block_size,
        pages_per_lane=plan.pages,
        max_seqs=plan.slots,
        max_queue=config.scheduler.max_queue,
        chunk_tokens=config.scheduler.chunk_tokens,
        class_names=tuple(config.scheduler.class_names),
        settings=dataclasses.asdict(config),
    )


class Engine:
    """See the module. `stages` executes, `scheduler` decides; the engine owns both and the thread
    between them."""

    def __init__(
        self,
        config: EngineConfig,
        stages: Stages,
        scheduler: Scheduler,
        eos_ids: tuple[int, ...],
        clock: Clock | None = None,
    ):
        self.config = config
        self.stages = stages
        self.scheduler = scheduler
        self.model = stages.plan.model
        self.max_len = scheduler.max_len
        self.clock = clock or WallClock()
        self.alive = True
        # chooses, where a step's exchange between lanes is not set
        self.exchange: ExchangeChooser | None = None
        self._eos = eos_ids
        self._far = self._platform != "cpu"  # tokens are copied from the devices, not read in place
        self._flights: deque[InFlightBatch] = deque()
        # per slot: the version of `sampled` with its last token
        self._sampled_at = np.zeros(stages.plan.slots, np.int64)
        # per slot: what its sampling needs, an index of VARIANTS
        self._variant = np.zeros(stages.plan.slots, np.int8)
        self._read_at = -1.0  # clock seconds at which the last batch was read
        self._free = 0.0  # and at which the first stage should be free again
        self._compiles = 0
        self.info = replica_info(config, stages, scheduler.max_len, self._platform)
        self._watchdog = Watchdog(config.hang_timeout)
        self._lock = threading.RLock()
        self._posted: deque[Callable[[], object]] = deque()
        self._news = threading.Event()  # somebody wants something
        self._draining = self._closing = self._ended = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.journal = Journal(config.mesh.spp, self.clock.now())
        self.metrics = Metrics(stages.plan.slots, config.scheduler.class_names, self._readings)
        self._subscribers = Subscribers(
            scheduler, self.metrics, self.journal, config.cache.prefix_caching
        )
        plan = stages.plan
        kv_dtype = np.dtype(stages.plan.kv_dtype)
        self.metrics.configured(
            block_size=plan.block_size,
            num_gpu_blocks=plan.pages * plan.mesh.kvp,
            cache_dtype=kv_dtype,
            enable_prefix_caching=config.cache.prefix_caching,
            placement=config.cache.placement,
        )

    @property
    def _platform(self) -> str:
        return self.stages.last_mesh.devices.flat[0].platform

    # --- for other threads

    def start(self) -> None:
        self._thread.start()

    def post(self, command: Callable[[], object]) -> None:
        """Has a command run before the next step, by the engine's thread; or here, where that has
        ended. It must not raise.

        Whoever calls `submit` and the others below by way of it never waits for a step that is
        being issued.
        """
        self._posted.append(command)
        self._news.set()
        if self._ended:
            self._take_posted()

    def _take_posted(self) -> None:
        with contextlib.suppress(IndexError):  # it is empty
            while True:
                self._posted.popleft()()

    def submit(self, request: Request, sink: Sink) -> None:
        """Hands a request in; its events go to `sink`, which is called from the engine's thread and
        must not block. A sink that raises hears no more, and its request is cancelled.

        Errors: RequestError for an id in use, a full queue, a request that can never fit, or an
        engine that is closed or broken.
        """
        with self._lock:
            if self._draining or self._closing or not self.alive:
                raise RequestError("", "the engine is not running", "UNAVAILABLE")
            events = self.scheduler.add(request, self.clock.now())
            seed = (
                random.getrandbits(63) if request.sampling.seed is None else request.sampling.seed
            )
            self._subscribers.by_id[request.id] = Subscriber(
                request,
                sink,
                seed,
                request.sampling.n,
                self.scheduler.ttft_deadline(request),
                self.scheduler.tpot_objective(request),
            )
            self._news.set()
            self._send([(request.id, event) for event in events])

    def cancel(self, request_id: str, reason: str = "cancelled") -> bool:
        """Ends a request; its sink hears Finished. False where the id is unknown (it may just have
        ended)."""
        return self._end(request_id, reason, None)

    def stop(self, request_id: str, index: int) -> bool:
        """Ends one completion of a request with the reason 'stop'. False where it has ended."""
        return self._end(request_id, "stop", index)

    def _end(self, request_id: str, reason: str, index: int | None) -> bool:
        with self._asked():
            if request_id not in self._subscribers.by_id:
                return False
            events = self.scheduler.cancel(request_id, self.clock.now(), reason, index)
            self._send(events)
            self._news.set()
            return bool(events)

    @contextlib.contextmanager
    def _asked(self) -> Iterator[None]:
        """The lock, for any thread. Errors: RequestError, UNAVAILABLE, where a step that hangs or
        is slow to issue keeps it."""
        for _ in range(LOOKS):
            if self._lock.acquire(timeout=LOOK):
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
        with self._asked():
            return self.scheduler.load()

    def overdue(self) -> float | None:
        """Seconds by which the step that the loop waits for is overdue; None where none is. Takes
        no lock: those that do wait for a step which hangs while it is issued."""
        return self._watchdog.overdue(self.clock.now())

    stuck = overdue

    def flush_cache(self) -> int:
        """Forgets the prefixes that no request uses just now; how many pages are free by that."""
        with self._asked():
            return self.scheduler.cache.flush()

    def _readings(self) -> dict[str, float]:
        """See metrics.READ."""
        load = self.load()
        return {
            "num_requests_running": load.running,
            "num_requests_waiting": load.waiting,
            "kv_cache_usage_perc": (load.pages_total - load.pages_free - load.pages_cached)
            / load.pages_total,
            "queued_prefill_seconds": load.queued_prefill_seconds,
            "predictor_scale": self.scheduler.predictor.scale,
            "num_preemptions": self.scheduler.preemptions,
            "xla_compiles": self.stages.programs.compiles,
            "xla_recompiles": self.stages.programs.recompiles,
        }

    @property
    def metrics_registry(self) -> CollectorRegistry:
        return self.metrics.registry

    def count_rejected(self, reason: str) -> None:
        self.metrics.rejected(reason)

    def now(self) -> float:
        return self.clock.now()

    def drain(self) -> None:
        """Takes no new requests from now on."""
        self._draining = True

    def view(self, since: int = 0) -> dict:
        """What runs and what ran lately, steps from number `since` on, as plain data for a page:
        see scheduling.view."""
        with self._asked():
            snapshot = Snapshot.take(self.journal, self.scheduler, self.clock.now(), since)
        return {
            "model": self.model.name,
            "mesh": str(self.config.mesh),
            "alive": self.alive,
            **snapshot.shown(),
        }

    def close(self) -> None:
        """Stops the loop. Requests that still run end with an error of status UNAVAILABLE. A step
        that hangs is left behind."""
        if self._closing:
            return
        self._closing = True
        self._news.set()
        while self._thread.is_alive():
            if self.overdue() is not None:
                return
            self._thread.join(0.1)
        self._fail(RequestError("", "the engine was closed", "UNAVAILABLE"))

    # --- the loop

    def _run(self) -> None:
        try:
            while not self._closing:
                self._news.clear()
                if not self._safe_turn() and not self.scheduler.waiting:
                    self._news.wait(timeout=0.5)
        except Exception:
            log.exception("the engine's loop failed")
            self.alive = False
            self._fail(RequestError("", "the engine failed; see its log", "INTERNAL"))
        finally:
            self._ended = True
            self._take_posted()

    def _safe_turn(self) -> bool:
        """A turn. Where a step fails on the devices, its requests end with an error and the others
        begin anew, unless that goes on."""
        try:
            return self.turn()
        except jax.errors.JaxRuntimeError as error:
            batch = self._watchdog.failed()
            if batch is None:
                raise
            log.exception("step %d failed", batch.number)
            fault = told(error)
        with self._lock:  # what was on the devices is lost: steps that failed had it
            self._flights.clear()
            self.journal.lost()
            self._free = 0.0
            self.stages.reset()
            self._sampled_at[:] = 0
            self._send(self.scheduler.reset(batch, self.clock.now(), fault))
        return True

    def turn(self) -> bool:
        """Issues what can be issued and reads at most one batch. False where there was nothing to
        do."""
        with self._lock:
            self._take_posted()
            now = self.clock.now()
            self._send(self.scheduler.expire(now))
            pause = self._pause(now)
            batch = (
                self.scheduler.start(now)
                if not pause and not self._held and len(self._flights) < self._depth
                else None
            )
            if batch is not None:
                self._watchdog.watch(batch, now)
                self._issue(batch)
                self._watchdog.clear()
                self.journal.issued(batch, self._flights[-1].issued)
                self._free = max(now, self._free) + batch.seconds
        if batch is not None and len(self._flights) < self._depth:
            return True
        if pause and not self._flights[0].done.is_ready():  # type: ignore[attr-defined]
            time.sleep(min(pause, TICK))
            return True
        if self._flights:
            self._read(self._flights.popleft())
            return True
        return False

    def _pause(self, now: float) -> float:
        """Seconds until the next batch should be started; 0 where a stage waits for it, or it for a
        token."""
        if self._held or not self.config.mesh.spp <= len(self._flights) < self._depth:
            return 0.0
        early = self.scheduler.predictor.early(self._flights[-1].batch.seconds)
        return max(0.0, self._free - early - now)

    @property
    def _depth(self) -> int:
        """Batches in flight: one for each stage, and those issued ahead."""
        return self.config.mesh.spp + self.config.lookahead

    @property
    def _held(self) -> bool:
        """Whether the newest batch is still to be sampled."""
        return bool(self._flights) and self._flights[-1].unsampled is not None

    def _issue(self, batch: Batch) -> None:
        lanes = self.config.mesh.kvp
        for chunk in batch.admitted:
            self._admit(batch, chunk)
        work = StepDemand.of(batch, lanes)
        ring = self._ring_rows(batch, work)
        shape = self._shape_for(batch, work, ring)
        arrays = to_arrays(batch, work, shape, lanes, self.stages.plan.block_size, ring)
        if shape.spread:
            self.metrics.exchanged(shape.exchange, len(batch.moves))
        fed = batch.slot[batch.is_decode]
        hidden = self.stages.step(arrays, int(self._sampled_at[fed].max(initial=0)))
        flight = InFlightBatch(batch, arrays, hidden.ints, hidden if batch.sample.any() else None)
        self._flights.append(flight)
        self._sample(flight)
        flight.scores = results.issue_scores(self.stages, self.scheduler, batch, arrays, hidden)
        flight.issued = self.clock.now()

    def _sample(self, flight: InFlightBatch) -> None:
        """Issues the sampling of the newest batch, unless a guide has to hear first of a token that
        was not read."""
        if flight.unsampled is None:
            return
        batch = flight.batch
        mask = None
        slots = batch.slot[batch.sample]
        variant = sampling.VARIANTS[self._variant[slots].max()]
        if variant == "guided":
            if guides.behind(
                batch, [other.batch for other in self._flights if other is not flight]
            ):
                return
            shape = self.config.mesh.kvp, flight.arrays.shape.samples, self.stages.mask_words
            mask, ends = guides.masks(
                self.scheduler, batch, flight.arrays.sampled, shape, self.clock.now()
            )
            self._send(ends)
        flight.sampled = self.stages.sample(flight.unsampled, variant, mask)
        flight.unsampled = None
        self._sampled_at[slots] = flight.sampled.version
        if self._far:
            flight.sampled.tokens.copy_to_host_async()

    def _ring_rows(self, batch: Batch, work: StepDemand) -> list[RingSlice]:
        """None where steps never go round a ring."""
        config = self.config.scheduler
        asked = config.exchange != "gather" and batch.block_lane.size
        return ring_rows(batch, work, config.tile, self.stages.plan.block_size) if asked else []

    def _shape_for(self, batch: Batch, work: StepDemand, ring: list[RingSlice]) -> StepShape:
        """The cheapest compiled shape; one with a ring where that is faster and the blocks of all
        spread chunks lie as a ring needs."""
        plan = self.stages.plan
        config = self.config.scheduler
        moves = bool(len(batch.moves))
        shape = plan.shape_for(work, moves=moves)
        assert shape is not None, f"no compiled shape holds {work}"
        if not ring:
            return shape
        exchange = config.exchange if self.exchange is None else self._chosen(batch, self.exchange)
        return (
            shape
            if exchange == "gather"
            else plan.shape_for(work, exchange, fullest(ring), moves) or shape
        )

    def _chosen(self, batch: Batch, exchange: ExchangeChooser) -> str:
        """The fastest exchange for the spread chunks of a batch; the decision is logged."""
        far = np.flatnonzero(batch.spread & (batch.length > 1))  # decodes are gathered
        chunks = list(zip(batch.start[far].tolist(), batch.length[far].tolist()))
        shards = (batch.blocks_per_lane[far].max(1) * self.stages.plan.block_size).tolist()
        decision = exchange.choose(chunks, shards)
        log.debug(
            "batch %d: %s out of %s seconds per layer",
            batch.number,
            decision.strategy,
            decision.seconds,
        )
        return decision.strategy

    def _admit(self, batch: Batch, chunk: int) -> None:
        sequence = self.scheduler.sequences[int(batch.seq[chunk])]
        params = sequence.request.sampling
        seed = sampling.fold_seed(self._subscribers.by_id[sequence.id].seed, sequence.index)
        for launch in sampling.admissions(
            params,
            int(batch.lane[chunk]),
            int(batch.slot[chunk]),
            sequence.request.prompt,
            sequence.output,
            seed,
            self._eos,
        ):
            self.stages.admit(launch)
        self.journal.admitted(sequence)
        self.metrics.admitted(
            int(batch.slot[chunk]),
            sequence.tpot,
            sequence.request.slo.class_name,
            sequence.last_token_at,
        )
        plain = 2 if params.logprobs is not None else 0 if params.greedy else 1
        self._variant[batch.slot[chunk]] = plain if sequence.matcher is None else 3

    # --- reading

    def _read(self, flight: InFlightBatch) -> None:
        """Waits for a batch and tells what came of it."""
        self._watchdog.watch(flight.batch, self.clock.now())
        flight.done.block_until_ready()  # without tokens too: what runs ahead, arrivals wait behind
        tokens, logprobs = results.fetch_tokens(self.scheduler, flight)
        scores = results.fetch_scores(self.scheduler, flight)
        self._watchdog.success()
        self._learn(flight)
        # those that have not left the first stage
        behind = list(self._flights)[self.config.mesh.spp - 1 :]
        self._free = self._read_at + sum(other.batch.seconds for other in behind)
        with self._lock:
            now = self.clock.now()
            prefilled = self._subscribers.prefilled(flight.batch)
            self.journal.read(self._read_at)
            events = self.scheduler.finish(flight.batch, tokens, now, logprobs, scores)
            self._subscribers.count(flight.batch, prefilled, now)
            self._send(events)
            if self._held:
                self._watchdog.watch(self._flights[-1].batch, now)
                self._sample(self._flights[-1])
                self._watchdog.clear()

    def _send(self, events: list[tuple[str, Event]]) -> None:
        for request_id in self._subscribers.send(events):
            self._end(request_id, "cancelled", None)

    def _learn(self, flight: InFlightBatch) -> None:
        """Tells the predictor how long a step took: since it was issued, or since the one before it
        left the stages."""
        now = self.clock.now()
        before = max(self._read_at, flight.issued)
        compiles = self._compiles
        self._compiles = self.stages.programs.compiles
        self._read_at = now
        comparable = compiles == self._compiles and (
            self.config.mesh.spp == 1 or before > flight.issued
        )
        self.metrics.step(flight.batch.seconds, now - before, comparable)
        if comparable:
            self.scheduler.predictor.seen(flight.batch.seconds, now - before)

    def _fail(self, error: RequestError) -> None:
        """Ends all requests with an error."""
        with self._lock:
            now = self.clock.now()
            for request_id in list(self._subscribers.by_id):
                self._send(self.scheduler.cancel(request_id, now, "error", error=error))
