"""The live requests of a scheduler: their completions that have not ended, and how they end."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

import numpy as np

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Finished
from jaxserve.api.request import Request
from jaxserve.scheduling.events import CompletionEnded, EventBus, FirstToken
from jaxserve.scheduling.sequence import NO_SLOT, Sequence
from jaxserve.scheduling.sessions import Sessions
from jaxserve.scheduling.slots import ENDED, SlotTable

FIRST_VERSION = "1"  # of the weights that a replica begins with


@dataclass(slots=True)
class LiveEntry:
    """A request with completions that have not ended."""

    request: Request
    leader: Sequence  # its first completion, with its objectives
    alive: dict[int, Sequence]  # completions that have not ended, by index
    later: list[Sequence] = field(default_factory=list)  # these wait for the first one's prefill
    had_token: bool = False
    ends: list[Finished] = field(default_factory=list)

    @property
    def has_begun(self) -> bool:
        """Returns whether anything was computed for it, here or by whom it continues."""
        if self.had_token or self.ends or self.request.continuation is not None:
            return True
        started = (one.started_at is not None or one.slot != NO_SLOT for one in self.alive.values())
        return any(started)


class RequestTable:
    """Live requests: `entries` by id. weight_version: of the weights that all are computed
    with."""

    def __init__(self, slots: SlotTable, bus: EventBus):
        self.slots = slots
        self.bus = bus
        self.sessions = Sessions(slots.cache)
        self.entries: dict[str, LiveEntry] = {}
        self.weight_version = FIRST_VERSION
        # (clock second, number of the first sequence, id) of each request with a deadline, sorted
        self._deadlines: list[tuple[float, int, str]] = []

    def add(self, entry: LiveEntry) -> None:
        """Adds a request, whose id is not in the table."""
        request = entry.request
        self.entries[request.id] = entry
        if request.deadline is not None:
            insort(self._deadlines, (request.deadline, entry.leader.number, request.id))

    def alive(self, sequence: Sequence) -> bool:
        """Returns whether a sequence has not ended."""
        entry = self.entries.get(sequence.id)
        return entry is not None and entry.alive.get(sequence.index) is sequence

    def sequences(self) -> list[Sequence]:
        """Returns all sequences that have not ended, by request."""
        return [one for entry in self.entries.values() for one in entry.alive.values()]

    def has_begun(self, sequence: Sequence) -> bool:
        """Returns whether anything was computed for the request of a sequence that is alive."""
        return self.entries[sequence.id].has_begun

    def begun(self) -> list[str]:
        """Returns the ids of the requests for which anything was computed, also elsewhere."""
        return [id for id, entry in self.entries.items() if entry.has_begun]

    def next_expired(self, now: float) -> str | None:
        """Returns the id of the request whose deadline comes first, if that is at clock second
        `now` or before."""
        if self._deadlines and self._deadlines[0][0] <= now:
            return self._deadlines[0][2]
        return None

    def note_first_token(self, sequence: Sequence, now: float) -> None:
        """Publishes that a sequence got its first token at clock second `now`."""
        entry = self.entries[sequence.id]
        first = not entry.had_token
        entry.had_token = True
        self.bus.publish(FirstToken(sequence, now, first, entry.leader.ttft_deadline))

    def end(
        self,
        sequence: Sequence,
        reason: str,
        now: float,
        error: RequestError | None = None,
        embedding: np.ndarray | None = None,
    ) -> Finished:
        """Ends a sequence at clock second `now`, and with the last one its request. Those that wait
        for its prefill join the queue."""
        entry = self.entries[sequence.id]
        if reason in ("stop", "length"):
            self.sessions.ended(sequence, now)
        del entry.alive[sequence.index]
        if sequence.slot != NO_SLOT:
            self.slots.withdraw(sequence, ENDED)
        else:
            self.slots.forget(sequence, entry.later)
        if not entry.alive:
            self._remove(entry)
        elif len(entry.later) == len(entry.alive):  # the one they waited for has ended
            self.queue_later(sequence)
        event = sequence.finished(reason, now, error, embedding, self.weight_version)
        entry.ends.append(event)
        ends = () if entry.alive else tuple(entry.ends)
        leader = entry.leader
        self.bus.publish(
            CompletionEnded(
                entry.request, event, leader.ttft_deadline, leader.tpot, ends, entry.had_token
            )
        )
        return event

    def _remove(self, entry: LiveEntry) -> None:
        request = entry.request
        del self.entries[request.id]
        self.slots.shares.end(request.tenant)
        if request.deadline is not None:
            self._deadlines.remove((request.deadline, entry.leader.number, request.id))

    def queue_later(self, leader: Sequence) -> None:
        """Queues the completions that waited for the leader's prefill, with its block hashes."""
        entry = self.entries[leader.id]
        blocks = len(leader.request.prompt) // self.slots.cache.block_size
        for sequence in entry.later:
            sequence.block_hashes.copy_from(leader.block_hashes, blocks)
            self.slots.wait(sequence)
        entry.later = []

    def check(self) -> None:
        """Checks the invariants. Errors: AssertionError with what differs."""
        slots = self.slots
        alive = {sequence.number for sequence in self.sequences()}
        ended = set(slots.number[slots.phase == ENDED].tolist())
        numbers = set(slots.by_number)
        assert alive | ended == numbers and not alive & ended, (
            f"alive {alive}, ended {ended}, all {numbers}"
        )
        later = sum(len(entry.later) for entry in self.entries.values())
        queued = len(slots.queue)
        assert later + queued == slots.waiting, (
            f"{slots.waiting} wait: {later} later, {queued} in the queue"
        )
        deadlines = sum(entry.request.deadline is not None for entry in self.entries.values())
        assert len(self._deadlines) == deadlines, (
            f"{len(self._deadlines)} deadlines of {deadlines} requests"
        )
