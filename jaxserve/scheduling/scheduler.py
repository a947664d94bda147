"""The four verbs: add, start, finish, cancel. Time is an argument.

A long step may be issued in part, by groups of its layers (`partial`): between two of them
`interrupt` may return another batch that runs first, and `go_on` notes each group.

`packing` decides what a batch contains, `slots` knows who waits and who runs, `request_table` which
requests live, `batch_reader` turns results into events; here requests become sequences, and batches
are issued and read.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from jaxserve.api.batch import Batch
from jaxserve.api.errors import RequestError
from jaxserve.api.events import Accepted, Event
from jaxserve.api.request import Request, unknown_adapter
from jaxserve.cache import CacheManager
from jaxserve.cache.copies import PrefixCopies
from jaxserve.cache.hashes import CacheIdentity
from jaxserve.costs.coefficients import NOMINAL, Costs
from jaxserve.costs.predictor import Predictor
from jaxserve.drafts.drafter import Drafter
from jaxserve.lanes.choice import ExchangeChooser
from jaxserve.lanes.cost import lane_costs
from jaxserve.lanes.planner import LanePlanner
from jaxserve.scheduling.admission import AdmissionController
from jaxserve.scheduling.batch_reader import BatchReader, Events, StepResults
from jaxserve.scheduling.checkpoint_policy import CheckpointPolicy
from jaxserve.scheduling.completion_lengths import CompletionLengths
from jaxserve.scheduling.decode_reserve import DecodeReserve
from jaxserve.scheduling.drafting import Drafting
from jaxserve.scheduling.events import Admitted, BatchPacked, EventBus
from jaxserve.scheduling.fetches import Fetches
from jaxserve.scheduling.interruption import InterruptionRule, PartialStep
from jaxserve.scheduling.pacing import Pacer
from jaxserve.scheduling.packing import BatchPacker
from jaxserve.scheduling.page_admission import PageAdmission
from jaxserve.scheduling.pool.interface import Pool, PoolScheduler
from jaxserve.scheduling.prefill_packing import PrefillPacker
from jaxserve.scheduling.prefill_step import PrefillChunk
from jaxserve.scheduling.prefill_times import PrefillTimes
from jaxserve.scheduling.reclaim import Reclaim
from jaxserve.scheduling.request_table import LiveEntry, RequestTable
from jaxserve.scheduling.sequence import Sequence, SequenceLimits
from jaxserve.scheduling.shares import TenantShares, seconds_by_row
from jaxserve.scheduling.slots import LEAVING, SlotTable
from jaxserve.settings.schema import MeshConfig, SchedulerConfig


@dataclass(frozen=True, slots=True)
class Load:
    """Load of a replica. Pages are those of all lanes; cached ones can be evicted, so they are
    room too."""

    running: int
    waiting: int
    queued_prefill_tokens: int
    queued_prefill_seconds: float  # of steps, as predicted
    pages_free: int
    pages_total: int
    pages_cached: int


class Scheduler:
    """Decides what runs next; see the package. `sequences` holds, by number, every sequence that
    waits or that a batch in flight contains. `pool` is the cache's face to schedulers over a pool.

    costs: what steps cost; NOMINAL if unknown. planner: plans which lanes compute which part of a
    prompt, or which prompts run together on how many lanes; None: the cache chooses. chooser:
    chooses how lanes exchange what spread chunks need; None if no rates are known. What happens is
    published on `bus`. `partial`: the newest batch, while some groups of its layers are to be
    issued; `interruptions`: how often another batch ran before the rest of one."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        mesh: MeshConfig,
        max_len: int,
        eos_ids: Iterable[int] = (),
        costs: Costs = NOMINAL,
        planner: LanePlanner | PoolScheduler | None = None,
        chooser: ExchangeChooser | None = None,
    ):
        self.config = config
        self.cache = cache
        self.max_len = max_len
        self.bus = EventBus()
        lanes = lane_costs(costs, mesh.kvp, chooser, cache.prompt_lanes)
        self.predictor = Predictor(costs, mesh, lanes)
        self.times = PrefillTimes(config, self.predictor)
        self.shares = TenantShares(config.weights)
        self.slots = SlotTable(
            config.max_seqs, cache, self.times.seconds, self.shares, config.max_loras
        )
        self.line = self.slots.queue.line
        self.shares.joined.append(self.line.joined)
        self.sequences = self.slots.by_number
        self.requests = RequestTable(self.slots, self.bus)
        self.fetches = Fetches(cache, self.slots, self.predictor)
        lengths = CompletionLengths()
        lengths.listen(self.bus)
        copies = PrefixCopies(cache) if cache.copying else None
        growth = DecodeReserve(cache, self.slots, lengths, config.decode_reserve)
        reclaim = Reclaim(self.slots, cache, growth)
        self.admission = self._make_admission(lengths)
        self.page_admission = PageAdmission(
            cache,
            self.slots,
            growth,
            reclaim,
            None if self.admission is None else self.admission.max_running,
            copies,
        )
        self.checkpoints: CheckpointPolicy | None = None
        if cache.states is not None:
            self.checkpoints = CheckpointPolicy(
                cache, cache.states, self.slots, self.predictor, config.chunk_tokens
            )
        drafting = None
        if config.drafts != "none":
            drafting = Drafting(config, cache, self.slots, self.predictor, lengths)
        pacer = Pacer(self.slots, self.predictor, lengths)
        pacer.listen(self.bus)
        self.pool = Pool(cache, self.slots, costs, None if chooser is None else chooser.heads)
        self.packer = BatchPacker(
            config,
            cache,
            self.slots,
            pacer,
            self._make_prefill(planner),
            copies,
            self.checkpoints,
            drafting,
        )
        self._reader = BatchReader(cache, self.slots, self.requests, self.times, self.bus)
        self.interruption_rule = InterruptionRule(config, self.slots, pacer)
        self.partial: PartialStep | None = None
        self.interruptions = 0
        self._planner = None if isinstance(planner, PoolScheduler) else planner
        self._eos = frozenset(eos_ids)
        self._flight: deque[Batch] = deque()
        self._born = 0
        self._batches = 0

    def _make_prefill(self, planner: LanePlanner | PoolScheduler | None) -> PrefillPacker:
        parts = self.cache, self.slots, self.page_admission, self.fetches, self.checkpoints
        if isinstance(planner, PoolScheduler):
            return PrefillPacker(*parts, None, self.pool, planner)
        return PrefillPacker(*parts, planner, self.pool if self.config.matched_homes else None)

    def _make_admission(self, lengths: CompletionLengths) -> AdmissionController | None:
        if self.config.admission == "queue":
            return None
        admission = AdmissionController(
            self.config, self.cache, self.slots, self.predictor, lengths
        )
        admission.listen(self.bus)
        return admission

    def propose_by(self, drafter: Drafter) -> None:
        """Has another drafter propose tokens; for settings that ask for some."""
        assert self.packer.drafting is not None, "the settings ask for no proposed tokens"
        self.packer.drafting.drafter = drafter

    def predict_by(self, costs: Costs) -> None:
        """Predicts by other costs from now on, with one lane and while no request waits or runs:
        what is known of one was predicted before."""
        assert self.predictor.mesh.kvp == 1 and not self.sequences
        costs = dataclasses.replace(costs, layer_groups=self.predictor.costs.layer_groups)
        self.predictor.use(costs, lane_costs(costs, 1, None, self.cache.prompt_lanes))

    def load(self) -> Load:
        """Returns how busy the replica is."""
        slots = self.slots
        free, cached, _ = self.cache.counts()
        tokens = sum(
            sequence.prefill_len - int(slots.issued[sequence.slot]) for sequence in slots.prefilling
        )
        tokens += int(slots.queue.tokens.sum())
        return Load(
            running=slots.running,
            waiting=slots.waiting,
            queued_prefill_tokens=tokens,
            queued_prefill_seconds=slots.backlog,
            pages_free=free,
            pages_total=self.cache.total,
            pages_cached=cached,
        )

    # --- requests come

    def add(
        self,
        request: Request,
        now: float | None = None,
        received: int = 0,
        quiet: bool = False,
    ) -> list[Event]:
        """Queues a request that comes now (None: at its arrival).

        received: tokens of its prompt, not all, whose KV comes with it: its first completion gets
        pages for them, and they are not computed unless it is preempted. quiet: of its events
        `finish` returns only ends. Errors: RequestError for an id in use, an adapter that is not
        loaded, a full queue, a request that can never fit, and, with admission control, one that
        could not be in time. One with a continuation was accepted before: neither a full queue nor
        admission control refuses it.
        """
        if request.id in self.requests.entries:
            raise RequestError("request_id", f"{request.id!r} is in use", "ALREADY_EXISTS")
        if request.adapter and request.adapter not in self.slots.adapters.numbers:
            raise unknown_adapter(request.adapter)
        self._check_version(request)
        ahead = len(self.slots.queue)
        now = request.arrival if now is None else now
        begins = request.continuation is None
        if begins:
            self._check_queue(ahead, request.tenant)
        sequences = self._sequences(request, received)
        for sequence in sequences:
            sequence.quiet = quiet
        self.line.came(sequences)
        leader, *later = sequences
        first = None
        if begins:
            first = self._check_admission(leader, now)
        self._born += len(sequences)
        self.shares.begin(request.tenant, now)
        self.sequences.update((sequence.number, sequence) for sequence in sequences)
        alive = {sequence.index: sequence for sequence in sequences}
        had_token = any(sequence.output for sequence in sequences)
        self.requests.add(LiveEntry(request, leader, alive, later, had_token))
        self.slots.wait(leader)
        self._note_line(leader, now)
        self.page_admission.promise(leader)
        self.requests.sessions.began(leader, request.arrival)
        if self._planner is not None:
            self._planner.arrived(request.arrival)
        if first is None:
            if not self.predictor.calibrated:
                return [Accepted(ahead)]
            begun = self._flight[-1].seconds / 2 if self._flight else 0.0
            return [Accepted(ahead, self.times.waiting(leader, self.slots, begun))]
        return [Accepted(ahead, first - request.arrival)]

    def _note_line(self, leader: Sequence, now: float) -> None:
        """Notes the line in which the youngest waiting sequence stands: all prompts but those of
        tenants whose turn is later."""
        prompts = self.slots.prompts(now)
        ahead = prompts.work
        if prompts.turn.size:
            ahead = ahead[prompts.turn <= prompts.turn[-1]]
        self.line.found(leader.tenant, float(ahead.sum()))

    def _check_version(self, request: Request) -> None:
        """Checks that a request goes on with the weights that it began with. Errors:
        RequestError."""
        begun = request.continuation
        served = self.requests.weight_version
        if begun is None or not begun.weight_version:  # "": nothing was heard of it
            return
        if begun.weight_version != served:
            fault = f"has tokens of weights {begun.weight_version!r}, and {served!r} are served"
            raise RequestError("continuation", fault, "UNAVAILABLE")

    def _check_queue(self, ahead: int, tenant: str) -> None:
        """Checks the queue. Errors: RequestError if `ahead` waiting requests leave no room for
        more, and this tenant's are as many as its share of them."""
        limit = self.config.max_queue
        if ahead < limit:
            return
        number = self.shares.number(tenant)
        own = np.count_nonzero(self.slots.queue.tenants == number)
        if own < limit * self.shares.part_beside(number):
            return
        after = float(self.slots.queue.work.mean()) / self.predictor.mesh.kvp
        raise RequestError(
            "",
            f"{ahead} requests are waiting, which is the limit",
            "RESOURCE_EXHAUSTED",
            after,
            "queue",
        )

    def _check_admission(self, leader: Sequence, now: float) -> float | None:
        """Returns the clock second of the first token as forecast; None without admission control.
        Errors: RequestError if the request is refused."""
        if self.admission is None:
            return None
        begun = sum(batch.seconds for batch in self._flight)
        if self._flight:
            begun -= self._flight[0].seconds / 2
        first = self.admission.check(leader, now, begun, self.times.feasible(leader.request))
        self.admission.promise(leader, first)
        return first

    def _sequences(self, request: Request, received: int) -> list[Sequence]:
        """Makes the completions of a request. Errors: RequestError if they can never fit."""
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
        need = self.cache.needs.of(prompt + limit - 1)
        if need > self.cache.usable:
            raise RequestError(
                "prompt",
                f"with max_tokens {limit} it needs {need} pages, the cache has {self.cache.usable}",
            )
        stops = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stops |= self._eos
        deadline = self.times.deadline(request)
        objectives = self.times.objectives(request)
        tpot = objectives.tpot_of(request)
        tbt = objectives.tbt_of(request)
        # nothing is promised of later completions: they take slots as these come
        turn = limit * tpot / self.config.max_seqs
        hashes = self.cache.block_hashes
        tenant = self.shares.number(request.tenant)
        return [
            Sequence(
                self._born + place,
                index,
                request,
                SequenceLimits(limit, stops, deadline + place * turn, tpot, tbt),
                hashes,
                0 if place else received,
                tenant,
            )
            for place, index in enumerate(request.completions)
        ]

    # --- other weights

    @property
    def flying(self) -> bool:
        """Returns whether a batch was issued and not read."""
        return bool(self._flight)

    def hold(self, held: bool) -> None:
        """Gives slots only to requests that have begun, while `held`."""
        self.page_admission.allows = self.requests.has_begun if held else None

    def renew(self, identity: CacheIdentity, weight_version: str) -> None:
        """Begins to compute with other weights: also what waits, and without a block of before.
        identity: of the cache's blocks from now on. No request may have begun."""
        assert not self.slots.running and not self.flying, "something was computed already"
        self.cache.flush()
        # also by which blocks are found below the devices, and elsewhere
        self.cache.identity = self.cache.below.identity = identity
        self.requests.weight_version = weight_version
        for sequence in self.requests.sequences():
            sequence.renew_hashes(self.cache.block_hashes)

    # --- batches

    def start(self, now: float) -> Batch | None:
        """Returns the next batch, to be run after all batches before it; None if nothing can be
        issued now. If it is `partial` then, it is issued by groups of its layers: the first one
        now, the others with `go_on`. No other is started before the last of them."""
        assert self.partial is None, "the newest batch is not issued to its end"
        backlog = self.slots.backlog
        packed = self.packer.pack(self._batches, now)
        if packed is None:
            return None
        batch, chunks = packed
        self._flight.append(batch)
        self._publish_packed(batch, backlog, now)
        if self.interruption_rule.applies(batch):
            self.partial = PartialStep(batch, chunks, self.interruption_rule.groups)
        else:
            self._publish_blocks(chunks)
        return batch

    def _publish_packed(self, batch: Batch, backlog: float, now: float) -> None:
        self._charge(batch, now)
        self.line.done += max(0.0, backlog - self.slots.backlog)
        if self.bus.has_subscribers(BatchPacked):
            self.bus.publish(BatchPacked(batch, backlog))
        self._batches += 1
        for row in batch.admitted:
            slot = int(batch.slot[row])
            self.bus.publish(Admitted(self.slots.by_slot[slot], slot))

    def _charge(self, batch: Batch, now: float) -> None:
        """Takes the batch's predicted seconds from its tenants' credits."""
        if len(self.shares) == 1:
            self.shares.charge_all(batch.seconds, now)
        else:
            seconds = seconds_by_row(batch, self.predictor.costs)
            self.shares.charge(self.slots.tenant[batch.slot], seconds, now)

    def _publish_blocks(self, chunks: Iterable[PrefillChunk]) -> None:
        """Lets later batches share what issued chunks compute."""
        size = self.cache.block_size
        for chunk in chunks:
            sequence = self.slots.by_slot[chunk.slot]
            self.cache.publish(
                chunk.slot, chunk.start // size, chunk.stop // size, sequence.block_hashes
            )
            if chunk.stop == sequence.prefill_len and self.requests.alive(sequence):
                self.requests.queue_later(sequence)

    def interrupt(self, begins: float, now: float) -> Batch | None:
        """Returns a batch to be run before the rest of the `partial` one, issued whole and read
        before it; None where that one goes on. begins: seconds until the devices have run what is
        issued."""
        step = self.partial
        assert step is not None
        prompts = self.interruption_rule.prompts(step, begins, now)
        if not prompts:
            return None
        backlog = self.slots.backlog
        packed = self.packer.pack_beside(self._batches, now, step.batch, prompts)
        if packed is None:
            return None
        batch, chunks = packed
        step.interrupted_after = step.issued
        self.interruptions += 1
        self._flight.insert(len(self._flight) - 1, batch)
        self._publish_packed(batch, backlog, now)
        self._publish_blocks(chunks)
        return batch

    def go_on(self) -> bool:
        """Notes that the next group of the `partial` batch's layers is issued. Returns whether it
        was the last: then nothing is `partial` any more."""
        step = self.partial
        assert step is not None
        step.issued += 1
        if step.issued < step.groups:
            return False
        self.partial = None
        self._publish_blocks(step.chunks)
        return True

    def finish(self, batch: Batch, results: StepResults, now: float) -> Events:
        """Returns the events of the oldest batch in flight, which was read at clock second `now`.
        Errors: ValueError for another batch."""
        if not self._flight or self._flight[0] is not batch:
            raise ValueError(f"batch {batch.number} is not the oldest one in flight")
        self._flight.popleft()
        slots = batch.slot.astype(np.intp)  # by which numpy looks up fastest
        self.slots.in_flight[slots] -= 1
        events = self._reader.read(batch, results, now)
        self.slots.finish(slots)
        return events

    # --- requests end

    def cancel(
        self,
        id: str,
        now: float,
        reason: str = "cancelled",
        index: int | None = None,
        error: RequestError | None = None,
    ) -> Events:
        """Ends a request, or only its completion `index` if that has not ended yet. Errors:
        RequestError for an unknown id."""
        if id not in self.requests.entries:
            raise RequestError("request_id", f"{id!r} is unknown", "NOT_FOUND")
        alive = list(self.requests.entries[id].alive.values())
        ends = [sequence for sequence in alive if index in (None, sequence.index)]
        return [(id, self.requests.end(sequence, reason, now, error)) for sequence in ends]

    def alive(self, number: int) -> bool:
        """Returns whether a sequence that waits or that a batch in flight contains has not
        ended."""
        return self.requests.alive(self.sequences[number])

    def fail(self, number: int, now: float, error: RequestError) -> Events:
        """Ends one sequence that is alive."""
        sequence = self.sequences[number]
        return [(sequence.id, self.requests.end(sequence, "error", now, error))]

    def expire(self, now: float) -> Events:
        """Ends the requests whose deadline has come, and the leases of blocks that are over."""
        self.cache.leases.release_due(now)
        self.cache.sessions.release_due(now)
        events: Events = []
        while (id := self.requests.next_expired(now)) is not None:
            events += self.cancel(id, now, "deadline")
        return events

    def reset(self, ends: Callable[[Sequence], bool], now: float, error: RequestError) -> Events:
        """Begins again after all that was computed is lost. Sequences that `ends` names end with
        the error, all others that have a slot wait again, with the tokens they have put out. No
        batch is in flight any more, and no prefix is known."""
        slots = self.slots
        events: Events = []
        self._flight.clear()
        self.partial = None
        slots.in_flight[:] = 0
        for slot, sequence in sorted(slots.by_slot.items()):
            if slots.phase[slot] >= LEAVING:
                slots.vacate(slot)
            elif ends(sequence):
                events.append((sequence.id, self.requests.end(sequence, "error", now, error)))
            else:
                slots.withdraw(sequence, LEAVING)
        for sequence in list(filter(ends, self.requests.sequences())):
            events.append((sequence.id, self.requests.end(sequence, "error", now, error)))
        self.cache.flush()
        # nothing that was to be read of the old pages may be read of the new ones
        self.cache.stores.take()
        self.cache.table_updates.take()
        self.cache.moves.take()
        slots.adapters.reset()
        self.packer.pacer.reset()
        return events

    def check(self) -> None:
        """Checks the invariants of scheduler, slots and cache. Errors: AssertionError with what
        differs."""
        self.cache.check()
        self.page_admission.check()
        self.slots.check(self._flight)
        self.requests.check()
        self.shares.check(Counter(one.request.tenant for one in self.requests.entries.values()))
