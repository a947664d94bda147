"""The trust in a profile: what says whether its times are right, and what measures those again that
are not, beside traffic."""

from __future__ import annotations

import logging
import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxserve.costs.coefficients import Costs
from jaxserve.costs.fit import predicted
from jaxserve.costs.step_errors import StepErrors
from jaxserve.engine.executor import CommandExecutor
from jaxserve.engine.profiling.measure import MeasuredStep, MeasurePoint, StepTimer
from jaxserve.engine.profiling.other_work import MOST, OtherWork
from jaxserve.engine.profiling.profile_file import (
    MeasuredProfile,
    fitted,
    identity_of,
    points_of,
    safe_file,
    sample_of,
    write,
)
from jaxserve.engine.profiling.repeats import ROUNDS, Measured, Measuring, measuring, others_of
from jaxserve.engine.stage_plan import StagePlan
from jaxserve.scheduling import Scheduler
from jaxserve.scheduling.assembly import ReplicaProfile
from jaxserve.scheduling.events import StepRead
from jaxserve.settings.schema import ConfigError, EngineConfig, MeshConfig

log = logging.getLogger(__name__)
LOOK = 1.0  # seconds of quiet before steps are measured
BUSY_PAUSE = 10.0  # seconds between looks while others are at work
FIRST_PAUSE = 10.0  # seconds until steps are measured again; each time twice as many
LONGEST_PAUSE = 3600.0
RIGHT_PAUSE = 300.0  # after the profile was found to be right, half as long as the first
LEAST_FREE = 0.5  # share of the pages to be free: fewer would lie in caches of the cores
# factor by which measured steps are further off a profile that is replaced than off a new one
CHANGED = 1.2
SHORT = 2**18  # most pairs of a step that is measured while a request may come


class PagedTimer(Protocol):
    """Interface of what measures points on some of the pages; see `StepTimer`."""

    pages: np.ndarray

    def use(self, pages: np.ndarray) -> None: ...

    def measure(self, point: MeasurePoint) -> MeasuredStep: ...


@dataclass(frozen=True)
class Repaired:
    """The profile that is right, after steps were measured again: the same where it was right, or
    another. ratio: what steps take of what the profile before said."""

    profile: ReplicaProfile
    ratio: float


class ProfileTrust:
    """Says of the profile that a scheduler predicts by whether it can be trusted: see `doubt`."""

    def __init__(self, scheduler: Scheduler, profile: ReplicaProfile):
        self.scheduler = scheduler
        self.profile = profile
        self.errors = StepErrors()
        self._said = ""
        scheduler.bus.subscribe(StepRead, self._heard)
        self._say()

    @property
    def doubt(self) -> str:
        """The reason why predictions cannot be trusted, for people; "" where they can."""
        if self.profile.doubt:
            return self.profile.doubt
        if self.errors.off:
            return f"steps are off its times by a factor of {self.errors.factor:.1f} on average"
        return ""

    @property
    def remedy(self) -> str:
        """Advice for people who want right predictions."""
        return "measure again while nothing else runs: `jaxserve profile` with the same flags"

    def _heard(self, step: StepRead) -> None:
        predictor = self.scheduler.predictor
        if step.comparable:
            self.errors.seen(step.batch.seconds / predictor.scale, step.seconds, step.now)
            self._say()

    def _say(self) -> None:
        """Logs a reason that is new."""
        kind = ""
        if self.profile.doubt:
            kind = "profile"
        elif self.errors.off:
            kind = "steps"
        if kind and kind != self._said:
            log.warning("predicted times cannot be trusted: %s; %s", self.doubt, self.remedy)
        self._said = kind


