"""Finds where the next chunk of a prompt would run, and puts it into the step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxserve.cache import CacheManager
from jaxserve.lanes.groups import ChunkPlace, group_around, size_around
from jaxserve.lanes.planner import LanePlanner, PlanPart, part_at
from jaxserve.scheduling.checkpoint_policy import CheckpointPolicy
from jaxserve.scheduling.fetches import Fetch, Fetches
from jaxserve.scheduling.history_moves import HistoryMoves
from jaxserve.scheduling.page_admission import PageAdmission
from jaxserve.scheduling.prefetch import QueuePrefetch
from jaxserve.scheduling.prefill_step import PrefillChunk, PrefillStep
from jaxserve.scheduling.sequence import NO_SLOT, Sequence
from jaxserve.scheduling.slots import DECODE, SlotTable

# seconds of work by which a lane that can take no more tokens in this step seems busier to planners
CLOSED_LANE_PENALTY = 1e6


class ChunkCandidate(NamedTuple):
    """The place of a sequence's next chunk."""

    sequence: Sequence
    place: ChunkPlace  # with blocks where the sequence is spread, or will be by this chunk
    start: int  # first token
    part: PlanPart  # of the plan, with the token at `start`
    first: FirstChunk | None = None  # of a sequence that waits


class FirstChunk(NamedTuple):
    """The admission of a waiting sequence, as it would be."""

    pages: np.ndarray  # these hold its first blocks already
    plan: tuple[PlanPart, ...]  # () where the cache chooses lanes block by block
    fetch: Fetch | None  # of what its first blocks lack, before anything is computed


