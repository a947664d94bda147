"""The four verbs: add, start, finish, cancel. Time is an argument.

`packing` decides what a batch contains, `slots` knows who waits and who runs; here requests become
sequences, batches are issued and read, and sequences end.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from jaxserve.api.batch import Batch
from jaxserve.api.errors import RequestError
from jaxserve.api.events import Accepted, Event, Finished, Logprobs, Progress, Token
from jaxserve.api.request import Request
from jaxserve.cache import CacheManager
from jaxserve.costs.exchange_choice import ExchangeChooser
from jaxserve.costs.predictor import NOMINAL, Costs, Predictor
from jaxserve.policies import POLICIES
from jaxserve.scheduling.admission import AdmissionController
from jaxserve.scheduling.completion_lengths import CompletionLengths
from jaxserve.scheduling.decode_reserve import DecodeReserve
from jaxserve.scheduling.events import (
    Admitted,
    BatchPacked,
    CompletionEnded,
    EventBus,
    FirstToken,
    Tokens,
)
from jaxserve.scheduling.packing import BatchPacker
from jaxserve.scheduling.page_admission import PageAdmission
from jaxserve.scheduling.prefill_packing import SHARER_WORK_RATIO, Planner
from jaxserve.scheduling.sequence import NO_SLOT, Sequence
from jaxserve.scheduling.slots import ENDED, LEAVING, SlotTable
from jaxserve.settings.schema import MeshConfig, SchedulerConfig

Events = list[tuple[str, Event]]  # request id, event
NOT_FINITE = RequestError("", "the model's logits were not finite", "INTERNAL")
NO_EMBEDDING = RequestError("", "the prompt's embedding was not finite", "INTERNAL")


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a replica is. Pages are those of all lanes; cached ones can be evicted, so they are
    room too."""

    running: int
    waiting: int
    queued_prefill_tokens: int
    queued_prefill_seconds: float  # of steps, as predicted
    pages_free: int
    pages_total: int
    pages_cached: int


@dataclass(slots=True)
class LiveEntry:
    """A request with completions that have not ended. Its objectives are clock seconds for its
    first token and seconds per token after that."""

    request: Request
    ttft_deadline: float
    tpot: float
    number: int  # of its first sequence
    alive: dict[int, Sequence]  # completions that have not ended, by index
    later: list[Sequence] = field(default_factory=list)  # these wait for the first one's prefill
    had_token: bool = False
    ends: list[Finished] = field(default_factory=list)


