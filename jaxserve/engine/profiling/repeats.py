"""Measures points several times over, looks at how far the times are apart and at who else had the
cores, and says whether they can be trusted."""

from __future__ import annotations

import dataclasses
import logging
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxserve.engine.executor import CommandExecutor
from jaxserve.engine.profiling.measure import MeasuredStep, MeasurePoint, StepTimer
from jaxserve.engine.profiling.other_work import MOST, OtherWork

log = logging.getLogger(__name__)
ROUNDS = 2  # in which all points are measured
FURTHER = 3  # rounds for points whose times do not agree
AGREEING = 2  # times of a step that are to agree
AGREE = 1.25  # factor between two times of a step that agree
DOUBTFUL = 0.1  # share of the points whose times may not agree
PATIENCE = 5.0  # most seconds to wait for quiet before a further round


class Timer(Protocol):
    """Interface of what measures a point; see `StepTimer`."""

    def measure(self, point: MeasurePoint) -> MeasuredStep: ...


@dataclass(frozen=True)
class Measured:
    """Steps of all points. doubt: why their times may be wrong, for people; "" where they are
    right as far as is seen."""

    steps: list[MeasuredStep]
    doubt: str = ""


Measuring = Generator[MeasurePoint | None, bool | None, Measured]


class Repeats:
    """Times of points that are measured several times over. agreeing: times of a point that are to
    agree. others: looks at what else the cores do meanwhile; a time in a stretch in which others
    had more than their share is disturbed, and counts only if all of the point are."""

    def __init__(self, points: Sequence[MeasurePoint], agreeing: int, others: OtherWork):
        self.points = points
        self._agreeing = agreeing
        self._others = others
        self._steps: list[list[MeasuredStep]] = [[] for _ in points]
        self._quiet: list[list[bool]] = [[] for _ in points]
        self._stretch: list[int] = []  # points measured since the last look
        self._shares: list[float] = []  # that others had where steps were disturbed
        others.share()

    def add(self, at: int, step: MeasuredStep) -> None:
        """Adds a time of the point with number `at`."""
        self._steps[at].append(step)
        self._stretch.append(at)
        if self._others.is_stretch():
            self.end_stretch()

    def end_stretch(self) -> None:
        """Looks at who had the cores since the last look."""
        share = self._others.share()
        for at in self._stretch:
            self._quiet[at].append(share <= MOST)
        if self._stretch and share > MOST:
            self._shares.append(share)
        self._stretch.clear()

    def open(self) -> list[int]:
        """Returns the numbers of points to be measured again: without enough times,
        undisturbed ones, that agree."""
        return [at for at in range(len(self.points)) if self._agreed(at) is None]

    def result(self) -> Measured:
        """Returns the median of each point's times that agree, or of all where none do."""
        few = DOUBTFUL * len(self.points)
        steps = [
            _median(self._agreed(at) or self._undisturbed(at) or self._steps[at])
            for at in range(len(self.points))
        ]
        if sum(not self._undisturbed(at) for at in range(len(self.points))) > few:
            cores = self._others.cores
            busy = statistics.mean(self._shares) * cores
            return Measured(
                steps,
                f"other processes kept {busy:.1f} of {cores} cores busy while it was measured",
            )
        apart = self.open()
        if len(apart) > few:
            return Measured(
                steps,
                f"{len(apart)} of its {len(self.points)} steps took other times when repeated",
            )
        return Measured(steps)

    def _undisturbed(self, at: int) -> list[MeasuredStep]:
        return [step for step, quiet in zip(self._steps[at], self._quiet[at]) if quiet]

    def _agreed(self, at: int) -> list[MeasuredStep] | None:
        """Returns the steps with the least undisturbed times of which enough agree; None without
        any. A time that is disturbed is too long; as a difference of two it may be too short."""
        steps = sorted(self._undisturbed(at), key=lambda step: step.seconds)
        for index, shortest in enumerate(steps):
            near = [s for s in steps[index:] if s.seconds <= AGREE * shortest.seconds]
            if len(near) >= self._agreeing:
                return near
        return None


def measuring(
    timer: Timer, points: Sequence[MeasurePoint], repeats: int, others: OtherWork
) -> Measuring:
    """Measures all points in order, `repeats` times over, so that what else the machine does for a
    while counts in one time of a point at most; then, in up to `FURTHER` rounds, those that are
    open, unless they are to be measured once. Yields each point before it is measured, and None
    before such a round: it wants to be sent whether others leave the cores alone, and ends where
    they do not."""
    found = Repeats(points, min(repeats, AGREEING), others)
    for number in range(repeats + FURTHER):
        numbers: Sequence[int] = range(len(points))
        if number >= repeats:
            numbers = found.open() if repeats > 1 else ()
            if not numbers:
                break
            log.info(
                "%d of %d steps are to be measured again: others had the cores, or times differ",
                len(numbers),
                len(points),
            )
            quiet = yield None
            if not quiet:
                break
            others.share()  # what came before the round is no part of it
        for at in numbers:
            yield points[at]
            found.add(at, timer.measure(points[at]))
        found.end_stretch()
    return found.result()


def others_of(worker: CommandExecutor) -> OtherWork:
    """Looks at what else the cores do than this worker's steps: nothing is known of that where
    other processes take part in them."""
    return OtherWork("" if worker.members() else worker.platform)


def measure(
    worker: CommandExecutor,
    points: list[MeasurePoint],
    done: Callable[[str], None],
    repeats: int = ROUNDS,
    others: OtherWork | None = None,
) -> Measured:
    """Measures all points as `measuring` does; before a further round it waits for quiet, for as
    long as the first one took at most. `done` is called with each point of the first `repeats`
    rounds."""
    others = others or others_of(worker)
    steps = measuring(StepTimer(worker), points, repeats, others)
    began = time.perf_counter()
    patience = 0.0
    count = 0
    quiet: bool | None = None
    while True:
        try:
            point = steps.send(quiet)
        except StopIteration as end:
            return end.value
        quiet = None
        if point is None:
            quiet = others.wait(patience)
            continue
        count += 1
        if count <= repeats * len(points):
            done(str(point))
        if count == len(points) + 1:
            patience = min(time.perf_counter() - began, PATIENCE)


def _median(steps: Sequence[MeasuredStep]) -> MeasuredStep:
    """Returns one step with the median times of the same one, measured several times."""
    seconds = statistics.median(step.seconds for step in steps)
    unmoved = statistics.median(step.unmoved for step in steps)
    return dataclasses.replace(steps[0], seconds=seconds, unmoved=unmoved)
