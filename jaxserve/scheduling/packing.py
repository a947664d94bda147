"""Packs one batch: decodes first, then prefill chunks in what they leave of the step's time and
tokens.

Every sequence that can decode does. When a decode finds no page, the youngest prefilling sequence
is preempted, else the youngest decode after it: nothing more of it is issued, its tokens in flight
still count, and once it is out of flight its pages go back and it waits again. What it has put out
is then part of what it prefills, so nothing is sent twice, and sampling is a function of the
position, so nothing changes. The oldest decode can preempt all others, and no request is accepted
that does not fit alone: something always runs.

With P pipeline stages a batch takes one P-th of the decodes, those issued longest ago, and none
whose last token is still on its way through the stages: so P batches in flight fill the stages, and
prefill chunks the gaps. Where that leaves nothing to do, a batch takes decodes whose tokens are on
their way in one and the same batch, the oldest: it begins when these are there, and other decodes
are left to the batches after it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxserve.api.batch import DEFAULT_EXCHANGE, Batch
from jaxserve.cache import CacheManager
from jaxserve.cache.copies import PrefixCopies
from jaxserve.cache.state_checkpoints import StateCopies
from jaxserve.lanes.choice import decode_choices
from jaxserve.lanes.exchange import EXCHANGES
from jaxserve.scheduling.budget import StepBudget
from jaxserve.scheduling.checkpoint_policy import CheckpointPolicy
from jaxserve.scheduling.decode_turns import DecodeTurns
from jaxserve.scheduling.drafting import NO_DRAFTS, Drafting, Drafts
from jaxserve.scheduling.pacing import Pacer
from jaxserve.scheduling.prefill_packing import PrefillPacker
from jaxserve.scheduling.prefill_step import PrefillChunk
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.shares import DEBTORS_STEP
from jaxserve.scheduling.slots import DECODE, LEAVING, PREFILL, SlotTable
from jaxserve.settings.schema import SchedulerConfig

# share of the objective for the first token that a step of a long prompt may take where that is
# less time for each of its tokens: who comes meanwhile waits for it
TTFT_SHARE = 1 / 2
NOTHING = np.empty(0, np.int32)
NO_STATES = StateCopies()


class BatchPacker:
    """Packs one batch after another."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        slots: SlotTable,
        pacer: Pacer,
        prefill: PrefillPacker,
        copies: PrefixCopies | None = None,
        checkpoints: CheckpointPolicy | None = None,
        drafting: Drafting | None = None,
    ):
        self.config = config
        self.pacer = pacer
        self.mesh = pacer.predictor.mesh
        self.cache = cache
        self.slots = slots
        self.predictor = pacer.predictor
        self.prefill = prefill
        self.copies = copies
        self.checkpoints = checkpoints
        self.drafting = drafting
        self.turns = DecodeTurns(slots)

    def pack(self, number: int, now: float) -> tuple[Batch, list[PrefillChunk]] | None:
        """Returns batch `number` and its prefill chunks, issued as far as the slots go; None where
        nothing can run."""
        if self.mesh.spp == 1 and self.slots.proposed.any():
            return None  # the rows of two steps apart would take longer than those of one
        if self.copies is not None:
            self.copies.advance(self._computed())
        if self.prefill.chunks.planner is not None:
            self.prefill.chunks.history.advance(self.config)
        self.prefill.admission.make_way()
        self.turns.begin()
        picked = self._pick_decodes(number)
        decodes = self.turns.going(picked)
        chunks: list[PrefillChunk] = []
        budget = None
        if self.prefill.begins(self.config, now):
            budget = self._budget(decodes, now)
            chunks = self.prefill.pack(self.config, now, budget)
            self.pacer.save_for(budget.saving)
        self.turns.end(chunks)
        if not chunks:
            if decodes.size < picked.size:
                decodes = picked
                budget = None
            if not decodes.size and self.mesh.spp > 1:
                decodes = self._pick_decodes(number, hurry=True)
                budget = None
            if not decodes.size:
                return None
        if budget is None:
            budget = self._budget(decodes, now)
        if not chunks and self._awaits_tokens(decodes, budget):
            return None
        return self._packed(number, now, decodes, chunks, budget)

    def _awaits_tokens(self, decodes: np.ndarray, budget: StepBudget) -> bool:
        if self.drafting is None:
            return False
        return self.drafting.waits(decodes, budget, self._draft_room(budget))

    def _draft_room(self, budget: StepBudget, chunks: int = 0) -> int:
        """Returns the rows that the fullest lane has left for proposed tokens."""
        return self.config.decode_rows - max(load.decodes for load in budget.lanes) - chunks

    def _computed(self) -> np.ndarray:
        """Returns the tokens of each slot [slots] whose blocks may be read elsewhere: issued ones;
        none while pages of the prefix are fetched."""
        issued = self.slots.issued - self.slots.proposed
        for sequence in self.slots.prefilling:
            if sequence.ticket is not None:
                issued[sequence.slot] = 0
        return issued

    def pack_beside(
        self, number: int, now: float, partial: Batch, prompts: list[Sequence]
    ) -> tuple[Batch, list[PrefillChunk]] | None:
        """Returns batch `number` of these prompts, to their ends, and of the decodes that are not
        in the `partial` batch; None where no prompt can be computed to its end now. Nothing is
        preempted for it."""
        decodes = self._decodes_beside(partial)
        budget = self._budget(decodes, now)
        chunks = self.prefill.pack_whole(self.config, now, budget, prompts)
        if not chunks:
            return None
        return self._packed(number, now, decodes, chunks, budget)

    def _packed(
        self,
        number: int,
        now: float,
        decodes: np.ndarray,
        chunks: list[PrefillChunk],
        budget: StepBudget,
    ) -> tuple[Batch, list[PrefillChunk]]:
        drafts = NO_DRAFTS
        if self.drafting is not None:
            room = self._draft_room(budget, len(chunks))
            drafts = self.drafting.choose(decodes, budget, room)
        batch = self._batch(number, decodes, chunks, max(budget.lane_seconds), drafts)
        if drafts.slot.size:
            seconds = self.predictor.seconds(batch)
            batch = dataclasses.replace(batch, seconds=seconds, drafting=drafts.seconds)
        if self.mesh.kvp > 1:
            batch = self._exchanged(batch, budget)
        self.pacer.issued(batch, max(budget.decode_seconds), now)
        return batch, chunks

    def _exchanged(self, batch: Batch, budget: StepBudget) -> Batch:
        """Returns the batch with the exchanges by which its spread chunks and decodes reach KV on
        other lanes, and its seconds with these and with the pages that it moves, now that it is
        known where blocks are."""
        chunks = batch.block_lane.size > 0
        moves = len(batch.moves) > 0
        exchanged = None
        if chunks or moves:
            exchanged = self.predictor.lane_costs.exchanged(batch)
        exchange = DEFAULT_EXCHANGE
        if exchanged is not None:
            exchange = exchanged.strategy
        elif chunks and self.config.exchange in EXCHANGES:
            exchange = self.config.exchange
        of_decodes = self._decode_exchange(budget, exchange if chunks else None, moves)
        visits = EXCHANGES[of_decodes].has_rooms and (not chunks or self.config.tile == 1)
        if batch.drafts and visits:  # visits write KV last: a token would not see the one before it
            of_decodes = DEFAULT_EXCHANGE
        batch = dataclasses.replace(batch, exchange=exchange, decode_exchange=of_decodes)
        if exchanged is None:
            return batch
        return dataclasses.replace(batch, seconds=self.predictor.seconds(batch, exchanged))

    def _decode_exchange(self, budget: StepBudget, beside: str | None, moves: bool) -> str:
        """Returns the exchange of a step's spread decodes; the first that may be, where no rates
        are known to choose by. beside, moves: see `decode_choices`."""
        choice = budget.lanes[0].decode_choice
        if choice is None:
            return decode_choices(self.config.decode_exchange, beside, moves)[0]
        return choice.beside(beside, moves).strategy

    def _budget(self, decodes: np.ndarray, now: float) -> StepBudget:
        """Returns the budget that a step with these decodes has for prefill. A token passes all
        stages, so a step may take one P-th of what decodes allow for one."""
        slots = self.slots
        cache = self.cache
        config = self.config
        where = [NOTHING] * 3  # all on the only lane
        if self.mesh.kvp > 1:
            where = [cache.home[decodes], cache.group_size[decodes], cache.blocks_per_lane[decodes]]
        lanes = self.predictor.lane_costs.decodes(slots.issued[decodes], *where)
        running = self.turns.going(slots.decoding)
        target = longest = config.step_time / self.mesh.spp
        paced = None
        # where nothing else can run, prompts do
        if running.size and (decodes.size or slots.in_flight.any()):
            paced = self.pacer.target(running, self.predictor.stage(lanes), now)
            target = paced.now
        if self.turns.all_in_debt:
            longest *= DEBTORS_STEP
            target = min(target, DEBTORS_STEP * (paced.each if paced else target))
        return StepBudget(
            self.predictor,
            lanes,
            config.chunk_tokens,
            config.tile,
            target,
            longest,
            paced,
            max(config.step_time, TTFT_SHARE * config.ttft) / self.mesh.spp,
        )

    # --- decodes

    def _pick_decodes(self, number: int, hurry: bool = False) -> np.ndarray:
        """Returns slots whose next token is decoded in this batch, each with a page for it. In a
        `hurry` also those whose last token is on its way through the stages, of one batch only."""
        slots = self.slots
        stages = self.mesh.spp
        ready = decoding = slots.decoding
        if self.drafting is not None:
            ready = slots.without_proposed(decoding)
        share = -(-decoding.size // stages)
        if hurry:
            ready = ready[slots.in_flight[ready] < 2]
        elif stages > 1:
            passed = slots.last_batch[ready] <= number - stages
            ready = ready[passed | (slots.in_flight[ready] == 0)]
        ready = self._with_pages(ready)
        if stages == 1 or (ready.size <= share and not hurry):
            return ready
        picked = ready[np.argsort(slots.last_batch[ready], kind="stable")[:share]]
        if hurry and picked.size:  # else all would wait for the newest of their tokens
            picked = picked[slots.last_batch[picked] == slots.last_batch[picked[0]]]
        picked.sort()
        return picked

    def _with_pages(self, ready: np.ndarray) -> np.ndarray:
        """Gives decoding slots a page for their next token; returns those that have one. Others are
        preempted if pages are short."""
        slots = self.slots
        cache = self.cache
        short = ready[slots.issued[ready] == cache.capacity[ready]]
        if not short.size:
            return ready
        self._pass_windows(short)
        if short.size > cache.available_blocks:  # chunks left pages that are not seen any more
            self._pass_windows(np.flatnonzero((slots.phase == DECODE) | (slots.phase == PREFILL)))
        if short.size <= cache.available_blocks:
            for slot in short.tolist():
                cache.extend(slot, 1)
            return ready
        oldest_first = short[np.argsort(slots.number[short])]
        for slot in oldest_first.tolist():
            if slots.phase[slot] == DECODE:  # else it was preempted for an older one
                self._preempt_for(slot)
        has_page = slots.issued[ready] < cache.capacity[ready]
        return ready[(slots.phase[ready] == DECODE) & has_page]

    def _decodes_beside(self, partial: Batch) -> np.ndarray:
        """Returns slots outside a batch whose next token is to be decoded, with a page for it; none
        that has no page where there are not enough for all."""
        slots = self.slots
        cache = self.cache
        ready = slots.without_proposed(slots.decoding)
        ready = ready[~np.isin(ready, partial.slot)]
        short = ready[slots.issued[ready] == cache.capacity[ready]]
        self._pass_windows(short)
        if short.size <= cache.available_blocks:
            for slot in short.tolist():
                cache.extend(slot, 1)
        return ready[slots.issued[ready] < cache.capacity[ready]]

    def _pass_windows(self, slots: np.ndarray) -> None:
        """Takes back pages that the next tokens of these slots do not see."""
        if self.cache.windows:
            for slot in slots.tolist():
                certain = self.slots.issued[slot] - self.slots.proposed[slot]
                self.cache.pass_windows(slot, int(certain))

    def _preempt_for(self, slot: int) -> None:
        """Gives a decode a page, if need be by preempting a younger sequence; none while pages are
        on their way back."""
        slots = self.slots
        while not self.cache.available_blocks and not slots.draining:
            victim = self._victim(slot)
            if victim is None:
                return
            slots.withdraw(victim, LEAVING)
        if self.cache.available_blocks:
            self.cache.extend(slot, 1)

    def _victim(self, slot: int) -> Sequence | None:
        """Returns the sequence that makes way for a decode: of the tenant whose turn comes last the
        youngest partly prefilled one, or else the youngest decode that is younger than this
        one."""
        slots = self.slots
        younger = np.flatnonzero((slots.phase == DECODE) & (slots.number > slots.number[slot]))
        places = np.append(younger, [one.slot for one in slots.prefilling]).astype(np.intp)
        if not places.size:
            return None
        turns = slots.shares.turns[slots.tenant[places]]
        last = places[turns == turns.max()]
        partly = last[slots.phase[last] == PREFILL]
        if partly.size:
            last = partly
        return slots.by_slot[int(last[np.argmax(slots.number[last])])]

    # --- the batch

    def _batch(
        self,
        number: int,
        decodes: np.ndarray,
        chunks: list[PrefillChunk],
        seconds: float,
        drafts: Drafts,
    ) -> Batch:
        """Makes the batch of these decodes, of the tokens that are proposed behind them, and of
        prefill chunks, which are in flight from now on."""
        slots = self.slots
        cache = self.cache
        singles = decodes.size + drafts.slot.size
        slot = decodes
        if chunks or drafts.slot.size:
            chunk_slots = np.array([chunk.slot for chunk in chunks], np.intp)
            slot = np.concatenate([decodes, drafts.slot, chunk_slots])
        start = slots.issued[slot]
        length = np.empty(slot.size, np.int32)
        length.fill(1)
        is_decode = np.zeros(slot.size, bool)
        is_decode[: decodes.size] = True
        tokens = drafts.tokens
        block_lane = NOTHING
        sample = np.zeros(slot.size, bool)
        sample[:singles] = True
        group_size = cache.group_size[slot]
        if chunks:
            of_chunks = []
            for row, chunk in enumerate(chunks, singles):
                sequence = slots.by_slot[chunk.slot]
                group_size[row] = chunk.group_size
                start[row] = chunk.start
                length[row] = chunk.stop - chunk.start
                sample[row] = slots.phase[chunk.slot] == DECODE and not sequence.request.embed
                of_chunks.append(sequence.history(chunk.start, chunk.stop))
            tokens = np.concatenate([tokens, *of_chunks])
            if self.mesh.kvp > 1:
                block_lane = self._block_lane(chunks)
        slots.issued[decodes] += 1
        if drafts.slot.size:
            start[decodes.size : singles] = drafts.start
            np.add.at(slots.issued, drafts.slot, 1)
            np.add.at(slots.proposed, drafts.slot, 1)
        slots.in_flight[slot] += 1
        slots.last_batch[slot] = number
        copies = NO_STATES
        if self.checkpoints is not None:
            copies = self.checkpoints.copies(decodes, chunks)
        return Batch(
            number=number,
            seq=slots.number[slot],
            slot=slot.astype(np.int32),
            lane=cache.home[slot],
            start=start,
            length=length,
            is_decode=is_decode,
            sample=sample,
            group_size=group_size,
            blocks_per_lane=cache.blocks_per_lane.take(slot, 0),
            block_lane=block_lane,
            tokens=tokens,
            moves=cache.moves.take(),
            table_updates=cache.table_updates.take(),
            seconds=seconds,
            dealt=self._dealt(singles, chunks),
            admitted=tuple(row for row, chunk in enumerate(chunks, singles) if chunk.admitted),
            stores=cache.stores.take(),
            restores=copies.restores,
            saves=copies.saves,
            drafts=range(decodes.size, singles),
            adapters=slots.adapters.by_slot[slot],
            adapter_loads=slots.adapters.take_loads(),
        )

    def _dealt(self, first: int, chunks: list[PrefillChunk]) -> Mapping[int, range]:
        """Returns the lanes over which chunks are dealt, of those for which a plan says so, by row
        from `first` on."""
        if self.mesh.kvp == 1:
            return {}
        rows = enumerate(chunks, first)
        return {row: chunk.dealt for row, chunk in rows if chunk.dealt is not None}

    def _block_lane(self, chunks: list[PrefillChunk]) -> np.ndarray:
        """Returns the lane of each block that the spread chunks of more than one token fall in."""
        cache = self.cache
        lanes = [
            cache.layouts[chunk.slot].lanes_of(
                chunk.start // cache.block_size, cache.blocks(chunk.stop)
            )
            for chunk in chunks
            if chunk.group_size > 1 and chunk.stop - chunk.start > 1
        ]
        return np.concatenate([NOTHING, *lanes])
