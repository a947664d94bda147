"""First come, first served, over slots and pages: the verbs add, start, finish and cancel.

Decodes go first and every one that can runs; then the prefilling sequences get chunks, oldest first, up to `chunk_tokens` per home
lane; then waiting ones are admitted while there is a slot, a lane with budget, and pages for their first chunk beside one page for
every decode. When a decode finds no page, the youngest prefilling sequence is preempted, else the youngest decode after it: it is not
issued any more, its tokens in flight still count, and once it is out of flight its pages go back and it waits again, at the place its
age gives it. Its output then is part of what it prefills, so nothing is sent twice and, sampling being a function of the position,
nothing changes. The oldest decode can preempt all others, and no request is accepted that does not fit alone: so something always runs.

With P stages a step takes one P-th of the decodes, those issued longest ago, so that P batches in flight fill the stages.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from jaxserve.cache import CacheManager
from jaxserve.config import MeshConfig, SchedulerConfig
from jaxserve.request import Accepted, Event, Logprobs, Progress, Request, RequestError, Token
from jaxserve.scheduling.batch import Batch
from jaxserve.scheduling.sequence import DECODE, EMPTY, ENDED, LEAVING, PREFILL, Entry, Sequence, Slots

Events = list[tuple[str, Event]]                      # request id, event
_age = attrgetter("number")


class Chunk(NamedTuple):
    """A prefill chunk that was given pages; `admitted`: the first of its sequence."""

    slot: int
    start: int
    length: int
    admitted: bool


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a replica is. Pages are those of all lanes; cached ones can be evicted, so they are room too."""

    running: int
    waiting: int
    queued_prefill_tokens: int
    pages_free: int
    pages_total: int
    pages_cached: int


