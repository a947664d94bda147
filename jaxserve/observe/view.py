"""The live page of a replica, as plain data for JSON: steps and their chunks, requests that run,
wait or ended, pages.

It is taken in two parts. What changes from step to step (`Snapshot.take`) needs the replica to
stand still for a moment; steps and ends do not change any more and are turned to lists after that
(`shown`). Every list is bounded, and beside it stands how many were left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from jaxserve.cache import PageCounts
from jaxserve.observe.journal import END_SECONDS, Journal, JournalEnd, JournalStep, Spans
from jaxserve.policies import relative_slack
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.slots import DECODE
from jaxserve.scheduling.waiting_queue import smallest_first

STEPS = 128  # of one view; the next one goes on after them
# of a step, named one by one
DECODES = 32
CHUNKS = 64
# requests
RUNNING = 256
WAITING = 128
ENDED = 256

COLUMNS = (
    *("number", "id", "index", "class", "state", "arrival", "prompt", "prefilled", "cached"),
    *("generated", "ttft_given", "slack", "relative_slack", "ttft", "tpot_given", "tpot"),
)
REQUEST_COLUMNS = (*COLUMNS, "lane")
END_COLUMNS = (*COLUMNS, "ended", "in_time", "longest_gap")
ID = COLUMNS.index("id")


@dataclass(frozen=True)
class Snapshot:
    """A replica at one moment, `now`. requests: rows of REQUEST_COLUMNS."""

    now: float
    born: float
    steps: list[JournalStep]
    flying: list[tuple[JournalStep, Spans]]
    newest: int  # step that was read last, -1 where none was
    requests: list[list[Any]]
    left_out: dict[str, int]  # running and waiting sequences that have no row
    counts: dict[str, int]  # running and waiting sequences
    ends: list[JournalEnd]
    pages: list[PageCounts]  # per lane: free, cached, held
    copied: list[int]  # of these pages, those whose block is on other lanes too
    reads: list[int]  # per lane, blocks that a step reads in which all running sequences decode
    segment: int  # consecutive blocks of a sequence that are placed as one
    names: dict[int, tuple[str, int]]

    @classmethod
    def take(cls, journal: Journal, scheduler: Scheduler, now: float, since: int) -> Snapshot:
        """since: the first step that is wanted."""
        counts = {"running": scheduler.slots.running, "waiting": scheduler.slots.waiting}
        requests: list[list[Any]] = []
        left_out = {}
        for name, rows in (
            ("running", _running(scheduler, now)),
            ("waiting", _waiting(scheduler, now)),
        ):
            shown = [row for row in rows if row is not None]
            counts[name] -= len(rows) - len(shown)
            left_out[name] = counts[name] - len(shown)
            requests += shown
        steps = journal.since(since, STEPS)
        flying = journal.expected()
        newest = journal.newest
        return cls(
            now,
            journal.born,
            steps,
            flying,
            newest,
            requests,
            left_out,
            counts,
            list(journal.ends),
            scheduler.cache.pages.by_lane(),
            scheduler.cache.pages.copied_by_lane(),
            scheduler.cache.reads.tolist(),
            scheduler.cache.placement.stripe,
            journal.names,
        )

    def shown(self) -> dict[str, Any]:
        """For JSON. Times are clock seconds; `next` is the step to ask for next time, `more`
        whether there is one already."""
        ends = [end for end in self.ends if end.at >= self.now - END_SECONDS]
        steps = [_step(step, step.spans) for step in self.steps]
        flying = [_step(*pair) for pair in self.flying]
        last = self.steps[-1].number if self.steps else self.newest
        numbers = {chunk[0] for step in steps + flying for chunk in step["chunks"]}
        names = {number: name for number in numbers if (name := self.names.get(number))}
        return {
            "now": _round(self.now),
            "born": _round(self.born),
            "next": last + 1,
            "more": last < self.newest,
            "steps": steps,
            "flying": flying,
            "names": names,
            "columns": REQUEST_COLUMNS,
            "requests": self.requests,
            "end_columns": END_COLUMNS,
            "ended": [_end(end) for end in ends[-ENDED:]],
            "pages": self.pages,
            "copied": self.copied,
            "reads": self.reads,
            "segment": self.segment,
            **self.counts,
            "left_out": {**self.left_out, "ended": max(0, len(ends) - ENDED)},
        }


def _running(scheduler: Scheduler, now: float) -> list[list[Any] | None]:
    """Rows of sequences with a slot, those that are prefilled first."""
    slots = scheduler.slots
    home = scheduler.cache.home
    prefilling = [
        _row(
            sequence, "prefilling", now, int(slots.issued[sequence.slot]), int(home[sequence.slot])
        )
        for sequence in slots.prefilling[:RUNNING]
    ]
    decoding = np.flatnonzero(slots.phase == DECODE)[: RUNNING - len(prefilling)]
    return prefilling + [
        _row(slots.by_slot[slot], "decoding", now, None, int(home[slot]))
        for slot in decoding.tolist()
    ]


def _waiting(scheduler: Scheduler, now: float) -> list[list[Any] | None]:
    """Rows of those that wait, least relative slack first."""
    queue = scheduler.slots.queue
    slack = queue.view_among(now, ()).relative_slack
    return [
        _row(queue[place], "waiting", now, 0, None)
        for place in islice(smallest_first(slack, WAITING), WAITING)
    ]


def _row(
    sequence: Sequence, state: str, now: float, prefilled: int | None, lane: int | None
) -> list[Any] | None:
    """The row of a sequence; None for one that is no traffic. prefilled: None for the whole
    prompt."""
    request = sequence.request
    if request.probe:
        return None
    output = len(sequence.output)
    first = sequence.first_token_at
    prompt = len(request.prompt)
    arrival = request.arrival
    due = sequence.ttft_deadline
    ttft = slack = relative = tpot = None
    if first is None:
        slack = _round(due - now - sequence.prefill_seconds_left)
        relative = _round(float(relative_slack(now, arrival, due, sequence.prefill_seconds_left)))
    else:
        ttft = _round(first - arrival)
        if output > 1 and sequence.last_token_at is not None:
            tpot = _round((sequence.last_token_at - first) / (output - 1))
    return [
        sequence.number,
        sequence.id,
        sequence.index,
        request.slo.class_name,
        state,
        _round(arrival),
        prompt,
        prompt if prefilled is None else min(prefilled, prompt),
        sequence.cached_tokens,
        output,
        _round(due - arrival),
        slack,
        relative,
        ttft,
        _round(sequence.tpot),
        tpot,
        lane,
    ]


def _end(end: JournalEnd) -> list[Any]:
    usage = end.event.usage
    ttft, tpot = (
        None if seconds is None else _round(seconds) for seconds in (end.event.ttft, end.event.tpot)
    )
    return [
        end.number,
        end.request_id,
        end.index,
        end.class_name,
        end.event.reason,
        _round(end.arrival),
        usage.prompt,
        usage.prompt if usage.completion else None,
        usage.cached,
        usage.completion,
        _round(end.ttft_budget),
        None,
        None,
        ttft,
        _round(end.tpot),
        tpot,
        _round(end.at),
        end.event.in_time,
        _round(end.event.timing.longest_gap),
    ]


def _step(step: JournalStep, spans: Spans) -> dict[str, Any]:
    """chunks: sequence, lanes, first token, tokens, whether it is a decode; of the prompts on
    several lanes all that hold some of them. decodes: per lane, how many there are with those that
    are no chunk here. left_out: chunks of prompts."""
    decodes = int(np.count_nonzero(step.feed))  # they come first
    few = min(decodes, DECODES)
    stop = decodes + CHUNKS
    named = lambda array: array[:few].tolist() + array[decodes:stop].tolist()
    lanes = [[lane] for lane in named(step.lane)]
    if step.spread_blocks is not None:
        lanes[few:] = [np.flatnonzero(row).tolist() for row in step.spread_blocks[decodes:stop]]
    feeds = [1] * few + [0] * (len(lanes) - few)
    return {
        "number": step.number,
        "issued": _round(step.issued),
        "predicted": _round(step.predicted),
        "took": _round(step.took),
        "spans": [(_round(start), _round(stop)) for start, stop in spans],
        "chunks": list(zip(named(step.seq), lanes, named(step.start), named(step.length), feeds)),
        "decodes": np.bincount(step.lane[:decodes]).tolist(),
        "left_out": max(0, step.seq.size - stop),
    }


def _round(seconds: float) -> float | None:
    """To microseconds: shorter in JSON, which knows no infinity."""
    if not math.isfinite(seconds):
        return None
    return round(seconds, 6)
