"""The slots of running sequences, and the queue of waiting ones.

What every step needs to know of the slots is kept as arrays, so that a step over 256 running
sequences costs a few numpy calls. A slot goes EMPTY -> PREFILL -> DECODE, and from either to
LEAVING (its sequence was preempted and will wait again) or ENDED; it is EMPTY again when no batch
in flight contains it any more.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterable

import numpy as np

from jaxserve.api.batch import Batch
from jaxserve.cache import CacheManager
from jaxserve.policies import PromptView
from jaxserve.scheduling.adapter_places import AdapterPlaces
from jaxserve.scheduling.sequence import NO_SLOT, Sequence
from jaxserve.scheduling.shares import TenantShares
from jaxserve.scheduling.waiting_queue import WaitingQueue, age

# phases of a slot; from LEAVING on nothing more of its sequence is issued
EMPTY, PREFILL, DECODE, LEAVING, ENDED = range(5)


class SlotTable:
    """All sequences that wait or have a slot.

    `queue`: waiting sequences, `prefilling`: partly prefilled ones, both by age; `by_slot` and
    `by_number`: sequences by their slot, and all of them by their number. Arrays are by slot.
    work: predicted seconds to prefill tokens a to before b. shares: of the tenants that they are
    of. adapters: places for them on the devices.
    """

    def __init__(
        self,
        slots: int,
        cache: CacheManager,
        work: Callable[[int, int], float],
        shares: TenantShares,
        adapters: int = 0,
    ):
        self.cache = cache
        self.adapters = AdapterPlaces(adapters, slots)
        self.work = work
        self.shares = shares
        self.phase = np.full(slots, EMPTY, np.int8)
        self.number = np.full(slots, -1, np.int64)
        self.issued = np.zeros(slots, np.int32)  # positions that are part of a batch
        # of these, those of proposed tokens of a batch in flight, which may be taken back
        self.proposed = np.zeros(slots, np.int32)
        self.max_positions = np.zeros(slots, np.int32)  # positions to compute at most
        self.tpot = np.zeros(slots)  # objective, seconds per output token
        self.tbt = np.full(slots, math.inf)  # objective, seconds between two output tokens
        self.tenant = np.zeros(slots, np.intp)  # number of the tenant
        self.in_flight = np.zeros(slots, np.int32)  # batches in flight that contain it
        self.last_batch = np.zeros(slots, np.int64)  # batch it was last part of
        self.by_slot: dict[int, Sequence] = {}
        self.free = list(range(slots - 1, -1, -1))  # the last is taken first
        self.unannounced: set[int] = set()  # slots whose sequence was in no batch yet
        self.queue = WaitingQueue()
        self.prefilling: list[Sequence] = []
        self.by_number: dict[int, Sequence] = {}
        self.preemptions = 0

    @property
    def running(self) -> int:
        """Sequences with a slot."""
        return len(self.phase) - len(self.free)

    @property
    def waiting(self) -> int:
        """Sequences without a slot."""
        return len(self.by_number) - self.running

    @property
    def draining(self) -> bool:
        """True if slots and pages will be given back once the batches in flight have finished."""
        return bool((self.phase >= LEAVING).any())

    @property
    def decoding(self) -> np.ndarray:
        """Slots [n] of which another token is to be decoded, ascending."""
        certain = self.issued - self.proposed
        return ((self.phase == DECODE) & (certain < self.max_positions)).nonzero()[0]

    def without_proposed(self, decoding: np.ndarray) -> np.ndarray:
        """Returns those of the slots `decoding` [n] of which a token may be decoded in the next
        batch: not while proposed tokens are on their way, behind which its position is not
        known."""
        return decoding[self.proposed[decoding] == 0]

    @property
    def backlog(self) -> float:
        """Predicted seconds of prefill that are left to do."""
        return float(self.queue.work.sum()) + sum(
            sequence.prefill_seconds_left for sequence in self.prefilling
        )

    def tightest(self, tpot: float = math.inf, which: np.ndarray | None = None) -> float:
        """The tightest objective per output token, in seconds, of the running sequences and `tpot`.
        which: the slots [slots] that count; default: all."""
        running = (self.phase == PREFILL) | (self.phase == DECODE)
        if which is not None:
            running &= which
        return float(self.tpot[running].min(initial=tpot))

    def tightest_gap(self, which: np.ndarray) -> float:
        """The tightest limit on gaps, in seconds, of the running sequences in `which` slots
        [slots]; infinite without any."""
        running = ((self.phase == PREFILL) | (self.phase == DECODE)) & which
        return float(self.tbt[running].min(initial=math.inf))

    def wait(self, sequence: Sequence) -> None:
        """Queues a sequence: what it has put out so far is part of what it prefills."""
        sequence.prefill_len = len(sequence.history)
        sequence.prefill_seconds_left = self.work(sequence.received, sequence.prefill_len)
        self.queue.add(sequence)

    def prompts(self, now: float, *new: Sequence) -> PromptView:
        """Returns what policies look at: the prefilling sequences, those that wait, and `new` ones
        that have not joined the queue."""
        view = self.queue.view_among(now, self.prefilling, new)
        if len(self.shares) < 2:
            return view
        return view._replace(turn=self.shares.turns[view.tenant])

    def forget(self, sequence: Sequence, later: list[Sequence]) -> None:
        """Removes a sequence that has ended from the queue, or from those that join it `later`."""
        if sequence in later:
            later.remove(sequence)
        else:
            self._leave_queue(sequence)
        del self.by_number[sequence.number]

    def _leave_queue(self, sequence: Sequence) -> None:
        self.queue.remove(sequence)
        self.cache.promises.release(sequence.number)

    def admit(self, sequence: Sequence, issued: int) -> int:
        """Gives a queued sequence a slot; its first `issued` positions are in the cache. Returns
        the slot."""
        self._leave_queue(sequence)
        slot = self.free.pop()
        self.unannounced.add(slot)
        sequence.slot = slot
        self.by_slot[slot] = sequence
        self.phase[slot] = PREFILL
        self.number[slot] = sequence.number
        self.issued[slot] = issued
        self.max_positions[slot] = sequence.max_positions
        self.tpot[slot] = sequence.tpot
        self.tbt[slot] = math.inf if sequence.tbt is None else sequence.tbt
        self.adapters.take(slot, sequence.request.adapter)
        self.tenant[slot] = sequence.tenant
        insort(self.prefilling, sequence, key=age)
        return slot

    def withdraw(self, sequence: Sequence, phase: int) -> None:
        """Stops issuing a running sequence, which has ENDED, or is LEAVING to wait again. Its slot
        and pages are given back at once if no batch in flight contains it."""
        self.preemptions += phase == LEAVING
        self._stop(sequence, phase)

    def admit_again(self, sequence: Sequence) -> None:
        """Has a sequence of which nothing was issued wait again, for another admission."""
        if sequence.first_token_at is None:
            sequence.started_at = None
            sequence.cached_tokens = 0
        self._stop(sequence, LEAVING)

    def _stop(self, sequence: Sequence, phase: int) -> None:
        slot = sequence.slot
        if self.phase[slot] == PREFILL:
            self.prefilling.remove(sequence)
        self.phase[slot] = phase
        if not self.in_flight[slot]:
            self.vacate(slot)

    def take_back(self, slots: np.ndarray, counts: np.ndarray) -> None:
        """Takes back positions of proposed tokens that were wrong: `counts` [n] of these slots
        [n], of which none is proposed any more."""
        self.issued[slots] -= counts
        self.proposed[slots] = 0

    def finish(self, slots: np.ndarray) -> None:
        """Gives back those slots [n] of a batch that was read, any of them more than once, which no
        other batch in flight contains and whose sequences have ended or leave."""
        gone = self.phase[slots] >= LEAVING
        if not np.count_nonzero(gone):
            return
        over = slots[gone & (self.in_flight[slots] == 0)]
        for slot in dict.fromkeys(over.tolist()):
            self.vacate(slot)

    def vacate(self, slot: int) -> None:
        """Gives back a slot and its pages; its sequence is forgotten, or waits again."""
        sequence = self.by_slot.pop(slot)
        leaving = self.phase[slot] == LEAVING
        self.cache.release(slot)
        self.adapters.release(slot)
        sequence.slot = NO_SLOT
        sequence.received = 0  # what came with it is gone with its pages
        sequence.ticket = None
        self.unannounced.discard(slot)
        self.proposed[slot] = 0
        self.phase[slot] = EMPTY
        self.number[slot] = -1
        self.free.append(slot)
        if leaving:
            self.wait(sequence)
        else:
            del self.by_number[sequence.number]

    def check(self, flight: Iterable[Batch]) -> None:
        """Checks the invariants. Errors: AssertionError with what differs."""
        flying = np.zeros_like(self.in_flight)
        for batch in flight:
            flying[batch.slot] += 1
            assert (self.number[batch.slot] == batch.seq).all(), (
                f"batch {batch.number}: a slot was given away in flight"
            )
        assert (flying == self.in_flight).all(), f"in flight {self.in_flight}, counted {flying}"
        empty = [slot for slot in range(len(self.phase)) if slot not in self.by_slot]
        assert sorted(self.free) == empty == np.flatnonzero(self.phase == EMPTY).tolist(), (
            f"free {self.free}, without sequence {empty}"
        )
        assert not any(self.cache.layouts[slot].pages for slot in empty), "an empty slot has pages"
        assert (flying[self.phase >= LEAVING] > 0).all(), (
            "a sequence that is out of flight keeps its slot"
        )
        taken = self.phase != EMPTY
        assert (self.issued <= self.cache.capacity)[taken].all(), (
            f"issued {self.issued} with room for {self.cache.capacity}"
        )
        assert (self.proposed <= self.issued).all() and not self.proposed[flying == 0].any(), (
            f"proposed {self.proposed} of {self.issued}, in flight {flying}"
        )
        assert (self.issued <= self.max_positions)[taken].all(), (
            f"issued {self.issued}, ends are {self.max_positions}"
        )
        prefilling = sorted(self.number[self.phase == PREFILL].tolist())
        assert [s.number for s in self.prefilling] == prefilling, (
            f"prefilling slots {prefilling} and list differ"
        )
        queue = [s.number for s in self.queue]
        assert queue == sorted(set(queue)) and not set(queue) & set(self.number.tolist()), (
            f"queue {queue}, running {self.number}"
        )
        assert set(queue) | set(self.number[taken].tolist()) <= set(self.by_number), (
            "a sequence is not in the list of all"
        )
        self.adapters.check()
        promised = set(self.cache.promises.holders())
        assert promised <= set(queue), f"promises to {promised} while {queue} wait"