class Scheduler:
    """See the module. `sequences` holds, by number, every sequence that waits or that a batch in flight names."""

    def __init__(self, config: SchedulerConfig, cache: CacheManager, mesh: MeshConfig, max_len: int, eos_ids: Iterable[int] = ()):
        self.config, self.cache, self.mesh, self.max_len = config, cache, mesh, max_len
        self.sequences: dict[int, Sequence] = {}
        self._eos = frozenset(eos_ids)
        self._slots = Slots(config.max_seqs)
        self._entries: dict[str, Entry] = {}
        self._queue: list[Sequence] = []              # by age
        self._prefilling: list[Sequence] = []         # by age
        self._deadlines: list[tuple[float, int, str]] = []
        self._flight: deque[Batch] = deque()
        self._refused = (-1, 0)                       # the waiting sequence that did not fit, and the pages it was offered
        self._born = 0
        self._batches = 0

    @property
    def running(self) -> int:
        """Sequences with a slot."""
        return self.config.max_seqs - len(self._slots.free)

    @property
    def waiting(self) -> int:
        return len(self.sequences) - self.running

    def load(self) -> Load:
        free, cached, _ = self.cache.counts()
        started = sum(s.target - int(self._slots.issued[s.slot]) for s in self._prefilling)
        queued = sum(s.target for s in self._queue)
        return Load(self.running, self.waiting, started + queued, free, self.cache.total, cached)

    # --- add, cancel, expire

    def add(self, request: Request) -> list[Event]:
        """Queues a request. Errors: RequestError for an id in use, a full queue, or a request that can never fit."""
        if request.id in self._entries:
            raise RequestError("request_id", f"{request.id!r} is in use", "ALREADY_EXISTS")
        if len(self._queue) >= self.config.max_queue:
            raise RequestError("", f"{len(self._queue)} requests are waiting, which is the limit", "RESOURCE_EXHAUSTED")
        sampling, first = request.sampling, self._born
        limit = min(sampling.max_tokens, self.max_len - len(request.prompt))
        self._check_fits(request, limit)
        stops = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos)
        root = self.cache.root(request.cache_salt), self.cache.block_size
        group = [Sequence(first + index, index, request, limit, stops, root) for index in range(sampling.n)]
        self._born += sampling.n
        self.sequences.update((sequence.number, sequence) for sequence in group)
        self._entries[request.id] = Entry(request, first, dict(enumerate(group)), group[1:])
        if request.deadline is not None:
            insort(self._deadlines, (request.deadline, first, request.id))
        ahead = len(self._queue)
        self._wait(group[0])
        return [Accepted(ahead)]

    def _check_fits(self, request: Request, limit: int) -> None:
        if limit < 1:
            raise RequestError("prompt", f"has {len(request.prompt)} tokens; with one token to generate the limit is {self.max_len - 1}")
        need = self.cache.blocks(len(request.prompt) + limit - 1)
        if need > self.cache.total:
            raise RequestError("prompt", f"with max_tokens {limit} it needs {need} pages, the cache has {self.cache.total}")

    def cancel(
        self, id: str, now: float, reason: str = "cancelled", index: int | None = None, error: RequestError | None = None
    ) -> Events:
        """Ends a request, or only its completion `index` where that has not ended yet. Errors: RequestError for an unknown id."""
        entry = self._entries.get(id)
        if entry is None:
            raise RequestError("request_id", f"{id!r} is unknown", "NOT_FOUND")
        ends = [sequence for sequence in entry.alive.values() if index in (None, sequence.index)]
        return [(id, self._end(sequence, reason, now, error)) for sequence in ends]

    def expire(self, now: float) -> Events:
        """Ends the requests whose deadline has come."""
        events: Events = []
        while self._deadlines and self._deadlines[0][0] <= now:
            events += self.cancel(self._deadlines[0][2], now, "deadline")
        return events

    def _end(self, sequence: Sequence, reason: str, now: float, error: RequestError | None = None) -> Event:
        entry = self._entries[sequence.id]
        del entry.alive[sequence.index]
        if sequence.slot is not None:
            self._withdraw(sequence, ENDED)
        else:
            line = entry.later if sequence in entry.later else self._queue
            del line[bisect_left(line, sequence.number, key=_age)]
            del self.sequences[sequence.number]
        if entry.later and entry.later[0].index == min(entry.alive):
            self._call_later(sequence)
        if not entry.alive:
            del self._entries[sequence.id]
            if entry.request.deadline is not None:
                self._deadlines.remove((entry.request.deadline, entry.number, sequence.id))
        return sequence.finished(reason, now, error)

    def _call_later(self, leader: Sequence) -> None:
        """The completions that waited for the leader's blocks, or outlive it, join the queue."""
        entry = self._entries[leader.id]
        for sequence in entry.later:
            sequence.chain.learn(leader.chain, len(leader.request.prompt) // self.cache.block_size)
            self._wait(sequence)
        entry.later = []

    def _wait(self, sequence: Sequence) -> None:
        sequence.target = len(sequence.history)
        insort(self._queue, sequence, key=_age)

    def _withdraw(self, sequence: Sequence, phase: int) -> None:
        """Issues no more of a running sequence: it has ENDED, or is LEAVING to wait again."""
        if self._slots.phase[sequence.slot] == PREFILL:
            self._prefilling.remove(sequence)
        self._slots.phase[sequence.slot] = phase
        if not self._slots.flying[sequence.slot]:
            self._vacate(sequence.slot)

    def _vacate(self, slot: int) -> None:
        sequence, phase = self._slots.sequence[slot], self._slots.phase[slot]
        self.cache.release(slot)
        self._slots.leave(slot)
        if phase == LEAVING:
            self._wait(sequence)
        else:
            del self.sequences[sequence.number]

    # --- start

    def start(self, now: float) -> Batch | None:
        """The next batch, to be run after all batches before it; None where nothing can be issued now."""
        decodes = self._decodes()
        chunks = self._prefills(now)
        if not chunks and not decodes.size and self.mesh.spp > 1:
            decodes = self._decodes(hurry=True)
        if not chunks and not decodes.size:
            return None
        batch = self._batch(decodes, chunks)
        self._batches += 1
        self._flight.append(batch)
        for chunk in chunks:
            self._issued(self._slots.sequence[chunk.slot], chunk.start, chunk.start + chunk.length)
        return batch

    def _batch(self, decodes: np.ndarray, chunks: list[Chunk]) -> Batch:
        state, cache = self._slots, self.cache
        slots, fed = decodes, decodes.size
        if chunks:
            slots = np.concatenate([decodes, np.array([chunk.slot for chunk in chunks], np.intp)])
        start, length, feed = state.issued[slots], np.ones(slots.size, np.int32), np.ones(slots.size, bool)
        tokens = np.empty(0, np.int32)
        if chunks:
            start[fed:], length[fed:], feed[fed:] = [chunk.start for chunk in chunks], [chunk.length for chunk in chunks], False
            tokens = np.concatenate([state.sequence[slot].history(start, start + length) for slot, start, length, _ in chunks])
        state.issued[decodes] += 1
        state.flying[slots] += 1
        state.last[slots] = self._batches
        return Batch(
            number=self._batches, seq=state.number[slots], slot=slots.astype(np.int32), lane=cache.home[slots], start=start, length=length,
            feed=feed, sample=state.phase[slots] == DECODE, spread=cache.spread[slots], held=cache.held[slots], tokens=tokens,
            deltas=cache.take_deltas(), admitted=tuple(fed + row for row, chunk in enumerate(chunks) if chunk.admitted),
        )

    def _issued(self, sequence: Sequence, start: int, stop: int) -> None:
        """After a prefill chunk became part of a batch: later batches may use its blocks."""
        size = self.cache.block_size
        self.cache.publish(sequence.slot, start // size, stop // size, sequence.chain)
        if stop == sequence.target and self._entries[sequence.id].later:
            self._call_later(sequence)

    def _decodes(self, hurry: bool = False) -> np.ndarray:
        """Slots whose next token is decoded now, each with a page for it. With stages, in a hurry also those whose token is on its way."""
        state, stages = self._slots, self.mesh.spp
        ready = np.flatnonzero((state.phase == DECODE) & (state.issued < state.end))
        if stages > 1 and ready.size:
            due = ready if hurry else ready[(state.last[ready] <= self._batches - stages) | (state.flying[ready] == 0)]
            ready = np.sort(due[np.argsort(state.last[due], kind="stable")[:-(-ready.size // stages)]])
        short = ready[state.issued[ready] == self.cache.room[ready]]
        if not short.size:
            return ready
        for slot in short[np.argsort(state.number[short])].tolist():
            self._claim(slot)
        return ready[(state.phase[ready] == DECODE) & (state.issued[ready] < self.cache.room[ready])]

    def _claim(self, slot: int) -> None:
        """A page for a decode, if need be from a sequence that has to leave for it."""
        state = self._slots
        while not self.cache.available and not (state.phase >= LEAVING).any():
            younger = np.flatnonzero((state.phase == DECODE) & (state.number > state.number[slot]))
            if self._prefilling:
                self._withdraw(self._prefilling[-1], LEAVING)
            elif younger.size:
                self._withdraw(state.sequence[younger[np.argmax(state.number[younger])]], LEAVING)
            else:
                return
        if self.cache.available:
            self.cache.extend(slot, 1)

    def _prefills(self, now: float) -> list[Chunk]:
        """Chunks of prefilling sequences, then of newly admitted ones. The pages of decodes to come, one each, stay untouched."""
        if not (self._prefilling or (self._queue and self._slots.free)):
            return []
        chunks: list[Chunk] = []
        budget = [self.config.chunk_tokens] * self.mesh.kvp
        reserve = int(np.count_nonzero(self._slots.phase == DECODE))
        if not reserve:
            self._clear_way()
        for sequence in tuple(self._prefilling):
            if left := budget[self.cache.home[sequence.slot]]:
                length = self._fitting(sequence, left, reserve)
                if not length:
                    return chunks
                chunks.append(self._chunk(sequence, length, budget))
        while self._queue and self._slots.free and any(budget) and (chunk := self._admit(budget, reserve, now)):
            chunks.append(chunk)
        return chunks

    def _clear_way(self) -> None:
        """Without decodes, the oldest prefilling sequence must go on: the youngest leave until there is a page for it."""
        state, cache, line = self._slots, self.cache, self._prefilling
        while len(line) > 1 and state.issued[line[0].slot] == cache.room[line[0].slot] and not cache.available:
            if (state.phase >= LEAVING).any():
                return
            self._withdraw(line[-1], LEAVING)

    def _fitting(self, sequence: Sequence, most: int, reserve: int) -> int:
        """Length of the sequence's next chunk, 0 where there are no pages."""
        spare = max(self.cache.available - reserve, 0)
        start, room = int(self._slots.issued[sequence.slot]), int(self.cache.room[sequence.slot])
        return min(sequence.target - start, most, room + spare * self.cache.block_size - start)

    def _admit(self, budget: list[int], reserve: int, now: float) -> Chunk | None:
        """The first chunk of the oldest waiting sequence, if there are pages for it."""
        sequence, cache = self._queue[0], self.cache
        spare = cache.available - reserve
        if spare <= (self._refused[1] if self._refused[0] == sequence.number else 0):
            return None
        pages = cache.match(sequence.chain, (sequence.target - 1) // cache.block_size) if sequence.reads_cache else []
        start = len(pages) * cache.block_size
        need = cache.blocks(min(start + max(budget), sequence.target)) - len(pages)
        if need > spare - cache.evictable(pages):
            self._refused = sequence.number, spare
            return None
        slot = self._slots.enter(self._queue.pop(0), start)
        cache.admit(slot, pages, [lane for lane, left in enumerate(budget) if left], need)
        insort(self._prefilling, sequence, key=_age)
        if sequence.started is None:
            sequence.started, sequence.cached = now, start
        return self._chunk(sequence, min(sequence.target - start, budget[cache.home[slot]]), budget, admitted=True)

    def _chunk(self, sequence: Sequence, length: int, budget: list[int], admitted: bool = False) -> Chunk:
        slot, state = sequence.slot, self._slots
        start = int(state.issued[slot])
        self.cache.extend(slot, self.cache.blocks(start + length) - len(self.cache.tables[slot]))
        state.issued[slot] = start + length
        budget[self.cache.home[slot]] -= length
        if start + length == sequence.target:
            state.phase[slot] = DECODE
            self._prefilling.remove(sequence)
        return Chunk(slot, start, length, admitted)

    # --- finish

    def finish(
        self, batch: Batch, tokens: np.ndarray, now: float, logprobs: list[Logprobs | None] | None = None,
        prompt_logprobs: dict[int, list[Logprobs]] | None = None,
    ) -> Events:
        """Events of the oldest batch in flight, whose sampled `tokens` [n] count where `batch.sample`.

        `logprobs` has an entry per chunk, of its sampled token. `prompt_logprobs`, by number of a sequence, are those of the prompt
        tokens at `start + 1` and on. Tokens of sequences that have ended are dropped. Errors: ValueError for another batch.
        """
        if not self._flight or self._flight[0] is not batch:
            raise ValueError(f"batch {batch.number} is not the oldest one in flight")
        self._flight.popleft()
        state, slots = self._slots, batch.slot
        state.flying[slots] -= 1
        live = state.phase[slots] != ENDED
        for row in np.flatnonzero(live & ~batch.feed).tolist() if prompt_logprobs else ():
            if entries := prompt_logprobs.get(int(batch.seq[row])):
                state.sequence[slots[row]].note_prompt_logprobs(int(batch.start[row]), entries)
        self._publish_decoded(batch, live)
        events = self._progress(batch, live) + self._read(batch, live, tokens, logprobs, now)
        for slot in slots[(state.flying[slots] == 0) & (state.phase[slots] >= LEAVING)].tolist():
            self._vacate(slot)
        return events

    def _publish_decoded(self, batch: Batch, live: np.ndarray) -> None:
        """A block that a decode filled can be published now that all its tokens were read."""
        stop = batch.start + 1
        for row in np.flatnonzero(live & batch.feed & (stop % self.cache.block_size == 0)).tolist():
            block = int(stop[row]) // self.cache.block_size
            self.cache.publish(batch.slot[row], block - 1, block, self._slots.sequence[batch.slot[row]].chain)

    def _progress(self, batch: Batch, live: np.ndarray) -> Events:
        events: Events = []
        for row in np.flatnonzero(live & ~batch.sample).tolist():
            sequence = self._slots.sequence[batch.slot[row]]
            if not sequence.output:
                events.append((sequence.id, Progress(sequence.index, int(batch.start[row] + batch.length[row]), sequence.target)))
        return events

    def _read(self, batch: Batch, live: np.ndarray, tokens: np.ndarray, logprobs: list[Logprobs | None] | None, now: float) -> Events:
        rows = np.flatnonzero(live & batch.sample)
        events: Events = []
        for row, slot, token in zip(rows.tolist(), batch.slot[rows].tolist(), np.asarray(tokens)[rows].tolist()):
            sequence = self._slots.sequence[slot]
            sequence.output.append(token)
            if sequence.first is None:
                sequence.first = now
            events.append((sequence.id, Token(sequence.index, token, logprobs[row] if logprobs else None)))
            if token in sequence.stops and sequence.stopped_by(token):
                events.append((sequence.id, self._end(sequence, "stop", now)))
            elif len(sequence.output) >= sequence.limit:
                events.append((sequence.id, self._end(sequence, "length", now)))
        return events

    # --- check

    def check(self) -> None:
        """The invariants of scheduler and cache. Errors: AssertionError with what differs."""
        self.cache.check()
        state = self._slots
        flying = np.zeros_like(state.flying)
        for batch in self._flight:
            flying[batch.slot] += 1
            assert (state.number[batch.slot] == batch.seq).all(), f"batch {batch.number}: a slot was given away in flight"
        assert (flying == state.flying).all(), f"flying {state.flying}, counted {flying}"
        empty = {slot for slot, sequence in enumerate(state.sequence) if sequence is None}
        assert sorted(state.free) == sorted(empty) == np.flatnonzero(state.phase == EMPTY).tolist(), "free slots differ"
        assert not any(self.cache.tables[slot] for slot in empty), "an empty slot has pages"
        assert not (flying[state.phase >= LEAVING] == 0).any(), "a sequence that left keeps its slot"
        prefilling = [s.number for s in state.sequence if s and state.phase[s.slot] == PREFILL]
        assert sorted(prefilling) == [s.number for s in self._prefilling], "prefilling sequences differ"
        assert (state.issued <= np.maximum(self.cache.room, 0))[state.phase != EMPTY].all(), "a token has no page"
        alive = {s.number for entry in self._entries.values() for s in entry.alive.values()}
        ended = {s.number for s in state.sequence if s and state.phase[s.slot] == ENDED}
        assert alive | ended == set(self.sequences) and not alive & ended, "sequences differ"
        later = [s for entry in self._entries.values() for s in entry.later]
        assert len(later) + len(self._queue) == self.waiting, "a waiting sequence is lost"
        assert [s.number for s in self._queue] == sorted(s.number for s in self._queue), "the queue is out of order"
