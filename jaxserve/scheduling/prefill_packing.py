"""Packs prefill chunks into a step, beside its decodes.

Sequences come in the order of the policy: those that are partly prefilled get their next chunk,
waiting ones are admitted while there is a slot and, as `page_admission` says, there are pages. The
first prompt that cannot be finished in this step leaves a share of its time to much shorter ones,
the more the closer these are to their deadlines (prefill-prefill batching, medha.md M9), then takes
what is left of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from jaxserve.cache import CacheManager
from jaxserve.lanes.planner import LanePlanner
from jaxserve.policies import POLICIES, relative_slack
from jaxserve.scheduling.budget import CHUNKING, SHARER_WORK_RATIO, StepBudget
from jaxserve.scheduling.checkpoint_policy import CheckpointPolicy
from jaxserve.scheduling.fetches import Fetches
from jaxserve.scheduling.page_admission import PageAdmission
from jaxserve.scheduling.pool.interface import Pool, PoolChunk, PoolScheduler, PoolStep
from jaxserve.scheduling.prefill_chunks import ChunkCandidate, PrefillChunks
from jaxserve.scheduling.prefill_order import PrefillOrder
from jaxserve.scheduling.prefill_step import PrefillChunk, PrefillStep
from jaxserve.scheduling.sequence import NO_SLOT, Sequence
from jaxserve.scheduling.slots import DECODE, LEAVING, SlotTable
from jaxserve.settings.schema import SchedulerConfig

MAX_SHARERS_TRIED = 64  # prompts looked at for a long prompt's step
MAX_PROMPTS_DECIDED = 64  # that a scheduler over the pool is asked about
MAX_MISSES = 4  # prompts in a row for which the step had no time left: then no more are tried


class PrefillPacker:
    """Packs the prefill part of one step after another.

    checkpoints, planner: see `PrefillChunks`. pool: the lanes' KV, where it is spread over them;
    scheduler: decides which of its prompts run together, and on how many lanes; None: the order of
    the policy and the time that is left.
    """

    def __init__(
        self,
        cache: CacheManager,
        slots: SlotTable,
        admission: PageAdmission,
        fetches: Fetches,
        checkpoints: CheckpointPolicy | None = None,
        planner: LanePlanner | None = None,
        pool: Pool | None = None,
        scheduler: PoolScheduler | None = None,
    ):
        self.cache = cache
        self.slots = slots
        self.admission = admission
        self.fetches = fetches
        self.chunks = PrefillChunks(cache, slots, admission, fetches, planner, checkpoints)
        self.pool = pool
        self.scheduler = scheduler

    def begins(self, config: SchedulerConfig, now: float) -> bool:
        """Begins a step. Returns whether it may compute something of a prompt."""
        slots = self.slots
        self.chunks.prefetch.look(POLICIES[config.policy], now)
        return bool(slots.prefilling or (slots.queue and slots.free))

    def pack(self, config: SchedulerConfig, now: float, budget: StepBudget) -> list[PrefillChunk]:
        """Packs chunks of prefilling and of newly admitted sequences, in the order of the policy,
        as far as the budget and the pages go; to be called where the step `begins`."""
        slots = self.slots
        policy = POLICIES[config.policy]
        step = self._begin(config, now, budget)
        order = PrefillOrder(policy, now, slots, self.admission)
        if self.pool is None:
            self._pack(step, order)
        elif self.scheduler is None:
            self._match_homes(self.pool, step, order)
            self._pack(step, order)
        else:
            self._pack_decided(self.pool, self.scheduler, step, order)
        return step.chunks

    def pack_whole(
        self, config: SchedulerConfig, now: float, budget: StepBudget, prompts: Iterable[Sequence]
    ) -> list[PrefillChunk]:
        """Packs what is left of these prompts, in this order; none of which the step cannot take
        all, or whose next blocks are fetched."""
        step = self._new_step(config, now, budget)
        for sequence in filter(self._may, prompts):
            candidate = self.chunks.find(step, sequence)
            if candidate is None or (candidate.first is not None and candidate.first.fetch):
                continue
            length = sequence.prefill_len - candidate.start
            fits = self._capacity(step, candidate) >= length
            if fits and candidate.first is None:
                pages = self.chunks.length_with_pages(sequence, length, step.reserve)
                fits = pages == length
            if fits:
                self.chunks.add(step, candidate, length)
        return step.chunks

    def _match_homes(self, pool: Pool, step: PrefillStep, order: PrefillOrder) -> None:
        """Finds homes for the prompts that may be admitted, all of them at once."""
        most = min(len(self.slots.free), 2 * pool.lanes)
        if not (most and self.slots.queue and self.admission.open):
            return
        waiting = order.first(most, running=False)
        prompts = [sequence.number for sequence in waiting]
        if prompts:
            lanes = [lane for lane, left in enumerate(step.budget.tokens_left) if left]
            for prompt, home in zip(prompts, pool.homes(prompts, lanes)):
                step.homes[prompt] = range(home, home + 1)

    def _first_chunk(self, pool: Pool, step: PrefillStep, sequence: Sequence) -> PoolChunk:
        """Returns the next chunk of a sequence, as long as the step may take it."""
        left = sequence.prefill_len - pool.cached(sequence.number)
        return PoolChunk(sequence.number, min(left, step.config.chunk_tokens * pool.lanes))

    def _pack_decided(
        self, pool: Pool, scheduler: PoolScheduler, step: PrefillStep, order: PrefillOrder
    ) -> None:
        """Packs the batches of a scheduler over the pool, as far as time and pages go."""
        computable = self._computable(step, filter(self._may, order.first(MAX_PROMPTS_DECIDED)))
        sequences = [candidate.sequence for candidate in computable]
        if not sequences:
            return
        decodes = np.flatnonzero(self.slots.phase == DECODE)
        seconds = max(step.budget.target - max(step.budget.decode_seconds), 0.0)
        view = PoolStep(
            [self._first_chunk(pool, step, sequence) for sequence in sequences],
            self.slots.number[decodes].tolist(),
            seconds,
            step.config.chunk_tokens,
        )
        batches, degrees = scheduler.decide(pool, view)
        groups = pool.gen_plans(batches, degrees, pool.get_prefix_tree()).groups
        for batch, group in zip(batches, groups):
            step.dealt.update((chunk.prompt, group) for chunk in batch)
        step.homes.update(step.dealt)
        tokens = {chunk.prompt: chunk.tokens for batch in batches for chunk in batch}
        decided = map(self.slots.by_number.__getitem__, tokens)
        for candidate in self._computable(step, filter(self._may, decided)):
            length = self._length(step, candidate, step.budget.target)
            self._add_something(step, candidate, min(length, tokens[candidate.sequence.number]))
            if step.out_of_pages:
                return

    def _may(self, sequence: Sequence) -> bool:
        """Returns whether a sequence has a slot, or may get one in this step."""
        return sequence.slot != NO_SLOT or self.admission.may(sequence)

    def _begin(self, config: SchedulerConfig, now: float, budget: StepBudget) -> PrefillStep:
        self.slots.adapters.begin()
        step = self._new_step(config, now, budget)
        if not step.reserve:
            self._preempt_for_oldest()
        return step

    def _new_step(self, config: SchedulerConfig, now: float, budget: StepBudget) -> PrefillStep:
        reserve = int(np.count_nonzero(self.slots.phase == DECODE)) * self.cache.needs.per_block
        step = PrefillStep(config, now, budget, reserve, [0.0] * len(budget.lanes))
        # on one lane nothing is chosen by what is pending
        if len(budget.lanes) > 1 or self.chunks.planner is not None:
            for sequence in self.slots.prefilling:
                step.count_pending(sequence, self.cache.prefill_lanes(sequence.slot))
        self.admission.begin(reserve)
        return step

    def _preempt_for_oldest(self) -> None:
        """Preempts the youngest prefilling sequences until there is a page for the oldest one:
        without decodes it is the one that must go on."""
        prefilling = self.slots.prefilling
        while (
            len(prefilling) > 1
            and not self.chunks.length_with_pages(prefilling[0], 1, 0)
            and not self.slots.draining
        ):
            self.slots.withdraw(prefilling[-1], LEAVING)

    def _pack(self, step: PrefillStep, order: PrefillOrder) -> None:
        budget = step.budget
        lead = None
        for candidate in self._computable(step, order.ranked()):
            turn = order.turn(candidate.sequence)
            # prompts of a later turn do not prolong the step
            if lead is not None and turn > lead and not budget.end_here():
                return
            lead = turn if lead is None else lead
            limit = budget.long_target if candidate.first is None else budget.target
            length = self._length(step, candidate, limit)
            unfinished = length < candidate.sequence.prefill_len - candidate.start
            if step.config.chunking == "adaptive" and unfinished:
                self._pack_shared(step, candidate, order)
                return
            self._add_something(step, candidate, length)
            if step.out_of_pages or not any(budget.tokens_left):
                return

    def _computable(
        self, step: PrefillStep, sequences: Iterable[Sequence]
    ) -> Iterator[ChunkCandidate]:
        """Yields where the next chunks of these sequences would run. Those whose next blocks are
        fetched get their slot and wait for them there."""
        for sequence in sequences:
            candidate = self.chunks.find(step, sequence)
            if candidate is None:
                continue
            first = candidate.first
            if first is None or first.fetch is None:
                yield candidate
            else:
                self.chunks.admit(step, candidate)
                self.fetches.begin(sequence, first.fetch, step.now)

    def _pack_shared(
        self, step: PrefillStep, candidate: ChunkCandidate, order: PrefillOrder
    ) -> None:
        """Packs a prompt that needs several steps: first those that may share this one, then as
        much of the prompt as time is left for.

        On other lanes all prompts may use all of the step's time, on its own lane much shorter ones
        a share of it, but not those of tenants whose turn is later.
        """
        long = candidate.sequence
        if candidate.first is not None:
            self.chunks.admit(step, candidate)
            candidate = self.chunks.find(step, long) or candidate._replace(first=None)
        lanes = len(step.budget.lanes)
        if lanes > 1 and len(candidate.place.group) < lanes:
            self._add_sharers(step, candidate, order.ranked(), order)
        self._add_sharers(step, candidate, order.sharers(long, step.budget.target), order)
        length = self._length(step, candidate, step.budget.long_target)
        if step.config.chunking == "adaptive":
            self._add_worthwhile(step, candidate, length)
        else:
            self._add_something(step, candidate, length)

    def _add_worthwhile(self, step: PrefillStep, candidate: ChunkCandidate, length: int) -> None:
        """Adds a chunk of `length` tokens or, where that takes less time for each token, of more,
        once the decodes can afford it; until then steps go without."""
        length = self._first_tile(step, candidate, length)
        if not length:
            return
        most = self._capacity(step, candidate)
        length = step.budget.worthwhile(candidate.place, candidate.start, length, most)
        if self._affords(step, candidate, length):
            self.chunks.add(step, candidate, length)

    def _first_tile(self, step: PrefillStep, candidate: ChunkCandidate, length: int) -> int:
        """Returns the length of a chunk; a tile in place of nothing, where it is the first."""
        if length or step.chunks:
            return length
        return min(step.config.tile, self._capacity(step, candidate))

    def _affords(self, step: PrefillStep, candidate: ChunkCandidate, length: int) -> bool:
        """Returns whether the decodes can afford a chunk of `length` tokens; they save for it where
        they cannot."""
        seconds = step.budget.seconds_with(candidate.place, candidate.start, length)
        if step.budget.affords(seconds):
            return True
        step.budget.saving = seconds
        return False

    def _add_sharers(
        self,
        step: PrefillStep,
        long: ChunkCandidate,
        others: Iterable[Sequence],
        order: PrefillOrder,
        beside: bool = True,
    ) -> None:
        """Adds chunks of other prompts to the step of a long one. beside: those on other lanes may
        use all of the step's time, but those that are long themselves leave most of it to much
        shorter ones too."""
        misses = 0
        most_work = SHARER_WORK_RATIO * long.sequence.prefill_seconds_left
        for tried, other in enumerate(self._computable(step, others), 1):
            apart = (
                len(step.budget.lanes) > 1
                and other.place.home not in long.place.group
                and long.place.home not in other.place.group
            )
            if apart or (
                other.sequence.prefill_seconds_left <= most_work
                and order.turn(other.sequence) <= order.turn(long.sequence)
            ):
                share = 1.0 if apart and beside else self._share(step, other.sequence)
                limit = step.budget.limit(other.place.home, share)
                length = self._length(step, other, limit)
                if share == 1.0 and length < other.sequence.prefill_len - other.start:
                    inner = order.sharers(other.sequence, step.budget.target)
                    self._add_sharers(step, other, inner, order, beside=False)
                    other = self.chunks.find(step, other.sequence) or other
                    length = self._length(step, other, limit)
                misses = 0 if self.chunks.add(step, other, length) else misses + 1
            if misses == MAX_MISSES or tried == MAX_SHARERS_TRIED or step.out_of_pages:
                return

    def _share(self, step: PrefillStep, sequence: Sequence) -> float:
        """Returns the share of a long prompt's step that this sequence may use: more of
        `config.sharing` the more of its time to the first token is used up, all of it when that is
        `config.sharing_ramp` (Medha 4.2)."""
        slack = relative_slack(
            step.now,
            sequence.request.arrival,
            sequence.ttft_deadline,
            sequence.prefill_seconds_left,
        )
        used = max(0.0, 1 - float(slack))
        return step.config.sharing * min(1.0, used / step.config.sharing_ramp)

    def _length(self, step: PrefillStep, candidate: ChunkCandidate, limit: float) -> int:
        """Returns the tokens of the chunk with which the step takes at most `limit` seconds."""
        tokens = self._capacity(step, candidate)
        if tokens <= 0:
            return 0
        chunking = CHUNKING[step.config.chunking]
        place, start = candidate.place, candidate.start
        length = chunking(step.budget, place, start, tokens, limit)
        if candidate.first is not None:
            return length
        return self.chunks.history.worthwhile(
            step.budget, candidate.sequence.slot, place, start, length
        )

    def _capacity(self, step: PrefillStep, candidate: ChunkCandidate) -> int:
        """Returns the most tokens of the chunk: to the end of the plan's part, as its lanes can
        take."""
        left_of_part = candidate.part.stop - candidate.start
        return min(left_of_part, step.budget.capacity(candidate.place))

    def _add_something(self, step: PrefillStep, candidate: ChunkCandidate, length: int) -> None:
        """Adds a chunk of `length` tokens; if it is the first of the step, of a tile at least, once
        the decodes can afford that."""
        least = self._first_tile(step, candidate, length)
        if least == length or self._affords(step, candidate, least):
            self.chunks.add(step, candidate, least)
