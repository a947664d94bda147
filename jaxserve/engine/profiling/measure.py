"""Measures how long steps take on these devices: the points that a profile is fitted to.

Steps are issued one after the other, as while serving, with made-up tokens on pages spread over the
pool; nothing of the scheduler takes part. The time of a step is what each further one adds, so that
neither the way through the stages nor the wait at the end counts.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass

import numpy as np

from jaxserve.api.batch import DEFAULT_EXCHANGE, Batch
from jaxserve.engine.command import NO_SAMPLING, StepCommand, StepResult
from jaxserve.engine.command_builder import GREEDY
from jaxserve.engine.executor import CommandExecutor
from jaxserve.engine.stage_plan import StagePlan
from jaxserve.engine.step_rows import StepArrays, StepRows
from jaxserve.engine.step_shapes import EMPTY, StepShape, spread_rows
from jaxserve.lanes.groups import group_around

STEPS = 3  # whose time is taken at once
LONG = 0.1  # seconds; the time of a longer step is taken alone


@dataclass(frozen=True)
class MeasurePoint:
    """A step: on every lane decodes, each after `context` tokens; on every group of `group_size`
    lanes, or on the first `groups` of them, chunks of `new` tokens after `cached` ones, which are
    spread over the group and meet by `exchange`; a group of one lane has local chunks. Decodes are
    spread over their group where there are no chunks, and local beside chunks. sample: whether
    tokens are sampled. moves: pages that change lanes, from each lane of a group to each."""

    decodes: int = 0
    context: int = 0
    chunks: int = 0
    cached: int = 0
    new: int = 0
    sample: bool = True
    group_size: int = 1
    exchange: str = DEFAULT_EXCHANGE
    groups: int = 0  # 0: all
    moves: int = 0

    def longest(self) -> int:
        """Tokens of the longest sequence, those of the step included."""
        decode = (self.context + 1) * (self.decodes > 0)
        chunk = (self.cached + self.new) * (self.chunks > 0)
        return max(decode, chunk)

    def pairs(self) -> int:
        """Pairs of a token that attends and a token before it, on a lane."""
        chunks = self.chunks * self.new * self.cached // self.group_size
        return self.decodes * self.context + chunks

    def __str__(self) -> str:
        before = max(self.context, self.cached)
        text = f"{self.decodes} decodes, {self.chunks} chunks of {self.new}, {before} tokens before"
        if self.group_size > 1:
            text += f", {self.exchange} on {self.group_size} lanes"
        if self.groups:
            text += f", {self.groups} at work"
        return text + (f", {self.moves} pages move" if self.moves else "")


@dataclass(frozen=True)
class MeasuredStep:
    """Seconds per step of a point, the batch that it was, and the shape in which it ran. unmoved:
    of a point that moves pages, seconds of the same step without, which ran in turn with it."""

    point: MeasurePoint
    batch: Batch
    shape: StepShape
    seconds: float
    unmoved: float = 0.0


def batch_of(point: MeasurePoint, lanes: int, block_size: int, stripe: int = 1) -> Batch:
    """A point as a batch, decodes first. stripe: consecutive blocks of a spread chunk's sequence on
    one lane; the chunk's home is the lane of its last block, as a ring needs it."""
    groups = point.groups or lanes // point.group_size
    decodes = lanes * point.decodes
    count = decodes + groups * point.chunks
    row = np.arange(count)
    is_decode = row < decodes
    start = np.where(is_decode, point.context, point.cached).astype(np.int32)
    length = np.where(is_decode, 1, point.new).astype(np.int32)
    block_lane = _striped(-(-point.longest() // block_size), point.group_size, stripe)
    chunk_lane = block_lane[point.cached // block_size : -(-point.longest() // block_size)]
    first = np.repeat(np.arange(groups) * point.group_size, point.chunks)
    home = first + (chunk_lane[-1] if point.group_size > 1 else 0)
    lane = np.concatenate([np.repeat(np.arange(lanes), point.decodes), home]).astype(np.int32)
    blocks_per_lane = np.zeros((count, lanes), np.int32)
    blocks_per_lane[row, lane] = -(-(start + length) // block_size)
    group_size = np.where(is_decode & (point.chunks > 0), 1, point.group_size).astype(np.int32)
    share = np.bincount(block_lane, minlength=point.group_size)
    for spread in np.flatnonzero(group_size > 1).tolist():
        group = group_around(int(lane[spread]), point.group_size)
        blocks_per_lane[spread] = 0
        blocks_per_lane[spread, group.start : group.stop] = share
    spread_lane = chunk_lane + first[:, None] if point.group_size > 1 else np.empty(0)
    return Batch(
        number=0,
        seq=row,
        slot=row.astype(np.int32),
        lane=lane,
        start=start,
        length=length,
        is_decode=is_decode,
        sample=np.full(count, point.sample),
        group_size=group_size,
        blocks_per_lane=blocks_per_lane,
        block_lane=spread_lane.reshape(-1).astype(np.int32),
        exchange=point.exchange if point.chunks else DEFAULT_EXCHANGE,
        decode_exchange=DEFAULT_EXCHANGE if point.chunks else point.exchange,
        tokens=np.ones(int(length[~is_decode].sum()), np.int32),
        moves=_moves(lanes, point.group_size, point.moves),
        table_updates=np.empty((0, 5), np.int32),
        seconds=0.0,
        admitted=(),
    )


def _moves(lanes: int, group_size: int, count: int) -> np.ndarray:
    """Returns moves [m, 4] of `count` pages from each lane to each other one of its group: the
    lane's first pages, to pages of which no other one is written."""
    lane, to_lane, page = (
        each.reshape(-1) for each in np.meshgrid(*map(np.arange, (lanes, lanes, count)))
    )
    target = lane % group_size * count + page
    moves = np.stack([lane, page, to_lane, target], 1).astype(np.int32)
    return moves[(lane // group_size == to_lane // group_size) & (lane != to_lane)]


def _striped(blocks: int, lanes: int, stripe: int) -> np.ndarray:
    """Returns the lane [blocks] of a group that has each block of a sequence."""
    return np.arange(blocks) // stripe % lanes


def first_token(
    plan: StagePlan,
    execute: Callable[[StepCommand], None],
    wait: Callable[[], StepResult],
    uncompiled: Set[StepShape] = frozenset(),
) -> None:
    """Has devices make one token, through all stages, of made-up state: they need a reset
    afterwards. uncompiled: shapes that the step may not have. Errors: as of `execute` and `wait`,
    where none comes."""
    batch = batch_of(MeasurePoint(decodes=1, context=1), plan.mesh.kvp, plan.block_size)
    demand = plan.demand(batch)
    shape = plan.shape_for(demand, but=uncompiled)
    assert shape is not None, "no compiled shape holds a decode"
    arrays = StepRows(batch, demand, shape, plan.block_size, page_groups=plan.page_groups).arrays()
    execute(
        StepCommand(
            number=0, shape=plan.shapes.index(shape), variant=GREEDY, rows=arrays.rows, reset=True
        )
    )
    assert wait().tokens is not None, "a step that samples left no token"


class StepTimer:
    """Measures points on a worker that serves no requests. Made-up tokens are written to `pages`,
    at first all of each lane. sampled: notes how many steps sampled tokens, for the writer of
    other commands."""

    def __init__(
        self, worker: CommandExecutor, sampled: Callable[[int], None] = lambda count: None
    ):
        self.pages = np.arange(worker.plan.pages)
        self._sampled = sampled
        self._worker = worker
        self._plan = worker.plan
        self._mesh = worker.plan.mesh
        self._longest = worker.plan.width * worker.plan.block_size
        self._ran: set[StepShape] = set()
        # slots whose rows of the page table were written: size of the groups they are for
        self._tables: dict[int, int] = {}
        # blocks that follow each other on a lane
        self._stripe = max(1, worker.plan.tile // worker.plan.block_size)

    def use(self, pages: np.ndarray) -> None:
        """Uses these pages [n] of each lane from now on, after other steps may have run."""
        self.pages = pages
        self._tables.clear()

    def measure(self, point: MeasurePoint) -> MeasuredStep:
        """Measures one point once. Errors: ValueError for a point that no compiled shape or no page
        table holds."""
        points = [point]
        if point.moves:
            points.append(dataclasses.replace(point, moves=0))
        commands = [self._command(each) for each in points]
        seconds, *unmoved = [max(self._seconds(each), 1e-9) for each in commands]
        shape = self._plan.shapes[commands[0].shape]
        return MeasuredStep(point, self._batch(point), shape, seconds, *unmoved)

    def _command(self, point: MeasurePoint) -> StepCommand:
        """Returns a point's step, whose program has run."""
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
        return command

    def _batch(self, point: MeasurePoint) -> Batch:
        return batch_of(point, self._mesh.kvp, self._plan.block_size, self._stripe)

    def _seconds(self, command: StepCommand) -> float:
        """Measures the seconds of each further step of this command."""
        if self._mesh.spp > 1:  # as many as fill the stages do not count
            few = self._mesh.spp
            return (self._run(command, few + STEPS) - self._run(command, few)) / STEPS
        alone = self._run(command, 1)
        return alone if alone > LONG else self._run(command, STEPS) / STEPS

    def arrays(self, point: MeasurePoint) -> StepArrays:
        """A point as the rows of a compiled shape; its page table is written. Errors: ValueError
        for a point that no compiled shape or no page table holds."""
        plan = self._plan
        batch = self._batch(point)
        demand = plan.demand(batch)
        shape = plan.shape_for(
            demand, batch.exchange, batch.decode_exchange, self._worker.uncompiled
        )
        if shape is None or point.longest() > self._longest:
            raise ValueError(
                f"{point} fits no compiled shape, or is longer than {self._longest} tokens"
            )
        for slot, spread in zip(batch.slot.tolist(), batch.spread.tolist()):
            self._write_table(slot, point.group_size if spread else 1)
        return StepRows(
            batch, demand, shape, plan.block_size, page_groups=plan.page_groups
        ).arrays()

    def _run(self, command: StepCommand, steps: int) -> float:
        """Runs steps one after the other; returns the seconds of all."""
        began = time.perf_counter()
        for _ in range(steps):
            self._worker.execute(command)
        if command.variant != NO_SAMPLING:
            self._sampled(steps)
        self._worker.settle()
        return time.perf_counter() - began

    def _write_table(self, slot: int, group_size: int) -> None:
        """A row of the page table on all lanes, with pages from all over the pool, as after hours
        of serving, of a sequence that is spread over groups of this size."""
        plan = self._plan
        if self._tables.get(slot) == group_size:
            return
        self._tables[slot] = group_size
        block_lane = _striped(plan.width, group_size, self._stripe)
        for lane in range(self._mesh.kvp):
            blocks = np.flatnonzero(block_lane == lane % group_size)
            at = np.arange(len(blocks))
            pages = self.pages[(slot * plan.width + at * 7919) % len(self.pages)]
            columns = [np.full_like(at, lane), np.full_like(at, slot), at, pages, blocks]
            columns += [pages] * (len(plan.windows))
            updates = np.stack(columns, 1).astype(np.int32)
            self._worker.execute(StepCommand(number=0, table_updates=updates))


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
    widths = sorted({shape.prefill.width for shape in shapes if shape.prefill.rows == 1})
    longest_context = longest - 1 - min(widths, default=0)
    contexts = [4**power for power in range(4, 16) if 2 * 4**power <= longest_context]
    if longest_context > 0:
        contexts.append(longest_context)
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
    """Fills a shape with sequences without context, at most `slots` of them."""
    rows, width = shape.prefill
    beside = slots - 1 if shape.decode.rows else slots
    chunks = min(rows, max(1, beside))
    new = 0
    if chunks:
        new = min(width * (rows // chunks), longest - 1)
    decodes = min(shape.decode.rows, slots - chunks)
    return MeasurePoint(decodes=decodes, context=1, chunks=chunks, new=new, sample=bool(decodes))


def spread_grid(
    shapes: list[StepShape], lanes: int, longest: int, slots: int, pairs: float = float("inf")
) -> Iterator[MeasurePoint]:
    """At most ten points with spread chunks for each size of group and exchange among the shapes:
    a full step and a small one, of prompts without context, and at a middling and at a long one;
    two of them beside decodes, and two on one group while the others have nothing to do. Points of
    more `pairs` are left out."""
    rows: dict[tuple[int, str], list[int]] = {}
    width = 1
    for shape in shapes:
        if shape.spread_prefill.rows:
            short = spread_rows(EMPTY, shape.exchange).rows  # rows that are kept for pieces
            at = shape.group_size, shape.exchange
            rows.setdefault(at, []).append(shape.spread_prefill.rows - short)
            width = shape.spread_prefill.width
    for (size, exchange), counts in rows.items():
        unit = width * size  # whole rows on every lane
        new = [each for each in sorted({min(counts) * unit, max(counts) * unit}) if each < longest]
        if not new:
            continue
        longest_context = (longest - 1 - new[-1]) // unit * unit
        contexts = sorted({0, longest_context // 8 // unit * unit, longest_context})
        chunk = MeasurePoint(chunks=1, sample=False, group_size=size, exchange=exchange)
        points = [
            dataclasses.replace(chunk, cached=cached, new=each)
            for cached in contexts
            for each in new
        ]
        for cached, each in zip(contexts[-2:], (new[-1], new[0])):
            far = dataclasses.replace(chunk, cached=cached, new=each)
            if slots > 1:
                points.append(
                    dataclasses.replace(far, decodes=slots - 1, context=cached, sample=True)
                )
            if size < lanes:
                points.append(dataclasses.replace(far, groups=1))
        yield from (point for point in points if point.pairs() <= pairs)


def spread_decode_grid(
    shapes: list[StepShape], longest: int, slots: int, pairs: float = float("inf")
) -> Iterator[MeasurePoint]:
    """At most six points with spread decodes for each size of group and exchange that decodes have
    among the shapes: one on each lane and as many as a shape holds, at three contexts. Points of
    more `pairs` are left out."""
    rows: dict[tuple[int, str], int] = {}
    for shape in shapes:
        beside = shape.prefill.rows + shape.spread_prefill.rows
        if shape.spread_decode.rows and not beside and not shape.moves:
            at = shape.group_size, shape.decode_exchange
            rows[at] = max(rows.get(at, 1), min(shape.spread_decode.rows, slots))
    contexts = sorted({max(1, longest // 16), max(1, longest // 4), longest - 1})
    for (size, exchange), most in rows.items():
        points = [
            MeasurePoint(decodes=count, context=context, group_size=size, exchange=exchange)
            for context in contexts
            for count in sorted({1, most})
        ]
        yield from (point for point in points if point.pairs() <= pairs)


def move_grid(
    shapes: list[StepShape], longest: int, slots: int, pages: int, pairs: float = float("inf")
) -> Iterator[MeasurePoint]:
    """At most eight points that move pages for each size of group that has shapes for it: a quarter
    of the pages that a step moves, and all, beside decodes (one on each lane, and as many as there
    may be) and beside spread chunks without context (a small step and a full one). pages: of a
    lane. Points of more `pairs` are left out."""
    moving = [shape for shape in shapes if shape.moves]
    for size in sorted({shape.group_size for shape in moving}):
        mine = [shape for shape in moving if shape.group_size == size]
        most = min(max(shape.moves for shape in mine), pages // size)
        counts = sorted({max(1, most // 4), most})
        steps = [
            MeasurePoint(decodes=count, context=max(1, longest // 4), group_size=size)
            for count in sorted({1, min(slots, max(shape.spread_decode.rows for shape in mine))})
        ]
        chunks = [
            shape.spread_prefill
            for shape in mine
            if shape.spread_prefill.rows and shape.exchange == DEFAULT_EXCHANGE
        ]
        tokens = {group.tokens * size for group in chunks}
        steps += [
            MeasurePoint(chunks=1, new=new, sample=False, group_size=size)
            for new in sorted({min(tokens), max(tokens)} if tokens else ())
            if new < longest
        ]
        for step, count in itertools.product(steps, counts):
            if step.pairs() <= pairs:
                yield dataclasses.replace(step, moves=count)