class Scheduler:
    """Decides what runs next; see the package. `sequences` holds, by number, every sequence that
    waits or that a batch in flight contains.

    costs: what steps cost; NOMINAL where nobody knows. planner: plans which lanes compute which
    part of a prompt, where that is planned. bus: hears what happens; of its own by default.
    exchange: how lanes exchange what spread chunks need, and what that costs; None where nobody
    knows.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        mesh: MeshConfig,
        max_len: int,
        eos_ids: Iterable[int] = (),
        costs: Costs = NOMINAL,
        planner: Planner | None = None,
        bus: EventBus | None = None,
        exchange: ExchangeChooser | None = None,
    ):
        self.config = config
        self.cache = cache
        self.max_len = max_len
        self.predictor = Predictor(costs, mesh, cache.reach, exchange=exchange, dealt=cache.deals)
        self._eos = frozenset(eos_ids)
        self.slots = SlotTable(config.max_seqs, cache, self._work)
        self.bus = EventBus() if bus is None else bus
        lengths = CompletionLengths()
        lengths.listen(self.bus)
        self.admission: AdmissionController | None = None
        if config.admission != "queue":
            self.admission = AdmissionController(config, cache, self.slots, self.predictor, lengths)
            self.admission.listen(self.bus)
        self._planner = planner
        most = None if self.admission is None else self.admission.most
        reserve = DecodeReserve(cache, self.slots, lengths, config.decode_reserve)
        self._page_admission = PageAdmission(cache, self.slots, reserve, most)
        self.packer = BatchPacker(
            config, mesh, cache, self.slots, self.predictor, self._page_admission, planner
        )
        self._entries: dict[str, LiveEntry] = {}
        self._deadlines: list[tuple[float, int, str]] = []
        self._flight: deque[Batch] = deque()
        self._born = 0
        self._batches = 0
        self.sequences = self.slots.by_number

    @property
    def running(self) -> int:
        """Sequences with a slot."""
        return self.config.max_seqs - len(self.slots.free)

    @property
    def waiting(self) -> int:
        return len(self.sequences) - self.running

    @property
    def preemptions(self) -> int:
        """Times that a sequence lost its slot and had to wait again."""
        return self.slots.preemptions

    def load(self) -> Load:
        free, cached, _ = self.cache.counts()
        tokens = sum(
            sequence.prefill_len - int(self.slots.issued[sequence.slot])
            for sequence in self.slots.prefilling
        )
        tokens += int(self.slots.queue.view.tokens.sum())
        return Load(
            self.running, self.waiting, tokens, self.slots.backlog, free, self.cache.total, cached
        )

    def add(self, request: Request, now: float | None = None, received: int = 0) -> list[Event]:
        """Queues a request that comes now (None: at its arrival).

        received: tokens of its prompt, not all, whose KV comes with it: its first completion gets
        pages for them, and they are not computed unless it is preempted. Errors: RequestError for
        an id in use, a full queue, a request that can never fit, and, with admission control, one
        that could not be in time.
        """
        if request.id in self._entries:
            raise RequestError("request_id", f"{request.id!r} is in use", "ALREADY_EXISTS")
        ahead = len(self.slots.queue)
        if ahead >= self.config.max_queue:
            after = float(self.slots.queue.view.work.mean()) / self.predictor.mesh.kvp
            raise RequestError(
                "",
                f"{ahead} requests are waiting, which is the limit",
                "RESOURCE_EXHAUSTED",
                after,
                "queue",
            )
        group = self._sequences(request, received)
        first = None
        if self.admission is not None:
            begun = sum(batch.seconds for batch in self._flight) - (
                self._flight[0].seconds / 2 if self._flight else 0.0
            )
            feasible = self.ttft_objective(request) >= self._work(0, len(request.prompt))
            first = self.admission.check(
                group[0], request.arrival if now is None else now, begun, feasible
            )
            self.admission.promise(group[0], first)
        self._born += len(group)
        self.sequences.update((sequence.number, sequence) for sequence in group)
        self._entries[request.id] = LiveEntry(
            request,
            self.ttft_deadline(request),
            self.tpot_objective(request),
            group[0].number,
            dict(enumerate(group)),
            group[1:],
        )
        if request.deadline is not None:
            insort(self._deadlines, (request.deadline, group[0].number, request.id))
        self.slots.wait(group[0])
        if self._planner is not None:
            self._planner.arrived(request.arrival)
        return [
            Accepted(
                ahead, self._predicted_ttft(group[0]) if first is None else first - request.arrival
            )
        ]

    def _sequences(self, request: Request, received: int) -> list[Sequence]:
        sampling = request.sampling
        prompt = len(request.prompt)
        # there is room for a token after any prompt, also after one that is only embedded
        limit = min(1 if request.embed else sampling.max_tokens, self.max_len - prompt)
        if limit < 1:
            raise RequestError(
                "prompt",
                f"has {prompt} tokens; with one token to generate the limit is {self.max_len - 1}",
            )
        if not 0 <= received < prompt:
            raise RequestError("received", f"{received} tokens of a prompt of {prompt}")
        need = self.cache.blocks(prompt + limit - 1)
        if need > self.cache.total:
            raise RequestError(
                "prompt",
                f"with max_tokens {limit} it needs {need} pages, the cache has {self.cache.total}",
            )
        stops = frozenset(sampling.stop_token_ids) | (
            frozenset() if sampling.ignore_eos else self._eos
        )
        due = self.ttft_deadline(request)
        tpot = self.tpot_objective(request)
        # nothing is promised of later completions: they take slots as these come
        turn = limit * tpot / self.config.max_seqs
        return [
            Sequence(
                self._born + index,
                index,
                request,
                limit,
                stops,
                self.cache,
                due + index * turn,
                tpot,
                0 if index else received,
            )
            for index in range(sampling.n)
        ]

    def _predicted_ttft(self, sequence: Sequence) -> float:
        """Seconds from arrival to the first token of one that has just joined the queue: half of
        the step that was issued last, then what the policy ranks before it now, shared by the
        lanes, then its own prefill. Decodes that share its steps do not count."""
        slots = self.slots
        config = self.config
        begun = self._flight[-1].seconds / 2 if self._flight else 0.0
        prompts = slots.prompts(sequence.request.arrival)
        key = POLICIES[config.policy].rank(prompts)
        work = prompts.work
        own = float(work[-1])  # the youngest: those of equal rank go before it
        ahead = work[:-1][key[:-1] <= key[-1]]
        if config.chunking == "adaptive" and config.sharing > 0:
            # what a longer prompt takes of the steps that both are in
            beside = own * (1 - config.sharing) / config.sharing
            ahead = np.where(SHARER_WORK_RATIO * ahead >= own, np.minimum(ahead, beside), ahead)
        return (
            begun
            + float(ahead.sum()) / self.predictor.mesh.kvp
            + own
            + self._passage(sequence.prefill_len)
        )

    def ttft_alone(self, prompt: int) -> float:
        """Predicted seconds to the first token of a prompt of so many that has the replica to
        itself."""
        return self._work(0, prompt) + self._passage(prompt)

    def _passage(self, prompt: int) -> float:
        """Seconds that the last chunk of a prompt takes through the stages after the first."""
        chunk = min(prompt, self.config.chunk_tokens)
        pace = self._work(prompt - chunk, prompt)
        if self.config.chunking == "adaptive":
            pace = min(pace, self.config.step_time / self.predictor.mesh.spp)
        return self.predictor.latency(pace, chunk, 1) - pace

    def _work(self, cached: int, total: int) -> float:
        """Seconds to prefill tokens `cached` to before `total` in the largest chunks."""
        return self.predictor.prefill(cached, total, self.config.chunk_tokens)

    def ttft_deadline(self, request: Request) -> float:
        """Clock seconds at which the request's first token should come: no prompt is given less
        than it takes alone."""
        return request.arrival + max(
            self.ttft_objective(request), self._work(0, len(request.prompt))
        )

    def ttft_objective(self, request: Request) -> float:
        """Seconds that the request gives us to its first token."""
        given = (
            self.default_ttft(len(request.prompt), request.slo.class_name) * 2.0**request.priority
        )
        return given if request.slo.ttft is None else request.slo.ttft

    def tpot_objective(self, request: Request) -> float:
        """Seconds per output token that the request gives us."""
        return (
            self.config.objectives[request.slo.class_name].tpot
            if request.slo.tpot is None
            else request.slo.tpot
        )

    def default_ttft(self, prompt: int, class_name: str | None = None) -> float:
        """The objective for the first token after so many, where a request of the class names
        none."""
        given = self.config.objectives[class_name]
        return max(given.ttft, given.ttft_stretch * self._work(0, prompt))

    def start(self, now: float) -> Batch | None:
        """The next batch, to be run after all batches before it; None where nothing can be issued
        now."""
        backlog = self.slots.backlog
        packed = self.packer.pack(self._batches, now)
        if packed is None:
            return None
        batch, chunks = packed
        self.bus.publish(BatchPacked(batch, backlog))
        self._batches += 1
        self._flight.append(batch)
        for row in batch.admitted:
            slot = int(batch.slot[row])
            self.bus.publish(Admitted(self.slots.by_slot[slot], slot))
        size = self.cache.block_size
        for chunk in chunks:  # only now: what a batch computes serves later batches
            sequence = self.slots.by_slot[chunk.slot]
            self.cache.publish(
                chunk.slot, chunk.start // size, chunk.stop // size, sequence.block_hashes
            )
            if chunk.stop == sequence.prefill_len:
                self._call_later(sequence)
        return batch

    def fetched(self, ticket: int, blocks: int, last: bool, now: float) -> bool:
        """The next blocks of a fetch are on their pages, by a command that was issued; with the
        last ones the sequence goes on, and computes what was not found. False where nobody waits
        for this fetch any more."""
        sequence = self._waiting_for(ticket)
        if sequence is None:
            return False
        slot = sequence.slot
        start = int(self.slots.issued[slot])
        first = start // self.cache.block_size
        self.cache.publish(slot, first, first + blocks, sequence.block_hashes)
        tokens = blocks * self.cache.block_size
        self.slots.issued[slot] = start + tokens
        if sequence.cached_tokens == start:  # else it was preempted: the first time counts
            sequence.cached_tokens += tokens
        sequence.prefill_seconds_left = self._work(start + tokens, sequence.prefill_len)
        sequence.fetch_deadline = now + sequence.fetch_seconds
        if last:
            sequence.ticket = None
        return True

    def awaits(self, ticket: int) -> bool:
        """Whether a sequence waits for this fetch."""
        return self._waiting_for(ticket) is not None

    def _waiting_for(self, ticket: int) -> Sequence | None:
        return next((s for s in self.slots.prefilling if s.ticket == ticket), None)

    def finish(
        self,
        batch: Batch,
        tokens: np.ndarray,
        now: float,
        logprobs: list[Logprobs | None] | None = None,
        prompt_logprobs: dict[int, list[Logprobs]] | None = None,
        embeddings: dict[int, np.ndarray] | None = None,
    ) -> Events:
        """Events of the oldest batch in flight, whose sampled `tokens` [n] count where
        `batch.sample`.

        `logprobs` has an entry per chunk, for its sampled token. `prompt_logprobs` has, by number
        of the sequence, those of the prompt's tokens from position `start + 1` on. `embeddings` has
        by number those of the prompts that are embedded and end in this batch. A negative token
        stands for logits that were not finite, and ends its completion with an error, as does an
        embedding that is not finite; its blocks serve no other. What belongs to sequences that have
        ended is dropped. Errors: ValueError for another batch.
        """
        if not self._flight or self._flight[0] is not batch:
            raise ValueError(f"batch {batch.number} is not the oldest one in flight")
        self._flight.popleft()
        slots = self.slots
        slots.in_flight[batch.slot] -= 1
        live = slots.phase[batch.slot] != ENDED
        self._publish_decoded(batch, live)
        if prompt_logprobs:
            self._note_prompt_logprobs(batch, live, prompt_logprobs)
        events = self._progress(batch, live, now, embeddings or {})
        events += self._read(batch, live, tokens, logprobs, now)
        slots.finish(batch.slot)
        return events

    def _publish_decoded(self, batch: Batch, live: np.ndarray) -> None:
        """A block that a decode filled can be published now that all its tokens were read."""
        stop = batch.start + 1
        for row in np.flatnonzero(
            live & batch.is_decode & (stop % self.cache.block_size == 0)
        ).tolist():
            slot = int(batch.slot[row])
            blocks = int(stop[row]) // self.cache.block_size
            self.cache.publish(slot, blocks - 1, blocks, self.slots.by_slot[slot].block_hashes)

    def _note_prompt_logprobs(
        self, batch: Batch, live: np.ndarray, entries: dict[int, list[Logprobs]]
    ) -> None:
        for row in np.flatnonzero(live & np.isin(batch.seq, list(entries))).tolist():
            self.slots.by_slot[batch.slot[row]].note_prompt_logprobs(
                int(batch.start[row]), entries[int(batch.seq[row])]
            )

    def _progress(
        self, batch: Batch, live: np.ndarray, now: float, embeddings: dict[int, np.ndarray]
    ) -> Events:
        """How far prompts are, and the ends of those that are embedded."""
        events: Events = []
        for row in np.flatnonzero(live & ~batch.sample).tolist():
            sequence = self.slots.by_slot[batch.slot[row]]
            if not sequence.output:
                done = int(batch.start[row] + batch.length[row])
                event: Event
                if sequence.request.embed and done == sequence.prefill_len:
                    event = self._embedded(sequence, embeddings.get(sequence.number), now)
                else:
                    ttft = self._first_token(sequence, done, now)
                    event = Progress(sequence.index, done, sequence.prefill_len, ttft)
                events.append((sequence.id, event))
        return events

    def _embedded(self, sequence: Sequence, embedding: np.ndarray | None, now: float) -> Finished:
        """Ends a sequence whose prompt is computed. embedding [D]: None where nothing is computed,
        as in simulations."""
        if embedding is not None and not np.isfinite(embedding).all():
            self.cache.retract(sequence.slot)
            return self._end(sequence, "error", now, NO_EMBEDDING)
        self._note_first_token(sequence, now)
        sequence.first_token_at = now
        return self._end(sequence, "stop", now, embedding=embedding)

    def _first_token(self, sequence: Sequence, done: int, now: float) -> float:
        """Predicted seconds from arrival to first token, `done` tokens of the prompt being read:
        what is left goes as what is done went."""
        began = sequence.started_at or 0.0
        work = self._work(sequence.cached_tokens, done)
        slower = max(1.0, (now - began) / work) if work > 0 else 1.0
        return now - sequence.request.arrival + slower * self._work(done, sequence.prefill_len)

    def _read(
        self,
        batch: Batch,
        live: np.ndarray,
        tokens: np.ndarray,
        logprobs: list[Logprobs | None] | None,
        now: float,
    ) -> Events:
        rows = np.flatnonzero(live & batch.sample)
        slots = batch.slot[rows]
        with_token = slots
        events: Events = []
        for row, slot, token in zip(
            rows.tolist(), slots.tolist(), np.asarray(tokens)[rows].tolist()
        ):
            sequence = self.slots.by_slot[slot]
            if token < 0:
                self.cache.retract(slot)
                with_token = with_token[with_token != slot]
                events.append((sequence.id, self._end(sequence, "error", now, NOT_FINITE)))
                continue
            events.append(
                (sequence.id, Token(sequence.index, token, logprobs[row] if logprobs else None))
            )
            if sequence.first_token_at is None:
                self._note_first_token(sequence, now)
            try:
                reason = sequence.append_token(token, now)
                error = None
            except RequestError as fault:
                reason = "error"
                error = fault
            if reason:
                events.append((sequence.id, self._end(sequence, reason, now, error)))
        ended = len(events) - len(rows)
        self.bus.publish(Tokens(batch, with_token, len(rows), ended, now))
        return events

    def _note_first_token(self, sequence: Sequence, now: float) -> None:
        entry = self._entries[sequence.id]
        first = not entry.had_token
        entry.had_token = True
        self.bus.publish(FirstToken(sequence, now, first, entry.ttft_deadline))

    def cancel(
        self,
        id: str,
        now: float,
        reason: str = "cancelled",
        index: int | None = None,
        error: RequestError | None = None,
    ) -> Events:
        """Ends a request, or only its completion `index` where that has not ended yet. Errors:
        RequestError for an unknown id."""
        entry = self._entries.get(id)
        if entry is None:
            raise RequestError("request_id", f"{id!r} is unknown", "NOT_FOUND")
        ends = [sequence for sequence in entry.alive.values() if index in (None, sequence.index)]
        return [(id, self._end(sequence, reason, now, error)) for sequence in ends]

    def alive(self, number: int) -> bool:
        """Whether a sequence that waits or that a batch in flight contains has not ended."""
        sequence = self.sequences[number]
        return (
            sequence.id in self._entries
            and self._entries[sequence.id].alive.get(sequence.index) is sequence
        )

    def fail(self, number: int, now: float, error: RequestError) -> Events:
        """Ends one sequence that is alive."""
        sequence = self.sequences[number]
        return [(sequence.id, self._end(sequence, "error", now, error))]

    def expire(self, now: float) -> Events:
        """Ends the requests whose deadline has come."""
        events: Events = []
        while self._deadlines and self._deadlines[0][0] <= now:
            events += self.cancel(self._deadlines[0][2], now, "deadline")
        return events

    def _end(
        self,
        sequence: Sequence,
        reason: str,
        now: float,
        error: RequestError | None = None,
        embedding: np.ndarray | None = None,
    ) -> Finished:
        entry = self._entries[sequence.id]
        del entry.alive[sequence.index]
        if sequence.slot != NO_SLOT:
            self.slots.withdraw(sequence, ENDED)
        else:
            self.slots.forget(
                sequence, entry.later if sequence in entry.later else self.slots.queue
            )
        if not entry.alive:
            del self._entries[sequence.id]
            if entry.request.deadline is not None:
                self._deadlines.remove((entry.request.deadline, entry.number, sequence.id))
        elif len(entry.later) == len(entry.alive):  # the one they waited for has ended
            self._call_later(sequence)
        event = sequence.finished(reason, now, error, embedding)
        entry.ends.append(event)
        self.bus.publish(
            CompletionEnded(
                entry.request,
                event,
                entry.ttft_deadline,
                entry.tpot,
                () if entry.alive else tuple(entry.ends),
                entry.had_token,
            )
        )
        return event

    def _call_later(self, leader: Sequence) -> None:
        """The completions that waited for the leader's blocks join the queue."""
        entry = self._entries[leader.id]
        for sequence in entry.later:
            sequence.block_hashes.copy_from(
                leader.block_hashes, len(leader.request.prompt) // self.cache.block_size
            )
            self.slots.wait(sequence)
        entry.later = []

    def reset(self, ends: Callable[[Sequence], bool], now: float, error: RequestError) -> Events:
        """All that was computed is lost. Sequences that `ends` names end with the error, all others
        that have a slot wait again, with the tokens they have put out. No batch is in flight any
        more, and no prefix is known."""
        slots = self.slots
        events: Events = []
        self._flight.clear()
        slots.in_flight[:] = 0
        for slot, sequence in sorted(slots.by_slot.items()):
            if slots.phase[slot] >= LEAVING:
                slots.vacate(slot)
            elif ends(sequence):
                events.append((sequence.id, self._end(sequence, "error", now, error)))
            else:
                slots.withdraw(sequence, LEAVING)
        waiting = [
            sequence
            for entry in self._entries.values()
            for sequence in entry.alive.values()
            if ends(sequence)
        ]
        for sequence in waiting:
            events.append((sequence.id, self._end(sequence, "error", now, error)))
        self.cache.flush()
        self.cache.take_table_updates()
        self.cache.take_moves()
        return events

    def had_token(self, sequence: Sequence) -> bool:
        """Whether its request has put out a token."""
        return self._entries[sequence.id].had_token

    def check(self) -> None:
        """The invariants of scheduler, slots and cache. Errors: AssertionError with what
        differs."""
        self.cache.check()
        self._page_admission.check()
        self.slots.check(self._flight)
        alive = {
            sequence.number for entry in self._entries.values() for sequence in entry.alive.values()
        }
        ended = set(self.slots.number[self.slots.phase == ENDED].tolist())
        assert alive | ended == set(self.sequences) and not alive & ended, (
            f"alive {alive}, ended {ended}, all {set(self.sequences)}"
        )
        later = sum(len(entry.later) for entry in self._entries.values())
        queued = len(self.slots.queue)
        assert later + queued == self.waiting, (
            f"{self.waiting} wait: {later} later, {queued} in the queue"
        )
        deadlines = sum(entry.request.deadline is not None for entry in self._entries.values())
        assert len(self._deadlines) == deadlines, (
            f"{len(self._deadlines)} deadlines of {deadlines} requests"
        )
