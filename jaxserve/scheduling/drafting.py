"""Decides how many proposed tokens of which sequences a step checks.

Each takes a row beside the decodes. A step with more rows takes longer, by what the predictor says,
and is worth it where the tokens that are likely to come by it are worth more than at the pace of
the decodes alone: so the number that gives most tokens a second is chosen. It stays within the time
that objectives leave the step, and prompts come first: under load there is no time left. No page is
taken for proposed tokens that others may need.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxserve.cache import CacheManager
from jaxserve.costs.predictor import Predictor
from jaxserve.drafts.acceptance import Acceptance, Judged
from jaxserve.drafts.drafter import DRAFTERS, JudgedDrafter
from jaxserve.scheduling.budget import StepBudget
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.slots import SlotTable
from jaxserve.settings.schema import SchedulerConfig

# seconds for which devices of one stage wait: the step behind is decided, written and issued once
# this one is read
WAIT = 0.001
LEAST_LIKELY = 0.05  # proposed tokens that are less likely right are not checked
LIKELY = 0.5  # the same where it is not known what steps cost


class Drafts(NamedTuple):
    """Proposed tokens that a step checks [m]: of these slots, at these positions, in their order;
    the rows of a slot follow each other."""

    slot: np.ndarray
    start: np.ndarray
    tokens: np.ndarray


NO_DRAFTS = Drafts(*[np.empty(0, np.int32)] * 3)


class _Proposed(NamedTuple):
    """Tokens that are proposed for a slot, and how likely each is right with those before it."""

    slot: int
    tokens: np.ndarray
    chances: np.ndarray


class Drafting:
    """Chooses the proposed tokens of one step after another, for a `config` that asks for some.
    `kind`: of what proposes them."""

    def __init__(
        self, config: SchedulerConfig, cache: CacheManager, slots: SlotTable, predictor: Predictor
    ):
        self._config = config
        self.kind = DRAFTERS[config.drafts]
        self._cache = cache
        self._slots = slots
        self._predictor = predictor
        self._acceptance = Acceptance(self.kind.grades)
        self._waits = WAIT if predictor.mesh.spp == 1 else 0.0

    def choose(self, decodes: np.ndarray, budget: StepBudget, room: int) -> Drafts:
        """Returns the proposed tokens that a step with these decodes checks. decodes [n]: slots,
        each with a page. budget: with all that the step has. room: rows that a lane has left."""
        if not decodes.size or room <= 0 or max(budget.lane_seconds) >= budget.objective:
            return NO_DRAFTS
        any_slot = np.repeat(decodes, self._config.draft_tokens)
        if not self._count(decodes, any_slot, np.ones(len(any_slot)), budget, room):
            return NO_DRAFTS  # not even right ones are worth their rows
        proposed = list(self._proposed(decodes))
        if not proposed:
            return NO_DRAFTS
        chances = np.concatenate([one.chances for one in proposed])
        slot = np.repeat([one.slot for one in proposed], [len(one.chances) for one in proposed])
        likeliest = np.argsort(-chances, kind="stable")
        count = self._count(decodes, slot[likeliest], chances[likeliest], budget, room)
        if not count:
            return NO_DRAFTS
        taken = np.zeros(len(chances), bool)
        taken[likeliest[:count]] = True
        return self._drafts(proposed, np.bincount(slot[taken], minlength=len(self._slots.phase)))

    def _drafts(self, proposed: list[_Proposed], counts: np.ndarray) -> Drafts:
        """Returns the first tokens of each proposal. counts: of them, by slot."""
        parts = []
        for one in proposed:
            count = int(counts[one.slot])
            start = int(self._slots.issued[one.slot]) + 1
            self._give_pages(one.slot, start + count)
            positions = np.arange(start, start + count, dtype=np.int32)
            parts.append((np.full(count, one.slot, np.int32), positions, one.tokens[:count]))
        return Drafts(*map(np.concatenate, zip(*parts)))

    # --- what is proposed

    def _proposed(self, decodes: np.ndarray) -> Iterator[_Proposed]:
        spare = self._cache.available_unlocked // self._cache.needs.per_block
        has_pages = spare > self._slots.running
        for slot in decodes.tolist():
            sequence = self._slots.by_slot[slot]
            most = self._most(slot, has_pages)
            if most <= 0:
                continue
            one = self._propose(sequence, slot, most)
            if len(one.tokens):
                yield one

    def _most(self, slot: int, has_pages: bool) -> int:
        """Returns how many tokens may be proposed for a slot: as many as it may still put out, and
        as it has pages for. has_pages: there is another block for each sequence that runs."""
        slots = self._slots
        start = int(slots.issued[slot]) + 1
        room = int(self._cache.capacity[slot]) - start
        if room < self._config.draft_tokens and has_pages:
            room += self._cache.block_size
        return min(self._config.draft_tokens, int(slots.max_positions[slot]) - start, room)

    def _give_pages(self, slot: int, stop: int) -> None:
        if stop > self._cache.capacity[slot]:
            self._cache.extend(slot, 1)

    def _propose(self, sequence: Sequence, slot: int, most: int) -> _Proposed:
        state = sequence.drafts
        if state is None:
            drafter = self.kind.make(sequence.request.prompt, sequence.output)
            state = JudgedDrafter(drafter, Judged(self.kind.grades, self._acceptance))
            sequence.drafts = state
        state.judged.judge(sequence.output)
        # tokens that are on their way: they have to be as proposed too
        unknown = int(self._slots.issued[slot]) + 1 - len(sequence.history)
        tokens, grade = state.drafter.propose(unknown + most)
        if sequence.matcher is not None:
            tokens = tokens[: sequence.matcher.count_valid(tokens.tolist())]
        state.judged.expect(tokens, grade, len(sequence.output))
        chances = state.judged.chain(grade, len(tokens))[unknown:]
        least = LEAST_LIKELY if self._predictor.calibrated else LIKELY
        likely = int(np.count_nonzero(chances >= least))
        return _Proposed(slot, tokens[unknown : unknown + likely], chances[:likely])

    # --- how many

    def _count(
        self,
        decodes: np.ndarray,
        slot: np.ndarray,
        chances: np.ndarray,
        budget: StepBudget,
        room: int,
    ) -> int:
        """Returns how many of the likeliest proposed tokens, of `slot` [m] and with these chances
        [m], give most tokens a second. room: as of `choose`."""
        if not self._predictor.calibrated:
            return min(len(slot), room)
        lane = self._cache.home[slot]
        context = self._slots.issued[slot] + 1
        alone = max(budget.decode_seconds)
        before = max(budget.lane_seconds)
        best, pace = 0, len(decodes) / alone
        for count in self._sizes(len(slot), budget, room):
            rows = np.bincount(lane[:count], minlength=len(budget.lanes))
            if rows.max() > room:
                break
            tokens = np.bincount(lane[:count], context[:count], len(budget.lanes))
            longest = int(context[:count].max())
            seconds = max(
                self._seconds(budget, number, int(rows[number]), float(tokens[number]), longest)
                for number in np.flatnonzero(rows).tolist()
            )
            longer = max(seconds - before, 0.0)
            if before + longer > budget.objective:
                break
            each = (len(decodes) + chances[:count].sum()) / (alone + longer + self._waits)
            if each > pace:
                best, pace = count, each
        return best

    def _sizes(self, most: int, budget: StepBudget, room: int) -> Iterator[int]:
        """Yields numbers of proposed tokens, up to `most`: those that fill the rows for which steps
        are compiled, which take as long with fewer."""
        if len(budget.lanes) == 1:
            most = min(most, room)
        used = max(load.decodes for load in budget.lanes)
        full = (2**power - used for power in itertools.count())
        for count in itertools.takewhile(lambda count: count < most, full):
            if count > 0:
                yield count
        yield most

    def _seconds(
        self, budget: StepBudget, lane: int, rows: int, context: float, longest: int
    ) -> float:
        """Predicts seconds of a lane with that many more rows, over `context` tokens in all."""
        load = budget.lanes[lane]
        return self._predictor.lane(
            dataclasses.replace(
                load,
                decodes=load.decodes + rows,
                context=load.context + context,
                longest=max(load.longest, longest),
                samples=load.samples + rows,
            )
        )
