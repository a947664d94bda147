"""A virtual replica: the scheduler's batches pass through virtual stages, each for as long as the
predictor says.

Batches are issued as the live engine issues them, up to `lookahead` ahead of the stages and no
earlier than need be, so what is decided when is the same. A stage runs one batch at a time; the
next one enters as soon as the one before has left it (Medha 3.3).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Finished
from jaxserve.api.request import Request
from jaxserve.costs.predictor import Predictor
from jaxserve.scheduling import Batch, Scheduler
from jaxserve.settings.schema import MeshConfig


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What became of one request: clock seconds of its arrival, first token and end; the reason it
    ended ('refused': it never began)."""

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

    @property
    def ttft(self) -> float:
        return self.first - self.arrival

    @property
    def tpot(self) -> float:
        """Mean seconds per output token after the first; 0 where there is none."""
        return (self.end - self.first) / (self.output - 1) if self.output > 1 else 0.0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One batch: when it entered the first stage and left the last, its pace per stage, and what
    was in it."""

    start: float
    end: float
    pace: float
    decodes: int
    chunks: tuple[tuple[int, int, int], ...]  # (sequence, start, length) of the prefill chunks


@dataclass
class Pipeline:
    """Stages and when each is free again; when the last token of each slot left the last stage."""

    predictor: Predictor
    free: list[float]
    left: np.ndarray

    def enter(self, now: float, batch: Batch) -> tuple[float, float]:
        """When the batch enters the first stage and leaves the last."""
        tokens = int(batch.length.sum())
        hop = self.predictor.hop(tokens)
        head = self.predictor.head(int(np.bincount(batch.lane[batch.is_decode]).max(initial=0)))
        began = at = max(
            now, self.free[0], float(self.left[batch.slot[batch.is_decode]].max(initial=0.0))
        )
        for stage, free in enumerate(self.free):
            last = stage + 1 == len(self.free)
            self.free[stage] = at = max(at, free) + batch.seconds - (0.0 if last else head)
            at += 0.0 if last else hop
        self.left[batch.slot[batch.sample]] = at
        return began, at


@dataclass
class VirtualReplica:
    """Executes requests on a scheduler. `gaps` are the seconds between consecutive tokens of all
    sequences, step by step."""

    scheduler: Scheduler
    mesh: MeshConfig
    lookahead: int = 1
    keep_steps: bool = False
    records: list[RequestRecord] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    gaps: list[np.ndarray] = field(default_factory=list)
    busy: float = 0.0  # seconds of work of one stage

    def __post_init__(self) -> None:
        self._pipeline = Pipeline(
            self.scheduler.predictor,
            [0.0] * self.mesh.spp,
            np.zeros(self.scheduler.config.max_seqs),
        )
        self._flights: deque[tuple[float, Batch]] = deque()
        self._last = np.zeros(self.scheduler.config.max_seqs)
        self._requests: dict[str, tuple[Request, str]] = {}

    def run(self, requests: Iterable[tuple[Request, str]], until: float = float("inf")) -> None:
        """Executes (request, kind) pairs in the order of their arrival, to the end or to clock
        second `until`."""
        coming = iter(requests)
        now = 0.0
        following = next(coming, None)
        while following is not None or self._flights:
            landing = self._flights[0][0] if self._flights else float("inf")
            arrival = following[0].arrival if following is not None else float("inf")
            now = min(landing, arrival, self._due if self._due > now else float("inf"))
            if now > until:
                return
            if following is not None and arrival <= now:
                self._add(*following)
                following = next(coming, None)
            elif landing <= now:
                self._land(now)
            self._issue(now)

    def give_up(self, now: float) -> None:
        """Notes those that have not ended by then: 'unfinished', with what they had put out."""
        for id, (request, _) in list(self._requests.items()):
            for _, event in self.scheduler.cancel(id, max(now, request.arrival), "unfinished"):
                if isinstance(event, Finished):
                    self._note(id, event)

    def _add(self, request: Request, kind: str) -> None:
        try:
            self.scheduler.add(request)
            self._requests[request.id] = request, kind
        except RequestError:
            at = request.arrival
            self.records.append(
                RequestRecord(
                    request.id, kind, len(request.prompt), 0, 0, at, at, at, at, "refused"
                )
            )

    def _issue(self, now: float) -> None:
        while len(self._flights) < self.mesh.spp + self.lookahead and self._due <= now:
            batch = self.scheduler.start(now)
            if batch is None:
                return
            start, end = self._pipeline.enter(now, batch)
            self._flights.append((end, batch))
            self.busy += batch.seconds
            if self.keep_steps:
                self.steps.append(_step(batch, start, end))

    @property
    def _due(self) -> float:
        """Clock second from which on the next batch may be issued: at once, unless it would wait
        for the stages."""
        if len(self._flights) < self.mesh.spp:
            return 0.0
        return self._pipeline.free[0] - self.scheduler.predictor.early(self._flights[-1][1].seconds)

    def _land(self, now: float) -> None:
        _, batch = self._flights.popleft()
        slots = batch.slot[batch.is_decode]
        self.gaps.append(now - self._last[slots])
        self._last[batch.slot[batch.sample]] = now
        for id, event in self.scheduler.finish(batch, np.zeros(len(batch.slot), np.int32), now):
            if isinstance(event, Finished):
                self._note(id, event)

    def _note(self, id: str, event: Finished) -> None:
        request, kind = self._requests.pop(id)
        at = request.arrival
        usage = event.usage
        timing = event.timing
        self.records.append(
            RequestRecord(
                id,
                kind,
                usage.prompt,
                usage.completion,
                usage.cached,
                at,
                at + self.scheduler.ttft_objective(request),
                at + timing.first_token,
                at + timing.total,
                event.reason,
            )
        )


def _step(batch: Batch, start: float, end: float) -> StepRecord:
    rows = np.flatnonzero(~batch.is_decode)
    chunks = tuple(
        zip(batch.seq[rows].tolist(), batch.start[rows].tolist(), batch.length[rows].tolist())
    )
    return StepRecord(start, end, batch.seconds, len(batch.slot) - len(rows), chunks)
