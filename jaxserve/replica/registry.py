"""Who hears of what the engine does, and what of it is counted."""

from __future__ import annotations

import dataclasses
import logging
from collections import abc
from collections.abc import Callable

import numpy as np

from jaxserve.api.events import Event, Finished
from jaxserve.api.request import Request
from jaxserve.observe.journal import Journal
from jaxserve.observe.metrics import Metrics
from jaxserve.scheduling import Batch, Scheduler
from jaxserve.scheduling.sequence import Sequence

log = logging.getLogger(__name__)
Sink = Callable[[abc.Sequence[Event]], None]


@dataclasses.dataclass
class Subscriber:
    """Who hears of a request: its sink, its seed, how many of its completions have not ended,
    whether one of them has begun, and the ends of the others. `due` is the clock second for its
    first token, `tpot` its objective in seconds."""

    request: Request
    sink: Sink
    seed: int
    left: int
    due: float
    tpot: float
    begun: bool = False
    ends: list[Finished] = dataclasses.field(default_factory=list)


class Subscribers:
    """The subscribers of all requests that have not ended, by id. Nothing here has a lock of its
    own.

    looks_up: whether prompts are looked up in the prefix cache.
    """

    def __init__(self, scheduler: Scheduler, metrics: Metrics, journal: Journal, looks_up: bool):
        self.by_id: dict[str, Subscriber] = {}
        self._scheduler = scheduler
        self._metrics = metrics
        self._journal = journal
        self._looks_up = looks_up

    def send(self, events: list[tuple[str, Event]]) -> list[str]:
        """Events to their sinks, one call per request; a request whose last completion ended is
        forgotten. Returns the ids of requests whose sinks failed: they hear no more."""
        by_request: dict[str, list[Event]] = {}
        for request_id, event in events:
            by_request.setdefault(request_id, []).append(event)
        heard = [(self.by_id[request_id], mine) for request_id, mine in by_request.items()]
        for subscriber, mine in heard:
            if ends := [event for event in mine if isinstance(event, Finished)]:
                subscriber.left -= len(ends)
                self._count_ends(subscriber, ends)
            if not subscriber.left:
                del self.by_id[subscriber.request.id]
        return [
            subscriber.request.id for subscriber, mine in heard if not self._tell(subscriber, mine)
        ]

    def _tell(self, subscriber: Subscriber, events: list[Event]) -> bool:
        try:
            subscriber.sink(events)
        except Exception:
            log.exception(
                "the sink of request %r failed",
                subscriber.request.id,
                extra={"request_id": subscriber.request.id},
            )
            subscriber.sink = lambda events: None
            return False
        return True

    def prefilled(self, batch: Batch) -> list[Sequence]:
        """Sequences that may get their first token from this batch."""
        if not batch.tokens.size:
            return []
        numbers = batch.seq[batch.sample & ~batch.is_decode].tolist()
        return [
            sequence
            for number in numbers
            if (sequence := self._scheduler.sequences[number]).first_token_at is None
        ]

    def count(self, batch: Batch, prefilled: list[Sequence], now: float) -> None:
        """The metrics of a batch of which the scheduler has heard."""
        self._metrics.tokens(self._scheduler.slots_with_tokens, now)
        if batch.tokens.size:
            chunks = ~batch.is_decode
            self._metrics.chunks(
                batch.length[chunks], np.count_nonzero(batch.blocks_per_lane[chunks], axis=1)
            )
        for sequence in prefilled:
            if (
                sequence.first_token_at is not None
                and not (subscriber := self.by_id[sequence.id]).begun
            ):
                subscriber.begun = True
                self._count_first(sequence, subscriber.due, now)

    def _count_first(self, sequence: Sequence, due: float, now: float) -> None:
        """The metrics of a request that has its first token."""
        request = sequence.request
        started = now if sequence.started_at is None else sequence.started_at
        looked_up = len(request.prompt) if sequence.reads_cache and self._looks_up else 0
        self._metrics.first_token(
            now - request.arrival,
            started - request.arrival,
            due - now,
            len(request.prompt),
            looked_up,
            sequence.cached_tokens,
            request.slo.class_name,
        )

    def _count_ends(self, subscriber: Subscriber, ends: list[Finished]) -> None:
        """The metrics of completions of a request that ended; where it has no other ones, those of
        the request."""
        for event in ends:
            self._metrics.sequence_ended(event.reason)
            self._journal.ended(
                subscriber.request,
                event,
                subscriber.due - subscriber.request.arrival,
                subscriber.tpot,
            )
        subscriber.ends += ends
        if subscriber.left:
            return
        arrival = subscriber.request.arrival
        if all(event.reason in ("stop", "length") for event in subscriber.ends):
            self._metrics.request_completed(
                subscriber.ends, subscriber.due - arrival, subscriber.tpot
            )
        if not subscriber.begun and arrival + ends[-1].timing.total > subscriber.due:
            self._metrics.late(subscriber.request.slo.class_name)
