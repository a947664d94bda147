"""Records of simulated requests: one of each request, the gaps between tokens, the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxserve.api.attainment import Promise, in_time
from jaxserve.api.batch import Batch
from jaxserve.api.errors import RequestError
from jaxserve.api.events import Event, Finished
from jaxserve.api.request import Request
from jaxserve.lab.quotients import per_later_token, quotient
from jaxserve.lab.simulate.replica import StagePassage
from jaxserve.replica.protocol import Sink


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Fate of one completion of a request, in clock seconds and tokens.

    reason: why it ended; 'refused' where it never began, 'unfinished' where the run was cut off.
    due: when its first token was to come; first: when it came. cached: tokens of the prompt whose
    KV was reused. A request without a first token has `output` 0 and `first` at its end.
    tpot_given, tbt_given: its other objectives, see `Promise`. longest_gap, slow_gaps: see
    `Timing`.
    """

    id: str
    kind: str
    prompt: int
    output: int
    cached: int
    arrival: float
    due: float
    first: float
    end: float
    reason: str
    tpot_given: float = float("inf")
    tbt_given: float | None = None
    longest_gap: float = 0.0
    slow_gaps: float = 0.0

    @property
    def in_time(self) -> bool:
        """True if it came to its end and kept all its objectives."""
        promise = Promise(self.due - self.arrival, self.tpot_given, self.tbt_given)
        return bool(in_time(self.reason, promise.kept(self.ttft, self.tpot, self.slow_gaps)))

    @property
    def ttft(self) -> float:
        return self.first - self.arrival

    @property
    def tpot(self) -> float:
        """Mean seconds per output token after the first; 0 without one."""
        return per_later_token(self.end - self.first, self.output)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One batch on its way through the stages.

    start, end: clock seconds at which it entered the first stage and left the last. pace: seconds
    in one stage. decodes: tokens of decoding sequences. chunks: (sequence number, first token,
    tokens) of each prefill chunk.
    """

    start: float
    end: float
    pace: float
    decodes: int
    chunks: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Outcome:
    """Results of a run.

    records: one per request. gaps: seconds between consecutive tokens, of all sequences. steps:
    empty unless they were kept. busy: share of the time in which the devices worked. refusals: how
    many requests were not taken, by the error of the first of a kind.
    """

    records: list[RequestRecord]
    gaps: np.ndarray
    steps: list[StepRecord]
    busy: float
    refusals: Mapping[str, int] = field(default_factory=dict)


@dataclass
class Recorder:
    """Collects what becomes of requests, from their events and from a replica's steps.

    gaps: per step, seconds since the token before of each sequence that decodes. busy: seconds of
    work of one stage. keep_steps: whether `steps` are kept; a long run has millions.
    """

    keep_steps: bool = False
    records: list[RequestRecord] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    gaps: list[np.ndarray] = field(default_factory=list)
    busy: float = 0.0
    # what was said of refused requests, by status and field
    refusals: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    # completions that have not ended, by the request's id
    pending: dict[str, int] = field(default_factory=dict)
    # per slot: clock seconds of its last token
    _last_token: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def sink(self, request: Request, kind: str, due: float, promise: Promise) -> Sink:
        """A sink that records how the request ends. due: clock seconds for its first token, which
        counts in place of what is promised of that."""
        self.pending[request.id] = request.sampling.n

        def hear(events: Sequence[Event]) -> None:
            for event in events:
                if isinstance(event, Finished):
                    self._ended(request.id)
                    self.records.append(_record(request, kind, due, promise, event))

        return hear

    def refused(self, request: Request, kind: str, error: RequestError) -> None:
        """Records a request that the replica did not take, and why."""
        self.refusals.setdefault((error.status, error.field), []).append(str(error))
        del self.pending[request.id]
        time = request.arrival
        prompt = len(request.prompt)
        self.records.append(
            RequestRecord(request.id, kind, prompt, 0, 0, time, time, time, time, "refused")
        )

    def _ended(self, request_id: str) -> None:
        self.pending[request_id] -= 1
        if not self.pending[request_id]:
            del self.pending[request_id]

    def step_issued(self, batch: Batch, passage: StagePassage) -> None:
        """A batch was issued to the stages."""
        self.busy += passage.seconds
        if self.keep_steps:
            self.steps.append(_step(batch, passage))

    def step_read(self, batch: Batch, now: float) -> None:
        """The tokens of a batch were read."""
        slots = batch.slot.astype(np.intp)  # by which numpy looks up fastest
        newest = max(slots.tolist(), default=-1)
        if newest >= len(self._last_token):
            self._last_token = np.pad(self._last_token, (0, newest + 1 - len(self._last_token)))
        decodes = slots[: np.count_nonzero(batch.is_decode)]  # come first
        self.gaps.append(now - self._last_token[decodes])
        self._last_token[slots[batch.sample]] = now

    def outcome(self) -> Outcome:
        span = span_of(self.records)
        gaps = np.concatenate([np.empty(0), *self.gaps])
        refusals = {errors[0]: len(errors) for errors in self.refusals.values()}
        busy = quotient(self.busy, span)
        return Outcome(self.records, gaps, self.steps, busy, refusals)


def span_of(records: Sequence[RequestRecord]) -> float:
    """Clock second at which the last request ended."""
    return max((record.end for record in records), default=0.0)


def _record(
    request: Request, kind: str, due: float, promise: Promise, event: Finished
) -> RequestRecord:
    time = request.arrival
    usage = event.usage
    timing = event.timing
    return RequestRecord(
        request.id,
        kind,
        usage.prompt,
        usage.completion,
        usage.cached,
        time,
        due,
        time + timing.first_token,
        time + timing.total,
        event.reason,
        promise.tpot,
        promise.tbt,
        timing.longest_gap,
        timing.slow_gaps,
    )


def _step(batch: Batch, passage: StagePassage) -> StepRecord:
    rows = np.flatnonzero(batch.is_chunk)
    chunks = tuple(
        zip(batch.seq[rows].tolist(), batch.start[rows].tolist(), batch.length[rows].tolist())
    )
    decodes = len(batch.slot) - len(rows)
    return StepRecord(passage.start, passage.end, passage.seconds, decodes, chunks)
