"""Moves the KV of planned prompts to the lanes that the next part of their plan has (Tetris, 4.1).

A group of lanes grows where a part of a plan ends. The steps of that part which are left when
moving takes as many carry the moves, so that the first chunk on the larger group finds its history
dealt out evenly, but for what the step before it computed, which moves with it. Where all spread
chunks go round a ring, nothing moves ahead: each hop would take the lanes that compute the part as
long as all their own KV. What is uneven in spite of that, or since the part was short or a lane had
no page, moves with every step from then on, also while the sequence decodes, and until it lies
evenly a chunk is as long as is worth it.
"""

from __future__ import annotations

from jaxserve.cache import CacheManager
from jaxserve.lanes.exchange import EXCHANGES
from jaxserve.lanes.groups import ChunkPlace
from jaxserve.lanes.moves import batches_to_deal, surplus_of
from jaxserve.lanes.planner import PlanPart
from jaxserve.scheduling.budget import StepBudget
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.slots import DECODE, SlotTable
from jaxserve.settings.schema import SchedulerConfig


class HistoryMoves:
    """Chooses what moves with each batch."""

    def __init__(self, cache: CacheManager, slots: SlotTable):
        self.cache = cache
        self.slots = slots
        self._moving: set[int] = set()  # slots of which blocks move with the next batch

    def advance(self, config: SchedulerConfig) -> None:
        """Moves what the next batch has room for; to be called before it is packed. Prompts go
        before decodes."""
        self._moving.clear()
        exchange = EXCHANGES.get(config.exchange)
        chunk_tokens = config.chunk_tokens
        if exchange is not None and exchange.settled:
            chunk_tokens = 0  # nothing moves ahead
        slots = self.slots
        decodes = [seq for slot, seq in slots.by_slot.items() if slots.phase[slot] == DECODE]
        for sequence in (*slots.prefilling, *decodes):
            if sequence.plan and sequence.ticket is None:
                self._move(sequence, chunk_tokens)

    def admitted(self, sequence: Sequence) -> None:
        """Moves the matched blocks of a sequence that has just got its slot, as `advance` does."""
        if sequence.plan:
            self._move(sequence, 0)

    def _move(self, sequence: Sequence, chunk_tokens: int) -> None:
        """Moves blocks of a sequence with a plan. chunk_tokens: prefill tokens of a step on a lane,
        at most; 0: none move ahead of their chunk."""
        cache = self.cache
        slot = sequence.slot
        layout = cache.layouts[slot]
        start = int(self.slots.issued[slot] - self.slots.proposed[slot])
        part = sequence.plan_at(start)
        if not part.lanes:
            part = sequence.plan[-1]  # the sequence decodes
        if layout.group != part.lanes:
            cache.regroup(slot, part.lanes)
        following = sequence.plan_at(part.stop).lanes
        grows = following and following not in (part.lanes, layout.target)
        if chunk_tokens and grows and self._is_time(slot, part, following, start, chunk_tokens):
            cache.deal_anew(slot, following)
        if cache.rebalance(slot, start // cache.block_size):
            self._moving.add(slot)

    def _is_time(
        self, slot: int, part: PlanPart, following: tuple[int, ...], start: int, chunk_tokens: int
    ) -> bool:
        """Returns whether moving the history to the lanes of the next part, as it will be at the
        end of this one, takes as many batches as this one has left."""
        cache = self.cache
        layout = cache.layouts[slot]
        batches = -(-(part.stop - start) // (chunk_tokens * len(part.lanes)))
        by_lane = list(layout.by_lane)
        new = cache.blocks(part.stop) - len(layout.pages)
        for place, lane in enumerate(part.lanes):
            by_lane[lane] += (new + place) // len(part.lanes)
        surplus = surplus_of(by_lane, [0] * len(by_lane), following)
        # windows have passed most blocks, which have few pages
        limit = -(-cache.moves.limit * len(layout.pages) // max(1, layout.page_count))
        return batches <= batches_to_deal(surplus, limit)

    def worthwhile(
        self, budget: StepBudget, slot: int, place: ChunkPlace, start: int, length: int
    ) -> int:
        """Returns how many of the next `length` tokens of a slot the step should compute: of
        history that does not lie evenly yet, and moves with this step, all of them, or a tile,
        where that, and the others once it lies evenly, are predicted to take less."""
        tile = budget.tile
        layout = self.cache.layouts[slot]
        settling = slot in self._moving and layout.target == layout.group
        if not settling or length <= tile or place.blocks is None:
            return length
        blocks = [0] * len(place.blocks)
        for lane in layout.group:
            blocks[lane] = max(1, -(-len(layout.pages) // len(layout.group)))
        even = budget.seconds_with(place._replace(blocks=blocks), start, length)
        now = budget.seconds_with(place, start, length)
        first = budget.seconds_with(place, start, tile)
        if first + (1 - tile / length) * even < now:
            return tile
        return length
