"""The journal of a replica: the steps of the last two minutes with their chunks, and the requests
that ended in the last one.

A step over 256 sequences is recorded in a few microseconds: its arrays are kept as they came in
the batch, by reference, and become lists only for a `view`. All that is kept is
bounded. Times are clock seconds.

With one stage a step ran since it was issued, or since the one before it was read. With several
only its issue and its reading are known: in between each stage has it for as long as was predicted,
and none has two steps at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

import numpy as np

from jaxserve.api.events import Finished
from jaxserve.scheduling.events import (
    Admitted,
    CompletionEnded,
    EventBus,
    StepIssued,
    StepRead,
    StepsLost,
)

# most steps, chunks of all steps together, age
STEPS = 4096
ROWS = 1 << 18
SECONDS = 120.0
# most completions that ended, age
ENDS = 1024
END_SECONDS = 60.0
NAMES = 1 << 14  # sequences whose requests are remembered
NO_NUMBER = -1  # of a completion that ended before it had a slot

Spans = list[tuple[float, float]]  # per stage: from when to when


@dataclass(slots=True)
class JournalStep:
    """A batch that was issued, all of its layers. number: counts all that were. Arrays are the
    batch's; `spread_blocks` where prompts on several lanes are in it. `spans` and `took` (seconds
    since the step before it was read, or since it was issued where that was later) are known once
    it was read."""

    number: int
    issued: float
    predicted: float
    seq: np.ndarray
    lane: np.ndarray
    start: np.ndarray
    length: np.ndarray
    feed: np.ndarray
    spread_blocks: np.ndarray | None
    spans: Spans
    took: float = 0.0


@dataclass(frozen=True, slots=True)
class JournalEnd:
    """A completion that ended. ttft_budget, tpot: its objectives, seconds from arrival to the first
    token and per output token."""

    number: int
    request_id: str
    index: int
    class_name: str | None
    arrival: float
    ttft_budget: float
    tpot: float
    event: Finished

    @property
    def at(self) -> float:
        return self.arrival + self.event.timing.total


class Journal:
    """The journal of one replica. born: clock seconds at which it begins, by which its readers tell
    it from one of another start."""

    def __init__(self, stages: int, born: float):
        self.born = born
        self.steps: deque[JournalStep] = deque()  # read, oldest first
        self.flying: deque[JournalStep] = deque()  # issued and not read, oldest first
        self.ends: deque[JournalEnd] = deque(maxlen=ENDS)
        # number of a sequence -> request id, completion
        self.names: dict[int, tuple[str, int]] = {}
        self.running: dict[tuple[str, int], int] = {}  # and back, of those that run
        self._until = [born] * stages  # until when each stage was busy
        self._read = born
        self.rows = 0  # chunks of `steps`
        self._issued = 0  # steps

    @property
    def newest(self) -> int:
        """Number of the step that was read last; -1 before the first one."""
        if not self.steps:
            return -1
        return self.steps[-1].number

    def listen(self, bus: EventBus) -> None:
        """Records what happens from now on."""
        bus.subscribe(Admitted, self._admitted)
        bus.subscribe(StepIssued, self._step_issued)
        bus.subscribe(StepRead, self._step_read)
        bus.subscribe(StepsLost, self._steps_lost)
        bus.subscribe(CompletionEnded, self._completion_ended)

    def _admitted(self, event: Admitted) -> None:
        sequence = event.sequence
        if sequence.request.probe:
            return
        name = sequence.id, sequence.index
        self.names[sequence.number] = name
        self.running[name] = sequence.number
        if len(self.names) > NAMES:
            del self.names[next(iter(self.names))]

    def _step_issued(self, event: StepIssued) -> None:
        batch = event.batch
        spread_blocks = batch.blocks_per_lane if batch.block_lane.size else None
        self.flying.append(
            JournalStep(
                self._issued,
                event.now,
                batch.seconds,
                batch.seq,
                batch.lane,
                batch.start,
                batch.length,
                ~batch.is_chunk,
                spread_blocks,
                [],
            )
        )
        self._issued += 1
        self.rows += batch.seq.size

    def _step_read(self, event: StepRead) -> None:
        """Records that the oldest step in flight has left the stages."""
        now = event.now
        step = self.flying.popleft()
        step.took = now - max(step.issued, self._read)
        step.spans = _spans(step, self._until, now)
        self._read = now
        steps = self.steps
        steps.append(step)
        while len(steps) > 1 and (
            len(steps) > STEPS or self.rows > ROWS or steps[0].issued < now - SECONDS
        ):
            self.rows -= steps.popleft().seq.size

    def _steps_lost(self, event: StepsLost) -> None:
        self.rows -= sum(step.seq.size for step in self.flying)
        self.flying.clear()

    def _completion_ended(self, ended: CompletionEnded) -> None:
        request = ended.request
        event = ended.event
        if request.probe:
            return
        number = self.running.pop((request.id, event.index), NO_NUMBER)
        self.ends.append(
            JournalEnd(
                number,
                request.id,
                event.index,
                request.slo.class_name,
                request.arrival,
                ended.ttft_deadline - request.arrival,
                ended.tpot,
                event,
            )
        )

    def since(self, number: int, limit: int) -> list[JournalStep]:
        """Returns at most `limit` steps that were read, from this number on, oldest first."""
        first = bisect_left(self.steps, number, key=attrgetter("number"))
        return list(islice(self.steps, first, first + limit))

    def expected(self) -> list[tuple[JournalStep, Spans]]:
        """Steps in flight, oldest first, and when each stage should have them."""
        until = list(self._until)
        return [(step, _spans(step, until, None)) for step in self.flying]


def _spans(step: JournalStep, until: list[float], end: float | None) -> Spans:
    """Returns from when to when a step was in each stage, and advances `until`, the clock seconds
    until which stages are busy. end: None while the step runs."""
    spans: Spans = []
    start = step.issued
    stages = len(until)
    for stage in range(stages):
        start = max(start, until[stage])
        if end is None:
            stop = start + step.predicted
        elif stage < stages - 1:
            stop = start + max(0.0, min(step.predicted, (end - start) / (stages - stage)))
        else:
            stop = end
            if stages > 1:
                start = max(start, end - step.predicted)
        spans.append((start, stop))
        until[stage] = start = stop
    return spans
