"""Packs prefill chunks into a step, beside its decodes.

Sequences come in the order of the policy: those that are partly prefilled get their next chunk,
waiting ones are admitted while there is a slot and, as `page_admission` says, there are pages. The
first prompt that cannot be finished in this step leaves a share of its time to much shorter ones,
the more the closer these are to their deadlines (prefill-prefill batching, medha.md M9), then takes
the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from jaxserve.api.request import KvSource
from jaxserve.cache import CacheManager
from jaxserve.costs.predictor import Predictor
from jaxserve.lanes.groups import lanes_of
from jaxserve.policies import POLICIES, relative_slack
from jaxserve.scheduling.budget import CHUNKING, BlocksPerLane, StepBudget
from jaxserve.scheduling.page_admission import PageAdmission
from jaxserve.scheduling.prefetch import QueuePrefetch
from jaxserve.scheduling.prefill_order import PrefillOrder
from jaxserve.scheduling.sequence import NO_SLOT, PlanPart, Sequence
from jaxserve.scheduling.slots import DECODE, LEAVING, SlotTable
from jaxserve.settings.schema import SchedulerConfig

# share of a long prompt's remaining work: prompts with at most so much may share its step
SHARER_WORK_RATIO = 1 / 8
MAX_SHARERS_TRIED = 64  # prompts looked at for a long prompt's step
MAX_MISSES = 4  # prompts in a row for which the step had no time left: then no more are tried
# share of its TTFT budget that a prompt has used up when it may take all of `config.sharing`
FULL_SHARE_AT = 1 / 32
# seconds of work by which a lane that can take no more tokens in this step seems busier to planners
CLOSED_LANE_PENALTY = 1e6

FETCH_SECONDS = 10.0  # until the next piece of a fetch must have come
SOURCE_SECONDS = 630.0  # the same, where another replica computes it; it tells sooner if it fails


class ChunkCandidate(NamedTuple):
    """Where a sequence's next chunk would run."""

    home: int  # lane
    # if the sequence is spread, or will be by this chunk; else None
    blocks_per_lane: BlocksPerLane
    start: int  # first token
    # of a sequence that waits: the pages that hold its first blocks already
    pages: np.ndarray | None

    @property
    def lanes(self) -> range:
        """The lanes that would compute it."""
        return lanes_of(self.home, self.blocks_per_lane)


class PrefillChunk(NamedTuple):
    """Tokens `start` to before `stop` of a prompt, which have pages and go into the batch."""

    slot: int
    start: int
    stop: int
    admitted: bool  # the sequence got its slot in this step
    group_size: int  # lanes that compute it, see Batch


class Planner(Protocol):
    """Plans which lanes compute which part of a prompt."""

    def arrived(self, now: float) -> None:
        """Notes a request that comes at this clock second."""

    def __call__(self, pending: list[float], start: int, target: int) -> tuple[PlanPart, ...]:
        """A plan for tokens `start` to before `target`; pending: seconds of prefill that each lane
        has to do first."""


@dataclass(slots=True)
class PrefillStep:
    """The prefill part of one step, while it is packed."""

    config: SchedulerConfig
    now: float  # clock seconds
    budget: StepBudget
    reserve: int  # pages that are kept for decodes
    pending: list[float]  # seconds of prefill that each lane has to do
    chunks: list[PrefillChunk] = field(default_factory=list)
    out_of_pages: bool = False  # a sequence that is partly prefilled found no page

    def count_pending(self, sequence: Sequence, home: int) -> None:
        """Counts what is left of a prompt as work of the lanes that will do it: all that are part
        of its plan, until that has ended."""
        for lane in sequence.plan[-1].lanes if sequence.plan else (home,):
            self.pending[lane] += sequence.prefill_seconds_left

    def seconds_left(self, sequence: Sequence, start: int) -> float:
        """Predicted seconds of a prompt's prefill from token `start` on, as it is planned."""
        chunk = self.config.chunk_tokens
        predictor = self.budget.predictor
        if not sequence.plan:
            return predictor.prefill(start, sequence.prefill_len, chunk)
        seconds = 0.0
        for part in sequence.plan:
            seconds += predictor.prefill_on(len(part.lanes), start, part.stop, chunk)
            start = max(start, part.stop)
        return seconds