class PrefillChunks:
    """Next chunks of prompts: `find` changes neither slots nor pages, `admit` and `add` give them
    out. planner: without one, all of a prompt has one home lane, which the cache chooses.
    checkpoints: where chunks end for the sake of states."""

    def __init__(
        self,
        cache: CacheManager,
        slots: SlotTable,
        admission: PageAdmission,
        fetches: Fetches,
        planner: LanePlanner | None,
        checkpoints: CheckpointPolicy | None = None,
    ):
        self.cache = cache
        self.slots = slots
        self.admission = admission
        self.fetches = fetches
        self.prefetch = QueuePrefetch(cache, slots)
        self.planner = planner
        self.checkpoints = checkpoints
        self.history = HistoryMoves(cache, slots)

    # --- where a chunk would run

    def find(self, step: PrefillStep, sequence: Sequence) -> ChunkCandidate | None:
        """Returns where the sequence's next chunk would run; None where it cannot in this step."""
        if sequence.slot == NO_SLOT:
            return self._first(step, sequence)
        slot = sequence.slot
        home = int(self.cache.home[slot])
        if self.fetches.waits(sequence, step.now) or not step.budget.tokens_left[home]:
            return None
        start = int(self.slots.issued[slot])
        part = sequence.plan_at(start)
        if self.cache.pages.lanes == 1:
            return ChunkCandidate(sequence, ChunkPlace(home), start, part)
        lanes = part.lanes or self.cache.layouts[slot].group
        dealt = self._dealt(step, home, part, sequence)
        place = self._place(home, self.cache.blocks_per_lane[slot], lanes, dealt)
        return ChunkCandidate(sequence, place, start, part)

    def _first(self, step: PrefillStep, sequence: Sequence) -> ChunkCandidate | None:
        """Returns where the first chunk of a waiting sequence would run, by the plan that it would
        get."""
        cache = self.cache
        lanes = step.open_lanes_for(sequence)
        if not self.admission.open or not lanes:
            return None
        pages = self.admission.match(sequence)
        if pages is None or self.prefetch.waits(sequence, step.now):
            return None
        of_states = sequence.prefix_match.lane  # of those after these blocks: it has to be home
        if of_states is not None:
            lanes = [of_states] if of_states in lanes else []
            if not lanes:
                return None
        start = max(len(pages) * cache.block_size, sequence.received)
        plan = self._plan(step, start, sequence.prefill_len)
        if plan and of_states is not None and of_states not in plan[0].lanes:
            plan = self._around(of_states, plan)
        part = part_at(plan, start, sequence.prefill_len)
        if plan:
            lanes = [lane for lane in part.lanes if lane in lanes]
            if not lanes:
                return None
            home = lanes[0]
        else:
            stop = min(start + step.config.chunk_tokens, sequence.prefill_len)
            need = cache.blocks(stop) - len(pages)
            home = cache.choose_home(pages, lanes, need * cache.needs.per_block, step.pending)
        pages = self.admission.nearest(sequence, pages, home)
        start = max(len(pages) * cache.block_size, sequence.received)
        lanes_of_blocks = part.lanes or cache.dealt_over(
            home, pages, cache.blocks(sequence.prefill_len)
        )
        dealt = self._dealt(step, home, part, sequence)
        place = self._place(home, cache.pages.count_by_lane(pages), lanes_of_blocks, dealt)
        fetch = self.fetches.choose(sequence, pages, home)
        if fetch is not None and not self.admission.fits(sequence, pages, fetch.prefix, home):
            fetch = None
        if fetch is not None:
            pages = fetch.prefix.pages
            start = max(len(pages) * cache.block_size, sequence.received)
        first = FirstChunk(pages, plan, fetch)
        return ChunkCandidate(sequence, place, start, part, first)

    def _plan(self, step: PrefillStep, start: int, stop: int) -> tuple[PlanPart, ...]:
        """Returns a plan for tokens `start` to before `stop`; () where one lane does all: that is
        the lane that has the first blocks."""
        if self.planner is None:
            return ()
        pending = [
            seconds if left else seconds + CLOSED_LANE_PENALTY
            for seconds, left in zip(step.pending, step.budget.tokens_left)
        ]
        plan = self.planner(pending, start, stop)
        if len(plan[-1].lanes) == 1:
            return ()
        return plan

    def _around(self, lane: int, plan: tuple[PlanPart, ...]) -> tuple[PlanPart, ...]:
        """Returns a plan whose parts are on groups of as many lanes as those of this one, around a
        lane."""
        return tuple(
            part._replace(lanes=tuple(group_around(lane, self._size_of(part.lanes))))
            for part in plan
        )

    def _dealt(
        self, step: PrefillStep, home: int, part: PlanPart, sequence: Sequence
    ) -> range | None:
        """Returns the lanes that compute a chunk: those of its plan, also where its history is on
        the way to others; None: all that meet."""
        if part.lanes:
            return group_around(home, self._size_of((home, *part.lanes)))
        return step.dealt.get(sequence.number)

    def _size_of(self, lanes: tuple[int, ...]) -> int:
        """Returns the lanes of the smallest group that has these."""
        return size_around(lanes, self.cache.pages.lanes)

    def _place(
        self, home: int, per_lane: np.ndarray, lanes: tuple[int, ...], dealt: range | None
    ) -> ChunkPlace:
        """Returns the lanes of a chunk: with blocks on each lane, at least one on each of `lanes`,
        over which its prompt is dealt out; without where the home lane has them all. dealt: see
        `ChunkPlace`."""
        if self.cache.pages.lanes == 1:
            return ChunkPlace(home)
        blocks = per_lane.tolist()
        for lane in (*lanes, *(dealt or ())):
            blocks[lane] = max(blocks[lane], 1)
        place = ChunkPlace(home, blocks, dealt)
        if len(place.group) == 1:
            return ChunkPlace(home)
        return place._replace(dealt=None) if dealt == place.group else place

    # --- into the step

    def admit(self, step: PrefillStep, candidate: ChunkCandidate) -> None:
        """Gives a waiting sequence its slot, its plan and the pages that hold its first blocks;
        does nothing for a sequence that has a slot."""
        first = candidate.first
        if first is None:
            return
        sequence = candidate.sequence
        start = candidate.start
        prefix = None if first.fetch is None else first.fetch.prefix
        self.admission.admit(sequence, first.pages, candidate.place.home, prefix)
        sequence.plan = first.plan
        if self.checkpoints is not None:
            self.checkpoints.admitted(sequence)
        if start or first.plan:
            sequence.prefill_seconds_left = step.seconds_left(sequence, start)
        if first.fetch is None:
            self.history.admitted(sequence)
        step.count_pending(sequence, self.cache.prefill_lanes(sequence.slot))
        if sequence.started_at is None:
            sequence.started_at = step.now
            sequence.cached_tokens = start

    def add(self, step: PrefillStep, candidate: ChunkCandidate, length: int) -> bool:
        """Adds a chunk of `length` tokens, or of as many as there are pages for, to the step; a
        waiting sequence is admitted. Returns whether there was anything to add."""
        sequence = candidate.sequence
        if length and candidate.first is None:
            length = self.length_with_pages(sequence, length, step.reserve)
            step.out_of_pages = not length
        if not length:
            return False
        self.admit(step, candidate)
        if candidate.first is not None and self.cache.windows:
            # admission counts what windows see, of all of the prompt, and not a chunk's own blocks
            length = self.length_with_pages(sequence, length, step.reserve)
            if not length:
                return False
        if self.checkpoints is not None:
            start = candidate.start
            length = self.checkpoints.end(sequence, start, start + length) - start
        place = candidate.place
        size = self._extend(sequence, candidate.start + length)
        local = size == 1 and place.dealt is None
        if local and length <= step.budget.tokens_left[place.home]:
            place = ChunkPlace(
                place.home
            )  # its blocks came to lie at home, and all of it fits there
        else:
            size = max(size, len(place.group))
        step.budget.add(place, candidate.start, length)
        step.chunks.append(self._issue(step, sequence, length, size, place.dealt))
        return True

    def length_with_pages(self, sequence: Sequence, limit: int, reserve: int) -> int:
        """Returns the most tokens of the next chunk of a sequence with a slot, up to `limit`, for
        which there are pages beside the `reserve`."""
        cache = self.cache
        start = int(self.slots.issued[sequence.slot])
        cache.pass_windows(sequence.slot, start)
        spare = max(cache.available_blocks - -(-reserve // cache.needs.per_block), 0)
        capacity = int(cache.capacity[sequence.slot]) + spare * cache.block_size
        return min(sequence.prefill_len - start, limit, capacity - start)

    def _extend(self, sequence: Sequence, stop: int) -> int:
        """Gives the sequence pages for its tokens to before `stop`. Returns the size of the group
        of lanes that has its blocks."""
        cache = self.cache
        slot = sequence.slot
        cache.extend(slot, cache.blocks(stop) - len(cache.layouts[slot].pages))
        return int(cache.group_size[slot])

    def _issue(
        self,
        step: PrefillStep,
        sequence: Sequence,
        length: int,
        group_size: int,
        dealt: range | None,
    ) -> PrefillChunk:
        """Counts the sequence's next tokens, which have pages, as issued. group_size: lanes that
        meet; dealt: see `ChunkPlace`."""
        slot = sequence.slot
        slots = self.slots
        start = int(slots.issued[slot])
        admitted = slot in slots.unannounced
        chunk = PrefillChunk(slot, start, start + length, admitted, group_size, dealt)
        slots.unannounced.discard(slot)
        slots.issued[slot] = chunk.stop
        if chunk.stop < sequence.prefill_len:
            sequence.prefill_seconds_left = step.seconds_left(sequence, chunk.stop)
        else:
            sequence.prefill_seconds_left = 0.0
            slots.phase[slot] = DECODE
            slots.prefilling.remove(sequence)
        return chunk
