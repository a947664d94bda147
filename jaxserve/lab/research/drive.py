"""Puts a load on one replica and records what becomes of each request, live and in virtual time
alike.

Latencies count from the planned moment of an arrival, so that a driver that falls behind does
not flatter the replica.
"""

from __future__ import annotations

import dataclasses
import queue
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Event, Finished, Token
from jaxserve.api.request import Request, Slo
from jaxserve.lab.research.prompts import prompt_ids
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.recorder import Outcome, Recorder, RequestRecord
from jaxserve.lab.simulate.replica import VirtualReplica
from jaxserve.lab.simulate.run import execute, outcome_summary, requests, submit, tpot_by_kind
from jaxserve.settings.schema import SchedulerConfig

FIGURES = (
    *("span", "tokens_per_s", "goodput_per_s", "goodput_tokens_per_s", "token_gap"),
    *("refused", "all"),
)
REQUEST_SECONDS = 600.0  # in which some request of a live replica must end
Sink = Callable[[Sequence[Event]], None]


class LiveRun:
    """One load on a live engine, which was started. name: begins the requests' ids. seed: of the
    prompts."""

    def __init__(self, engine: Any, name: str, seed: int = 0):
        self._engine = engine
        self._name = name
        self._seed = seed
        self._recorder = Recorder()
        self._gaps: list[float] = []
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._running = 0
        self._began = engine.now()

    def at_their_times(self, arrivals: Sequence[Arrival]) -> Outcome:
        """Sends each request when it is due. Errors: TimeoutError."""
        for number, arrival in enumerate(arrivals):
            due = self._began + arrival.time
            time.sleep(max(0.0, due - self._engine.now()))
            self._send(arrival, number, due)
        return self._outcome()

    def at_once(self, arrivals: Sequence[Arrival], concurrency: int) -> Outcome:
        """Sends `concurrency` requests, and the next when one has ended. Errors: TimeoutError."""
        for number, arrival in enumerate(arrivals):
            if self._running == concurrency:
                self._wait()
            self._send(arrival, number, self._engine.now())
        return self._outcome()

    def _outcome(self) -> Outcome:
        while self._running:
            self._wait()
        summary = self._recorder.outcome()
        records = [_since(record, self._began) for record in summary.records]
        return dataclasses.replace(summary, records=records, gaps=np.array(self._gaps))

    def _wait(self) -> None:
        try:
            self._ended.get(timeout=REQUEST_SECONDS)
        except queue.Empty:
            raise TimeoutError(f"no request ended for {REQUEST_SECONDS:g} s") from None
        self._running -= 1

    def _send(self, arrival: Arrival, number: int, at: float) -> None:
        engine = self._engine
        ((plan, kind),) = requests(
            [arrival], engine.info.max_model_len, Slo(), engine.info.class_names
        )
        request = Request.make(
            f"{self._name}{number}",
            prompt_ids(arrival, number, engine.info.vocab, (self._seed,)),
            plan.sampling,
            classes=engine.info.class_names,
            slo=plan.slo,
            vocab=engine.info.vocab,
            max_len=engine.info.max_model_len,
            arrival=at,
            tenant=plan.tenant,
        )
        times = engine.scheduler.times
        record = self._recorder.sink(request, kind, times.deadline(request), times.promise(request))
        try:
            engine.submit(request, self._sink(record))
            self._running += 1
        except RequestError as error:
            self._recorder.refused(request, kind, error)

    def _sink(self, record: Sink) -> Sink:
        """Wraps a sink that also notes the seconds between tokens, and the end."""
        last: float | None = None

        def hear(events: Sequence[Event]) -> None:
            nonlocal last
            record(events)
            for event in events:
                if isinstance(event, Token):
                    now = time.perf_counter()
                    if last is not None:
                        self._gaps.append(now - last)
                    last = now
                elif isinstance(event, Finished):
                    self._ended.put(None)

        return hear


def _since(record: RequestRecord, began: float) -> RequestRecord:
    """The record with seconds since the run began."""
    times = {name: getattr(record, name) - began for name in ("arrival", "due", "first", "end")}
    return dataclasses.replace(record, **times)


def virtual(
    replica: VirtualReplica, arrivals: Sequence[Arrival], concurrency: int | None
) -> Outcome:
    """The outcome of a load in virtual time. concurrency: requests that run at once, where the next
    comes when one has ended; None: each comes at its time."""
    if concurrency is None:
        return execute(replica, arrivals)
    recorder = Recorder()
    replica.listeners.append(recorder)
    replica.start()
    info = replica.info
    for request, kind in requests(arrivals, info.max_model_len, Slo(), info.class_names):
        while len(recorder.pending) == concurrency:
            replica.advance(replica.next_event())
        submit(replica, recorder, dataclasses.replace(request, arrival=replica.now()), kind)
    replica.advance(float("inf"))
    return recorder.outcome()


def figures(outcome: Outcome, scheduler: SchedulerConfig) -> dict[str, Any]:
    """Sums up a run as `outcome_summary` does, without the kinds of requests."""
    summary = outcome_summary(outcome, scheduler.tpot, tpot_by_kind(scheduler))
    return {name: summary[name] for name in FIGURES}