class PrefillPacker:
    """Packs the prefill part of one step after another. planner: plans which lanes compute which
    part of a prompt; without one all of it has one home lane."""

    def __init__(
        self,
        cache: CacheManager,
        slots: SlotTable,
        admission: PageAdmission,
        planner: Planner | None = None,
    ):
        self.cache = cache
        self.slots = slots
        self.admission = admission
        self.planner = planner
        self._prefetch = QueuePrefetch(cache, slots)

    def pack(self, config: SchedulerConfig, now: float, budget: StepBudget) -> list[PrefillChunk]:
        """Chunks of prefilling and of newly admitted sequences, in the order of the policy, as far
        as the budget and the pages go."""
        slots = self.slots
        policy = POLICIES[config.policy]
        self._prefetch.look(policy, now)
        if not (slots.prefilling or (slots.queue and slots.free)):
            return []
        step = self._begin(config, now, budget)
        self._pack(step, PrefillOrder(policy, now, slots, self.admission))
        return step.chunks

    def _begin(self, config: SchedulerConfig, now: float, budget: StepBudget) -> PrefillStep:
        reserve = int(np.count_nonzero(self.slots.phase == DECODE))
        step = PrefillStep(config, now, budget, reserve, [0.0] * len(budget.lanes))
        for sequence in self.slots.prefilling:
            step.count_pending(sequence, int(self.cache.home[sequence.slot]))
        self.admission.begin(reserve)
        if not reserve:
            self._preempt_for_oldest()
        return step

    def _preempt_for_oldest(self) -> None:
        """Preempts the youngest prefilling sequences until there is a page for the oldest one:
        without decodes it is the one that must go on."""
        prefilling = self.slots.prefilling
        while (
            len(prefilling) > 1
            and not self._length_with_pages(prefilling[0], 1, 0)
            and not self.slots.draining
        ):
            self.slots.withdraw(prefilling[-1], LEAVING)

    def _pack(self, step: PrefillStep, order: PrefillOrder) -> None:
        budget = step.budget
        for sequence in order.ranked():
            candidate = self._candidate(step, sequence)
            if candidate is None:
                continue
            limit = budget.long_target if candidate.pages is None else budget.target
            length = self._chunk_length(step, sequence, candidate, limit)
            unfinished = length < sequence.prefill_len - candidate.start
            if step.config.chunking == "adaptive" and unfinished:
                self._pack_shared(step, sequence, candidate, order)
                return
            self._add_first(step, sequence, candidate, length)
            if step.out_of_pages or not any(budget.tokens_left):
                return

    def _pack_shared(
        self, step: PrefillStep, long: Sequence, candidate: ChunkCandidate, order: PrefillOrder
    ) -> None:
        """Packs a prompt that needs several steps: first those that may share this one, then as
        much of the prompt as time is left for.

        On other lanes all prompts may use all of the step's time, on its own lane much shorter ones
        a share of it.
        """
        self._admit(step, long, candidate)
        candidate = self._candidate(step, long) or candidate._replace(pages=None)
        if len(candidate.lanes) < len(step.budget.lanes):
            self._add_sharers(step, long, candidate, order.ranked())
        work = SHARER_WORK_RATIO * long.prefill_seconds_left
        self._add_sharers(step, long, candidate, order.ranked(work))
        length = self._chunk_length(step, long, candidate, step.budget.long_target)
        self._add_first(step, long, candidate, length)

    def _add_sharers(
        self,
        step: PrefillStep,
        long: Sequence,
        place: ChunkCandidate,
        others: Iterable[Sequence],
    ) -> None:
        """Adds chunks of other prompts to the step of a long one, which runs at `place`."""
        tried = misses = 0
        most_work = SHARER_WORK_RATIO * long.prefill_seconds_left
        for other in others:
            candidate = self._candidate(step, other)
            if candidate is None:
                continue
            tried += 1
            apart = candidate.home not in place.lanes and place.home not in candidate.lanes
            if apart or other.prefill_seconds_left <= most_work:
                share = 1.0 if apart else self._share(step, other)
                limit = step.budget.limit(candidate.home, share)
                length = self._chunk_length(step, other, candidate, limit)
                misses = 0 if self._add(step, other, candidate, length) else misses + 1
            if misses == MAX_MISSES or tried == MAX_SHARERS_TRIED or step.out_of_pages:
                return

    def _share(self, step: PrefillStep, sequence: Sequence) -> float:
        """The share of a long prompt's step that this sequence may use: more of `config.sharing`
        the more of its time to the first token is used up."""
        slack = relative_slack(
            step.now,
            sequence.request.arrival,
            sequence.ttft_deadline,
            sequence.prefill_seconds_left,
        )
        return step.config.sharing * min(1.0, max(0.0, 1 - float(slack)) / FULL_SHARE_AT)

    # --- one chunk

    def _candidate(self, step: PrefillStep, sequence: Sequence) -> ChunkCandidate | None:
        """Where the sequence's next chunk would run; None where it cannot in this step."""
        if sequence.slot == NO_SLOT:
            return self._candidate_to_admit(step, sequence)
        slot = sequence.slot
        home = int(self.cache.home[slot])
        if sequence.ticket is not None and step.now >= sequence.fetch_deadline:
            sequence.ticket = None  # what has not come by now is computed
        if sequence.ticket is not None or not step.budget.tokens_left[home]:
            return None
        start = int(self.slots.issued[slot])
        return ChunkCandidate(home, self._to_deal(sequence, home, start, None), start, None)

    def _to_deal(
        self, sequence: Sequence, home: int, start: int, pages: np.ndarray | None
    ) -> BlocksPerLane:
        """The blocks that lanes have of a sequence, of one that waits on the matched `pages`, and
        one at least on those over which its chunk from token `start` on is dealt; None where the
        home lane has them all."""
        cache = self.cache
        if cache.pages.lanes == 1:
            return None
        blocks = (
            cache.blocks_per_lane[sequence.slot] if pages is None else cache.count_by_lane(pages)
        )
        held = blocks.tolist()
        lanes = sequence.plan_at(start).lanes or cache.dealt_over(
            cache.blocks(sequence.prefill_len)
        )
        for lane in lanes:
            held[lane] = max(held[lane], 1)
        return held if len(lanes_of(home, held)) > 1 else None

    def _candidate_to_admit(self, step: PrefillStep, sequence: Sequence) -> ChunkCandidate | None:
        """Where the first chunk of a waiting sequence would run, by the plan that it gets, or on
        the home lane that the cache chooses. None also where its next blocks come from lower tiers:
        then it gets its slot now, and waits for them there."""
        tokens_left = step.budget.tokens_left
        lanes = [lane for lane, left in enumerate(tokens_left) if left]
        pages = self.admission.match(sequence) if self.admission.open and lanes else None
        if pages is None or self._prefetch.waits(sequence, step.now):
            return None
        start = max(len(pages) * self.cache.block_size, sequence.received)
        if self.planner is not None:
            sequence.plan = self._plan(self.planner, step, start, sequence.prefill_len)
            if sequence.plan:
                lanes = [lane for lane in sequence.plan[0].lanes if tokens_left[lane]]
                if not lanes:
                    return None
        if sequence.plan:
            home = lanes[0]
        else:
            stop = min(start + step.config.chunk_tokens, sequence.prefill_len)
            need = self.cache.blocks(stop) - len(pages)
            home = self.cache.choose_home(pages, lanes, need, step.pending)
        candidate = ChunkCandidate(home, self._to_deal(sequence, home, start, pages), start, pages)
        first = len(pages)
        keys, source = self._fetchable(step.budget.predictor, sequence, first)
        if not keys:
            return candidate
        self._admit(step, sequence, candidate)
        there = None
        if source is not None:
            last = first + len(keys)
            hashes = sequence.block_hashes
            there = self.cache.source_blocks(hashes, first, last, source.block_size)
        sequence.ticket = self.cache.fetch(sequence.slot, keys, source, there)
        sequence.fetch_seconds = SOURCE_SECONDS if source else FETCH_SECONDS
        sequence.fetch_deadline = step.now + sequence.fetch_seconds
        return None

    def _fetchable(
        self, predictor: Predictor, sequence: Sequence, first: int
    ) -> tuple[list[bytes], KvSource | None]:
        """Keys of the sequence's blocks from `first` on that are brought instead of computed, none
        where that is not worth it, and the replica that is asked for those that are not here.
        That is worth it always where it has more than is here: who named it has compared."""
        cache = self.cache
        if cache.lower is None or not sequence.reads_cache:
            return [], None
        last = (sequence.prefill_len - 1) // cache.block_size
        keys = cache.fetchable(sequence.block_hashes, first, last)
        source = sequence.request.kv_source
        if source is not None:
            size = source.block_size or cache.block_size
            blocks = min(source.blocks, sequence.prefill_len // size)
            far = min(blocks * size // cache.block_size, last)
            if first + len(keys) < far:
                return [sequence.block_hashes[block] for block in range(first, far)], source
        return (keys if self._worth_fetching(predictor, keys, first) else []), None

    def _worth_fetching(self, predictor: Predictor, keys: list[bytes], first: int) -> bool:
        """Whether bringing the blocks from `first` on from lower tiers takes less time than
        computing them (Mooncake, Eq. 2); also where nobody knows what computing takes."""
        cache = self.cache
        if not keys or cache.lower is None or not predictor.calibrated:
            return bool(keys)
        start = first * cache.block_size
        computing = self.slots.work(start, start + len(keys) * cache.block_size)
        return cache.lower.seconds(keys) < computing

    def _plan(
        self, planner: Planner, step: PrefillStep, start: int, stop: int
    ) -> tuple[PlanPart, ...]:
        """A plan for tokens `start` to before `stop`; none where one lane does all: that is the
        lane that has the first blocks."""
        pending = [
            seconds if left else seconds + CLOSED_LANE_PENALTY
            for seconds, left in zip(step.pending, step.budget.tokens_left)
        ]
        plan = planner(pending, start, stop)
        return plan if len(plan[-1].lanes) > 1 else ()

    def _chunk_length(
        self, step: PrefillStep, sequence: Sequence, candidate: ChunkCandidate, limit: float
    ) -> int:
        """Tokens of the chunk with which the step takes at most `limit` seconds."""
        home, held, start, _ = candidate
        most = self._most(step, sequence, candidate)
        if most <= 0:
            return 0
        return CHUNKING[step.config.chunking](step.budget, home, held, start, most, limit)

    def _most(self, step: PrefillStep, sequence: Sequence, candidate: ChunkCandidate) -> int:
        """The most tokens of the chunk: to the end of the plan's part, as its lanes can take."""
        rest = sequence.plan_at(candidate.start).stop - candidate.start
        return min(rest, step.budget.most(candidate.home, candidate.blocks_per_lane))

    def _add_first(
        self, step: PrefillStep, sequence: Sequence, candidate: ChunkCandidate, length: int
    ) -> None:
        """Adds a chunk of so many tokens; if it is the first of the step, of a tile at least, so
        that something always runs."""
        if not length and not step.chunks:
            length = min(step.config.tile, self._most(step, sequence, candidate))
        self._add(step, sequence, candidate, length)

    def _add(
        self, step: PrefillStep, sequence: Sequence, candidate: ChunkCandidate, length: int
    ) -> bool:
        """Adds the sequence's next chunk, of so many tokens or as many as there are pages for; a
        waiting sequence is admitted. Returns whether there was anything to add."""
        if length and candidate.pages is None:
            length = self._length_with_pages(sequence, length, step.reserve)
            step.out_of_pages = not length
        if not length:
            return False
        self._admit(step, sequence, candidate)
        home, held, start, _ = candidate
        lanes = self._extend(sequence, start + length)
        if lanes == 1 and length <= step.budget.tokens_left[home]:
            held = None  # its blocks came to lie at home, and all of it fits there
        else:
            lanes = max(lanes, len(candidate.lanes))
        step.budget.add(home, held, start, length)
        step.chunks.append(self._issue(step, sequence, length, lanes))
        return True

    def _extend(self, sequence: Sequence, stop: int) -> int:
        """Gives the sequence pages for its tokens to before `stop`, on the lanes that its plan has
        for them; returns the size of the group of lanes that has its blocks, where they were and
        where they go."""
        cache = self.cache
        slot = sequence.slot
        start = int(self.slots.issued[slot])
        planned = sequence.plan_at(start).lanes
        if sequence.plan and planned != cache.group(slot):
            cache.regroup(slot, planned)
        before = int(cache.group_size[slot])
        moved = cache.rebalance(slot, start // cache.block_size)
        cache.extend(slot, cache.blocks(stop) - len(cache.tables[slot]))
        lanes = int(cache.group_size[slot])
        return max(before, lanes) if moved else lanes

    def _admit(self, step: PrefillStep, sequence: Sequence, candidate: ChunkCandidate) -> None:
        """Gives a waiting sequence its slot and the pages that hold its first blocks; does nothing
        for one that has them."""
        home, _, start, pages = candidate
        if pages is None:
            return
        self.admission.admit(sequence, pages, home)
        if start or sequence.plan:
            sequence.prefill_seconds_left = step.seconds_left(sequence, start)
        step.count_pending(sequence, home)
        if sequence.started_at is None:
            sequence.started_at = step.now
            sequence.cached_tokens = start

    def _length_with_pages(self, sequence: Sequence, most: int, reserve: int) -> int:
        """The most tokens of the sequence's next chunk, up to `most`, for which there are pages
        beside the `reserve`."""
        cache = self.cache
        start = int(self.slots.issued[sequence.slot])
        spare = max(cache.available - reserve, 0)
        capacity = int(cache.capacity[sequence.slot]) + spare * cache.block_size
        return min(sequence.prefill_len - start, most, capacity - start)

    def _issue(
        self, step: PrefillStep, sequence: Sequence, length: int, lanes: int
    ) -> PrefillChunk:
        """Counts the sequence's next tokens, which have pages, as issued. lanes: how many of them
        compute the chunk."""
        slot = sequence.slot
        slots = self.slots
        start = int(slots.issued[slot])
        chunk = PrefillChunk(slot, start, start + length, slot in slots.unannounced, lanes)
        slots.unannounced.discard(slot)
        slots.issued[slot] = chunk.stop
        if chunk.stop < sequence.prefill_len:
            sequence.prefill_seconds_left = step.seconds_left(sequence, chunk.stop)
        else:
            sequence.prefill_seconds_left = 0.0
            slots.phase[slot] = DECODE
            slots.prefilling.remove(sequence)
        return chunk