class ProfileRepair(ProfileTrust):
    """Measures a profile that is in doubt again while its engine has nothing to do, point by point,
    and has the scheduler predict by what was found. For replicas of one process and one lane.

    timer: measures on the engine's devices. others: looks at what else the cores do. list_points:
    the points to measure. repair: makes of what was measured the profile that is right; it runs in
    a thread, all else on the engine's.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        profile: ReplicaProfile,
        timer: PagedTimer,
        others: OtherWork,
        list_points: Callable[[], list[MeasurePoint]],
        repair: Callable[[Measured, ReplicaProfile], Repaired],
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.timer = timer
        self.others = others
        self._list_points = list_points
        self._repair = repair
        self.clock = clock
        self._looked = False  # whether others are looked at since `not_before`
        self._not_before = 0.0
        self._pause = FIRST_PAUSE
        self._steps: Measuring | None = None
        self._waits = False  # a further round waits for quiet
        self._busy = False  # whether others were at work when steps were to be measured
        self._worked_at = 0.0
        self.fitting: threading.Thread | None = None
        self._repaired: Repaired | None = None
        super().__init__(scheduler, profile)

    @property
    def remedy(self) -> str:
        return "they are measured again while no request runs and other processes leave the cores"

    def work(self) -> bool:
        """Measures a point, if one is to be measured now; for an engine that has nothing else to
        do. Returns whether there is more to do at once. Errors: DeviceError."""
        now = self.clock()
        if self.fitting is not None:
            self._take(now)
            return False
        if now < self._not_before or (self._steps is None and not self.doubt):
            return False
        quiet = None
        if self._steps is None or self._waits:
            if not self._looked:
                self._look_from(now)
                return False
            quiet = self.others.share() <= MOST
            self._looked = False
            if self._steps is None and not quiet:
                if not self._busy:
                    log.info("steps are not measured again yet: other processes are at work")
                self._busy = True
                self._not_before = now + BUSY_PAUSE
                return False
        if not self._take_pages(served=now - self._worked_at > LOOK):
            self._put_off(now, "pages are leased")
            return False
        self._go_on(now, quiet if self._waits else None)
        return True

    def give_up(self) -> None:
        """Measures no more: the devices failed."""
        self._steps = None
        self._not_before = math.inf

    def _look_from(self, now: float) -> None:
        """Looks at what others do from now on for a while."""
        self.others.share()
        self._looked = True
        self._not_before = now + LOOK

    def _put_off(self, now: float, why: str) -> None:
        """Tries again after a pause."""
        log.info("steps are not measured again yet: %s; next in %.0f s", why, self._pause)
        self._steps = None
        self._waits = False
        self._not_before = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _go_on(self, now: float, quiet: bool | None) -> None:
        """Measures the next point."""
        if self._steps is None:
            log.info("steps are measured again, while no request runs: %s", self.doubt)
            self._busy = False
            self._steps = measuring(self.timer, self._list_points(), ROUNDS, self.others)
        elif now - self._worked_at > LOOK:
            self.others.share()  # requests have been served meanwhile
        try:
            self._waits = self._steps.send(quiet) is None
        except StopIteration as end:
            self._end(end.value, self.clock())
        self._worked_at = self.clock()

    def _take_pages(self, served: bool) -> bool:
        """Has made-up tokens written where nothing is kept. Where too few pages are free, those
        that are only kept for reuse are given up, unless some are leased: then it returns False.
        served: requests may have run since the last point."""
        cache = self.scheduler.cache
        if len(cache.pages.free[0]) < LEAST_FREE * cache.pages.per_lane:
            if len(cache.leases):
                return False
            cache.flush()
        free = np.array(sorted(cache.pages.free[0]))
        if served or not np.array_equal(free, self.timer.pages):
            self.timer.use(free)
        return True

    def _end(self, measured: Measured, now: float) -> None:
        """Fits a profile to what was measured, in a thread: a request may come meanwhile."""
        self._steps = None
        self._waits = False
        if measured.doubt:
            self._put_off(now, measured.doubt)
            return
        self._repaired = None

        def repair() -> None:
            self._repaired = self._repair(measured, self.profile)

        self.fitting = threading.Thread(target=repair, name="profile", daemon=True)
        self.fitting.start()

    def _take(self, now: float) -> None:
        """Has the scheduler predict by what was fitted, if that is another profile."""
        assert self.fitting is not None
        if self.fitting.is_alive():
            return
        self.fitting = None
        repaired = self._repaired
        if repaired is None:
            self._put_off(now, "the fit failed")
            return
        self.errors = StepErrors()
        if repaired.profile is self.profile:
            self._pause = min(2 * max(self._pause, RIGHT_PAUSE), LONGEST_PAUSE)
            self._not_before = now + self._pause
            log.info(
                "steps that are measured again take %.2f of what the profile says, which stays as "
                "it is: served steps are slowed by something else",
                repaired.ratio,
            )
            return
        self.profile = repaired.profile
        self._say()
        self.scheduler.predict_by(repaired.profile.costs)
        self._pause = FIRST_PAUSE
        log.info(
            "steps were measured again and take %.2f of what was predicted of them; predicted "
            "times can be trusted again",
            repaired.ratio,
        )


def profile_again(
    was: ReplicaProfile,
    measured: Measured,
    plan: StagePlan,
    on_cpu: bool,
    keep: Callable[[MeasuredProfile], object],
) -> Repaired:
    """Fits a profile to what was measured, and keeps it where the one that was is doubtful or says
    something else."""
    found = fitted(plan, {}, measured, on_cpu)
    before, ratio = distance(was.costs, plan.mesh, measured.steps)
    after, _ = distance(found.profile.costs, plan.mesh, measured.steps)
    if not was.doubt and before <= CHANGED * after:
        return Repaired(was, ratio)
    keep(found)
    return Repaired(found.profile, ratio)


def distance(costs: Costs, mesh: MeshConfig, steps: Sequence[MeasuredStep]) -> tuple[float, float]:
    """Returns by which factor measured steps are off what costs predict, either way, on average;
    and what they take of the predicted time."""
    logs = [
        math.log(step.seconds / max(predicted(costs, mesh, sample_of(step)), 1e-9))
        for step in steps
    ]
    return math.exp(statistics.mean(map(abs, logs))), math.exp(statistics.mean(logs))


def trust_of(
    config: EngineConfig,
    worker: CommandExecutor,
    scheduler: Scheduler,
    profile: ReplicaProfile,
    sampled: Callable[[int], None],
) -> ProfileTrust:
    """Returns what says whether a profile can be trusted, and measures it again where that is
    possible: in a replica of one process and one lane. A file that settings name is left as it is.
    sampled: see `StepTimer`."""
    if worker.members() or config.mesh.kvp > 1:
        return ProfileTrust(scheduler, profile)
    identity = identity_of(worker, scheduler.max_len)

    def keep(found: MeasuredProfile) -> None:
        if config.profile == "auto":
            try:
                write(safe_file(identity), identity, found)
            except ConfigError as error:
                log.warning("what was measured again is not kept: %s", error)

    def work(measured: Measured, was: ReplicaProfile) -> Repaired:
        return profile_again(was, measured, worker.plan, worker.platform == "cpu", keep)

    def list_points() -> list[MeasurePoint]:
        return points_of(worker, scheduler.max_len, SHORT)

    timer = StepTimer(worker, sampled)
    return ProfileRepair(scheduler, profile, timer, others_of(worker), list_points, work)
