"""Issues steps to the devices and reads what they left, for the engine's thread."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from jaxserve.api.batch import NO_STORES, Batch
from jaxserve.api.errors import RequestError
from jaxserve.cache.tiers import Fetch
from jaxserve.engine.command_builder import CommandBuilder
from jaxserve.engine.executor import CommandExecutor
from jaxserve.engine.fetched_pieces import Arrival
from jaxserve.engine.in_flight import InFlight
from jaxserve.engine.results import InFlightBatch, StepOutcome, results_of
from jaxserve.engine.watchdog import Watchdog
from jaxserve.replica.registry import Registry
from jaxserve.scheduling import Scheduler
from jaxserve.scheduling.batch_reader import Events
from jaxserve.scheduling.events import StepFinished, StepIssued, StepRead, StepsLost
from jaxserve.scheduling.interruption import PartialStep
from jaxserve.scheduling.sequence import Sequence as TokenSequence
from jaxserve.settings.schema import EngineConfig


class Steps:
    """Steps of a replica: what the scheduler decides goes to the devices as commands, what these
    leave goes back. All methods but `wait` are called with the engine's lock held.

    now: the clock. notify: hands events to the sinks of their requests.
    """

    def __init__(
        self,
        config: EngineConfig,
        worker: CommandExecutor,
        scheduler: Scheduler,
        registry: Registry,
        now: Callable[[], float],
        notify: Callable[[Events], None],
    ):
        self.in_flight = InFlight(config.mesh.spp, config.lookahead)
        self.watchdog = Watchdog(config.hang_timeout)
        self._worker = worker
        self._scheduler = scheduler
        self._now = now
        self._notify = notify
        self._builder = CommandBuilder(worker.plan, scheduler, registry, lambda: worker.uncompiled)
        self._compiles = 0
        self._unpublished: StepIssued | None = None  # of the batch that is issued in part
        self._bus = scheduler.bus
        self._bus.subscribe(StepRead, self._correct_predictor)

    def pause(self, now: float) -> float:
        """Seconds until the next batch should be started: what is decided late serves requests that
        came late."""
        step = self._scheduler.partial
        if step is not None:
            return self._pause_between_groups(step, now)
        spare = self.in_flight.seconds_to_spare(now)
        if not spare:
            return 0.0
        early = self._scheduler.predictor.early(self.in_flight.newest.batch.seconds)
        return max(0.0, spare - early)

    def _pause_between_groups(self, step: PartialStep, now: float) -> float:
        """Seconds until it is decided what follows the groups of layers that are issued: shortly
        before the last of them should have run, but not before the others have."""
        if self.in_flight.samples_later or self._worker.groups_ahead() > 1:
            return math.inf
        spare = self._seconds_between_groups(now)
        return max(0.0, spare - self._scheduler.predictor.early(step.group_seconds))

    def _seconds_between_groups(self, now: float) -> float:
        """Seconds until what is issued should have run; 0 once it has, however early."""
        if not self._worker.groups_ahead() and not len(self.in_flight):
            return 0.0
        return self.in_flight.seconds_to_spare(now)

    # --- issuing

    def start_batch(self, now: float) -> bool:
        """Has the scheduler decide the next batch, and issues it. False without a batch."""
        began = time.perf_counter()
        self.watchdog.watch(None, now)
        batch = self._scheduler.start(now)
        if batch is None:
            self._watch_partial()
            self._move_blocks(self._scheduler.cache.below.take_fetches())
            return False
        self._issue(batch, now, began, self._scheduler.partial)
        return True

    def go_on(self, now: float) -> None:
        """Issues what follows while some groups of a batch's layers are not issued: another batch
        that the scheduler puts before them, or the next group."""
        began = time.perf_counter()
        flight = self.in_flight.partial
        step = self._scheduler.partial
        assert flight is not None and step is not None
        if self.in_flight.has_room:
            batch = self._scheduler.interrupt(self._seconds_between_groups(now), now)
            if batch is not None:
                flight.mixed = True
                self._issue(batch, now, began, None)
                return
        last = self._scheduler.go_on()
        self.watchdog.watch(flight.batch, now)
        self._worker.execute(self._builder.go_on(flight.batch, last))
        self.in_flight.issue_part(step.group_seconds, now)
        if last:
            self.in_flight.partial = None
            self.in_flight.add(flight)
            self._all_issued(flight)
            self.watchdog.clear()
            assert self._unpublished is not None
            self._bus.publish(self._unpublished)

    def _issue(self, batch: Batch, now: float, began: float, step: PartialStep | None) -> None:
        """Issues a batch that was decided from `began` on (host seconds): whole, or the first group
        of its layers where it is a `step` of several."""
        self.watchdog.watch(batch, now)
        decided = time.perf_counter()
        fetches = self._scheduler.cache.below.take_fetches()
        computed = NO_STORES
        if step is None:  # what is pending is on pages that the batch fills, or that are filled
            computed = self._scheduler.cache.stores.take()
        groups = 0 if step is None else step.issued
        command, flight = self._builder.step(batch, fetches, computed, groups)
        built = time.perf_counter()
        # devices of the CPU may compute while a command is issued
        flight.issued = self._now()
        self._worker.execute(command)
        if step is None:
            flight.mixed = self.in_flight.partial is not None
            self.in_flight.issue(flight, now)
            self._all_issued(flight)
            self._watch_partial()
        else:
            self.in_flight.partial = flight
            self.in_flight.issue_part(step.group_seconds, now)
        shape = flight.arrays.shape
        event = StepIssued(
            batch,
            command,
            flight.issued,
            exchanges=shape.exchanges,
            schedule=decided - began,
            build=built - decided,
            dispatch=time.perf_counter() - built,
        )
        if step is None:
            self._bus.publish(event)
        else:
            self._unpublished = event  # others may be issued, and read, before all of it is

    def _all_issued(self, flight: InFlightBatch) -> None:
        """Samples a batch whose layers are issued, if its masks are known."""
        if flight.sample_later:
            self._sample_with_masks(flight)

    def _watch_partial(self) -> None:
        """Watches the batch that is issued in part, if any: the loop waits for its groups."""
        self.watchdog.clear()
        if self.in_flight.partial is not None:
            self.watchdog.watch(self.in_flight.partial.batch, self._now())

    def _move_blocks(self, fetches: Sequence[Fetch]) -> None:
        """Has wanted pages read, and fetches begun, while no batch comes that would do it."""
        if self._scheduler.cache.stores or fetches:
            stores = self._scheduler.cache.stores.take()
            self._worker.execute(self._builder.moves(stores, fetches))

    def load(self, arrival: Arrival) -> None:
        """Has blocks that were fetched written to their pages, if a sequence still waits for
        them."""
        if not self._scheduler.fetches.awaited(arrival.ticket):
            self.drop(arrival)
            return
        stores = self._scheduler.cache.stores.take()
        self._worker.execute(self._builder.load(arrival, stores))
        fetches = self._scheduler.fetches
        fetches.arrived(arrival.ticket, arrival.blocks, arrival.last, self._now())

    def drop(self, arrival: Arrival) -> None:
        """Has blocks that were fetched forgotten, and what else was to come of their fetch."""
        self._worker.execute(self._builder.drop(arrival))

    def _sample_with_masks(self, flight: InFlightBatch) -> None:
        """Samples the newest batch, unless a guide needs a token first that was not read."""
        unread = self.in_flight.before(flight)
        command, ends = self._builder.masked_sampling(flight, unread, self._now())
        self._notify(ends)
        if command is not None:
            self._worker.execute(command)

    # --- reading

    def wait(self) -> StepOutcome:
        """Waits for the oldest batch and reads what it left; without the lock."""
        flight = self.in_flight.take()
        self.watchdog.watch(flight.batch, self._now())
        result = self._worker.wait()
        # before the lock is waited for, which is no part of a step's time
        read_at = self._now()
        outcome = StepOutcome(flight, read_at, results_of(self._scheduler, flight, result))
        self.watchdog.success()
        return outcome

    def finish(self, outcome: StepOutcome) -> None:
        """Takes in what a batch left, and samples the newest one if it waited for that."""
        batch = outcome.flight.batch
        self._publish_read(outcome.flight, outcome.read_at)
        now = self._now()
        began = time.perf_counter()
        events = self._scheduler.finish(batch, outcome.results, now)
        finished = time.perf_counter()
        self._notify(events)
        notified = time.perf_counter()
        self._bus.publish(StepFinished(batch, finished - began, notified - finished))
        if self.in_flight.samples_later:
            newest = self.in_flight.newest
            self.watchdog.watch(newest.batch, now)
            self._sample_with_masks(newest)
        self._watch_partial()

    def _publish_read(self, flight: InFlightBatch, now: float) -> None:
        seconds, unmixed = self.in_flight.read(flight, now)
        compiles = self._worker.compiles
        comparable = unmixed and compiles == self._compiles
        self._compiles = compiles
        self._bus.publish(StepRead(flight.batch, now, seconds, comparable))

    def _correct_predictor(self, step: StepRead) -> None:
        if step.comparable:
            self._scheduler.predictor.seen(step.batch.seconds, step.seconds)

    # --- measuring

    def sampled_elsewhere(self, count: int) -> None:
        """Takes note of `count` steps that sampled made-up tokens, while no sequence had a slot."""
        self._builder.skip(count)

    # --- losing

    def reset_devices(self) -> None:
        """Has the devices hold nothing. Errors: those of the worker."""
        self._worker.execute(self._builder.reset())

    def lose(self, ends: Callable[[TokenSequence], bool], error: RequestError) -> None:
        """Begins again without what was on the devices: sequences that `ends` names end with the
        error, the others are computed from their first token on."""
        self.in_flight.clear()
        self._scheduler.cache.below.recheck()
        self._bus.publish(StepsLost())
        self._notify(self._scheduler.reset(ends, self._now(), error))
