"""Gives chunks of prompts their slots and pages, and puts them into the step."""

from __future__ import annotations

from jaxserve.cache import CacheManager
from jaxserve.scheduling.chunk_candidates import ChunkCandidate
from jaxserve.scheduling.page_admission import PageAdmission
from jaxserve.scheduling.prefill_step import PrefillChunk, PrefillStep
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.slots import DECODE, SlotTable


class ChunkIssuer:
    """Issues chunks; what is issued goes into the batch."""

    def __init__(self, cache: CacheManager, slots: SlotTable, admission: PageAdmission):
        self.cache = cache
        self.slots = slots
        self.admission = admission

    def admit(self, step: PrefillStep, candidate: ChunkCandidate) -> None:
        """Gives a waiting sequence its slot, its plan and the pages that hold its first blocks;
        does nothing for a sequence that has a slot."""
        first = candidate.first
        if first is None:
            return
        sequence = candidate.sequence
        start = candidate.start
        self.admission.admit(sequence, first.pages, candidate.home)
        sequence.plan = first.plan
        if start or first.plan:
            sequence.prefill_seconds_left = step.seconds_left(sequence, start)
        step.count_pending(sequence, candidate.home)
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
        home = candidate.home
        blocks = candidate.blocks_per_lane
        lanes = self._extend(sequence, candidate.start + length)
        if lanes == 1 and length <= step.budget.tokens_left[home]:
            blocks = None  # its blocks came to lie at home, and all of it fits there
        else:
            lanes = max(lanes, len(candidate.lanes))
        step.budget.add(home, blocks, candidate.start, length)
        step.chunks.append(self._issue(step, sequence, length, lanes))
        return True

    def length_with_pages(self, sequence: Sequence, limit: int, reserve: int) -> int:
        """Returns the most tokens of the next chunk of a sequence with a slot, up to `limit`, for
        which there are pages beside the `reserve`."""
        cache = self.cache
        start = int(self.slots.issued[sequence.slot])
        spare = max(cache.available - reserve, 0)
        capacity = int(cache.capacity[sequence.slot]) + spare * cache.block_size
        return min(sequence.prefill_len - start, limit, capacity - start)

    def _extend(self, sequence: Sequence, stop: int) -> int:
        """Gives the sequence pages for its tokens to before `stop`, on the lanes that its plan has
        for them. Returns the size of the group of lanes that has its blocks, where they were and
        where they go."""
        cache = self.cache
        slot = sequence.slot
        start = int(self.slots.issued[slot])
        planned = sequence.plan_at(start).lanes
        if sequence.plan and planned != cache.layouts[slot].group:
            cache.regroup(slot, planned)
        group_size = int(cache.group_size[slot])
        moved = cache.rebalance(slot, start // cache.block_size)
        cache.extend(slot, cache.blocks(stop) - len(cache.layouts[slot].pages))
        lanes = int(cache.group_size[slot])
        if moved:
            return max(group_size, lanes)
        return lanes

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
