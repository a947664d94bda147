"""How long steps take on the devices at hand: the points that a profile is fitted to.

Steps are issued one after the other, as while serving, with made-up tokens on pages spread over the
pool; nothing of the scheduler takes part. The time of a step is what each further one adds, so that
neither the way through the stages nor the wait at the end counts.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from jaxserve.engine.arrays import StepArrays, to_arrays
from jaxserve.engine.command import NO_SAMPLING, StepCommand, StepResult
from jaxserve.engine.command_builder import GREEDY
from jaxserve.engine.dealing import StepDemand
from jaxserve.engine.executor import CommandExecutor
from jaxserve.engine.shapes import StepShape
from jaxserve.engine.stage_plan import StagePlan
from jaxserve.scheduling import Batch

STEPS = 3  # whose time is taken at once,
LONG = 0.1  # or that of one, where that takes so many seconds


@dataclass(frozen=True)
class MeasurePoint:
    """A step per lane: decodes, each after `context` tokens; chunks of `new` tokens after `cached`
    ones; whether tokens are sampled."""

    decodes: int = 0
    context: int = 0
    chunks: int = 0
    cached: int = 0
    new: int = 0
    sample: bool = True

    def longest(self) -> int:
        """Tokens of the longest sequence, those of the step included."""
        return max(
            self.context + 1 if self.decodes else 0, self.cached + self.new if self.chunks else 0
        )

    def pairs(self) -> int:
        """Of tokens that attend and tokens before them."""
        return self.decodes * self.context + self.chunks * self.new * self.cached


@dataclass(frozen=True)
class MeasuredStep:
    """Seconds per step of a point, and the shape in which it ran."""

    point: MeasurePoint
    shape: StepShape
    seconds: float


def batch_of(point: MeasurePoint, lanes: int, block_size: int) -> Batch:
    """The point on every lane."""
    each = point.decodes + point.chunks
    start = np.array([point.context] * point.decodes + [point.cached] * point.chunks, np.int32)
    length = np.array([1] * point.decodes + [point.new] * point.chunks, np.int32)
    tile = lambda row: np.tile(row, lanes)
    lane = np.repeat(np.arange(lanes, dtype=np.int32), each)
    held = np.zeros((lanes * each, lanes), np.int32)
    held[np.arange(lanes * each), lane] = tile(-(-(start + length) // block_size))
    feed = tile(np.arange(each) < point.decodes)
    return Batch(
        number=0,
        seq=np.arange(lanes * each),
        slot=np.arange(lanes * each, dtype=np.int32),
        lane=lane,
        start=tile(start),
        length=tile(length),
        is_decode=feed,
        sample=np.full(lanes * each, point.sample),
        group_size=np.ones(lanes * each, np.int32),
        blocks_per_lane=held,
        block_lane=np.empty(0, np.int32),
        tokens=np.ones(int(tile(length)[~feed].sum()), np.int32),
        moves=np.empty((0, 4), np.int32),
        table_updates=np.empty((0, 5), np.int32),
        seconds=0.0,
        admitted=(),
    )


def first_token(
    plan: StagePlan, execute: Callable[[StepCommand], None], wait: Callable[[], StepResult]
) -> None:
    """Has devices make one token, through all stages, of made-up state: they need a reset
    afterwards. Errors: as of `execute` and `wait`, where none comes."""
    batch = batch_of(MeasurePoint(decodes=1, context=1), plan.mesh.kvp, plan.block_size)
    demand = StepDemand.of(batch, plan.mesh.kvp)
    shape = plan.shape_for(demand)
    assert shape is not None, "no compiled shape holds a decode"
    arrays = to_arrays(batch, demand, shape, plan.mesh.kvp, plan.block_size)
    execute(
        StepCommand(
            number=0, shape=plan.shapes.index(shape), variant=GREEDY, rows=arrays.rows, reset=True
        )
    )
    assert wait().tokens is not None, "a step that samples left no token"


class StepTimer:
    """Measures points on a worker that serves nobody."""

    def __init__(self, worker: CommandExecutor, repeats: int = 3):
        self._worker = worker
        self._plan = worker.plan
        self._mesh = worker.plan.mesh
        self._repeats = repeats
        self._longest = worker.plan.width * worker.plan.block_size
        self._ran: set[StepShape] = set()
        self._tables: set[int] = set()  # slots whose rows of the page table were written

    def measure(self, point: MeasurePoint) -> MeasuredStep:
        """Errors: ValueError for a point that no compiled shape or no page table holds."""
        arrays = self.arrays(point)
        command = StepCommand(
            number=0,
            shape=self._plan.shapes.index(arrays.shape),
            variant=GREEDY if point.sample else NO_SAMPLING,
            rows=arrays.rows,
        )
        if arrays.shape not in self._ran:  # the first step of a program takes longer
            self._run(command, 1)
            self._ran.add(arrays.shape)
        times = [self._seconds(command) for _ in range(self._repeats)]
        return MeasuredStep(point, arrays.shape, max(statistics.median(times), 1e-9))

    def _seconds(self, command: StepCommand) -> float:
        """What each further step of this command takes."""
        if self._mesh.spp > 1:  # as many as fill the stages do not count
            few = self._mesh.spp
            return (self._run(command, few + STEPS) - self._run(command, few)) / STEPS
        alone = self._run(command, 1)
        return alone if alone > LONG else self._run(command, STEPS) / STEPS

    def arrays(self, point: MeasurePoint) -> StepArrays:
        """A point as the rows of a compiled shape; its page table is written. Errors: ValueError
        for a point that no compiled shape or no page table holds."""
        batch = batch_of(point, self._mesh.kvp, self._plan.block_size)
        demand = StepDemand.of(batch, self._mesh.kvp)
        shape = self._plan.shape_for(demand, but=self._worker.uncompiled)
        if shape is None or point.longest() > self._longest:
            raise ValueError(
                f"{point} fits no compiled shape, or is longer than {self._longest} tokens"
            )
        self._write_table(int(batch.slot.max()) + 1)
        return to_arrays(batch, demand, shape, self._mesh.kvp, self._plan.block_size)

    def _run(self, command: StepCommand, steps: int) -> float:
        """Seconds of so many steps, one after the other."""
        began = time.perf_counter()
        for _ in range(steps):
            self._worker.execute(command)
        self._worker.settle()
        return time.perf_counter() - began

    def _write_table(self, slots: int) -> None:
        """Rows of the page table with pages from all over the pool, as after hours of serving."""
        plan = self._plan
        for slot in sorted(set(range(slots)) - self._tables):
            at = np.arange(plan.width)
            pages = (slot * plan.width + at * 7919) % plan.pages
            for lane in range(self._mesh.kvp):
                columns = [np.full_like(at, lane), np.full_like(at, slot), at, pages, at]
                updates = np.stack(columns, 1).astype(np.int32)
                self._worker.execute(StepCommand(number=0, table_updates=updates))
            self._tables.add(slot)


def grid(
    shapes: list[StepShape], longest: int, slots: int, pairs: float = float("inf")
) -> Iterator[MeasurePoint]:
    """Points that tell all of a profile's coefficients apart: every compiled shape without context,
    then contexts up to what leaves room for a chunk in sequences of `longest` tokens. Points of
    more `pairs` take too long and are left out."""
    for shape in shapes:
        if not shape.spread:
            yield _full(shape, longest, slots)
    yield MeasurePoint(decodes=1, context=1, sample=False)
    widths = sorted({shape.prefill[1] for shape in shapes if shape.prefill[0] == 1})
    most = longest - 1 - min(widths, default=0)
    contexts = [4**power for power in range(4, 16) if 2 * 4**power <= most] + [most] * (most > 0)
    points = [
        MeasurePoint(decodes=count, context=context)
        for context in contexts
        for count in sorted({1, max(1, slots // 4), slots})
    ]
    for cached, new in itertools.product(
        contexts, sorted({widths[0], widths[len(widths) // 2], widths[-1]} if widths else ())
    ):
        if cached + new < longest:
            points.append(MeasurePoint(chunks=1, cached=cached, new=new, sample=False))
            if slots > 1:
                points.append(
                    MeasurePoint(
                        decodes=slots - 1, context=cached, chunks=1, cached=cached, new=new
                    )
                )
    yield from (point for point in points if point.pairs() <= pairs)


def _full(shape: StepShape, longest: int, slots: int) -> MeasurePoint:
    """As much as the shape holds, for so many slots, of sequences without context."""
    rows, width = shape.prefill
    chunks = min(rows, max(1, slots - 1) if shape.decode[0] else slots)
    new = min(width * (rows // chunks), longest - 1) if chunks else 0
    decodes = min(shape.decode[0], slots - chunks)
    return MeasurePoint(decodes=decodes, context=1, chunks=chunks, new=new, sample=bool(decodes))


def measure(
    worker: CommandExecutor,
    points: list[MeasurePoint],
    done: Callable[[str], None],
    repeats: int = 3,
) -> list[MeasuredStep]:
    """All points, the first ones first; `done` hears of each."""
    meter = StepTimer(worker, repeats)
    found = []
    for point in points:
        found.append(meter.measure(point))
        done(
            f"{point.decodes} decodes, {point.chunks} chunks of {point.new}, "
            f"{max(point.context, point.cached)} tokens before"
        )
    return found
