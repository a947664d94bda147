"""Decides how many proposed tokens of which sequences a step checks.

Each takes a row beside the decodes. A step with more rows takes longer, by what the predictor says,
and is worth it where the tokens that are likely to come by it are worth more than at the pace of
the decodes alone: so the number that gives most tokens a second is chosen, with the time in which
they are made, if that takes some. Prompts come first, and beside them it stays within the time that
objectives leave the step: under load there is none left. A step of decodes alone may take longer
than the objective of a token by as many tokens as are likely to come of each sequence. No page is
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
from jaxserve.drafts.drafter import DRAFTERS, Drafter, SequenceDrafts, Source, Wanted
from jaxserve.scheduling.budget import StepBudget
from jaxserve.scheduling.completion_lengths import CompletionLengths
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
    the rows of a slot follow each other. seconds: predicted, in which they were made."""

    slot: np.ndarray
    start: np.ndarray
    tokens: np.ndarray
    seconds: float


_NONE = np.empty(0, np.int32)
NO_DRAFTS = Drafts(_NONE, _NONE, _NONE, 0.0)


class _Offered(NamedTuple):
    """Tokens that can be checked for a slot behind those on their way, and how likely each is right
    with those before it [m]. tokens [m]: None where they are still to be made. once: see
    `Offer`."""

    slot: int
    source: Source
    grade: int
    chances: np.ndarray
    tokens: np.ndarray | None
    once: float


class Drafting:
    """Chooses the proposed tokens of one step after another, for a `config` that asks for some.
    lengths: of completions. `drafter`: what proposes them."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        slots: SlotTable,
        predictor: Predictor,
        lengths: CompletionLengths,
    ):
        self._config = config
        self.drafter = DRAFTERS[config.drafts].make()
        self._cache = cache
        self._slots = slots
        self._predictor = predictor
        self._lengths = lengths

    @property
    def drafter(self) -> Drafter:
        return self._drafter

    @drafter.setter
    def drafter(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._acceptance = Acceptance(drafter.first_rates)

    def waits(self, decodes: np.ndarray, budget: StepBudget, room: int) -> bool:
        """Returns whether a step with these decodes is better decided once their newest tokens are
        known: it would check tokens that are proposed behind them. Arguments: as of `choose`."""
        if not self.drafter.waits or not self._unknown(decodes).any():
            return False
        if not self._may(decodes, budget, room):
            return False
        return bool(self._chosen(list(self._offers(decodes, known=True)), decodes, budget, room))

    def choose(self, decodes: np.ndarray, budget: StepBudget, room: int) -> Drafts:
        """Returns the proposed tokens that a step with these decodes checks. decodes [n]: slots,
        each with a page. budget: with all that the step has. room: rows that a lane has left."""
        if not self._may(decodes, budget, room):
            return NO_DRAFTS
        offers = list(self._offers(decodes))
        counts = self._chosen(offers, decodes, budget, room)
        taken = [(one, counts[one.slot]) for one in offers if one.slot in counts]
        return self._drafts(taken, budget)

    def _may(self, decodes: np.ndarray, budget: StepBudget, room: int) -> bool:
        """Returns whether tokens that are all right would be worth their rows."""
        if not decodes.size or room <= 0:
            return False
        full = self.drafter.waits or max(budget.lane_seconds) >= budget.objective
        if full and _has_prompts(budget):
            return False
        any_slot = np.tile(decodes, self._config.draft_tokens)
        return self._count(decodes, any_slot, np.ones(len(any_slot)), {}, budget, room) > 0

    def _chosen(
        self, offers: list[_Offered], decodes: np.ndarray, budget: StepBudget, room: int
    ) -> dict[int, int]:
        """Returns by slot how many of the tokens on offer a step checks, if any."""
        if not offers:
            return {}
        chances = np.concatenate([one.chances for one in offers])
        slot = np.repeat([one.slot for one in offers], [len(one.chances) for one in offers])
        likeliest = np.argsort(-chances, kind="stable")
        once = {one.slot: one.once for one in offers if one.once}
        count = self._count(decodes, slot[likeliest], chances[likeliest], once, budget, room)
        slots, counts = np.unique(slot[likeliest[:count]], return_counts=True)
        return dict(zip(slots.tolist(), counts.tolist()))

    def _drafts(self, taken: list[tuple[_Offered, int]], budget: StepBudget) -> Drafts:
        """Returns the first tokens of each offer, as many as are wanted of it."""
        missing = [Wanted(one.source, count) for one, count in taken if one.tokens is None]
        seconds = 0.0
        made: Iterator[np.ndarray] = iter(())
        if missing:
            seconds = self.drafter.seconds(len(missing), max(each.size for each in missing))
            spare = budget.objective - max(budget.lane_seconds) - seconds
            made = iter(self.drafter.make(missing, spare))
        parts = []
        for one, count in taken:
            tokens = one.tokens
            if tokens is None:
                tokens = self._noted(self._slots.by_slot[one.slot], next(made), one.grade)
            count = min(count, len(tokens))
            if not count:
                continue
            start = int(self._slots.issued[one.slot]) + 1
            self._give_pages(one.slot, start + count)
            positions = np.arange(start, start + count, dtype=np.int32)
            parts.append((np.full(count, one.slot, np.int32), positions, tokens[:count]))
        if not parts:
            return NO_DRAFTS
        slots, positions, ids = map(np.concatenate, zip(*parts))
        return Drafts(slots, positions, ids, seconds)

    # --- what is proposed

    def _unknown(self, decodes: np.ndarray) -> np.ndarray:
        """Counts the tokens of each slot [n] that are on their way."""
        known = [len(self._slots.by_slot[slot].history) for slot in decodes.tolist()]
        return self._slots.issued[decodes] + 1 - np.array(known, np.int64)

    def _offers(self, decodes: np.ndarray, known: bool = False) -> Iterator[_Offered]:
        """Yields what is on offer for each slot, if anything. known: as if tokens on their way were
        known."""
        spare = self._cache.available_unlocked // self._cache.needs.per_block
        has_pages = spare > self._slots.running
        for slot, unknown in zip(decodes.tolist(), self._unknown(decodes).tolist()):
            most = self._most(slot, has_pages)
            if most <= 0 or (unknown and self.drafter.waits and not known):
                continue
            one = self._offer(slot, 0 if known else unknown, most)
            if len(one.chances):
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

    def _offer(self, slot: int, unknown: int, most: int) -> _Offered:
        """Returns what is on offer for a slot: up to `most` tokens behind `unknown` ones that are
        on their way, which have to be as proposed too."""
        sequence = self._slots.by_slot[slot]
        drafts = sequence.drafts
        if drafts is None:
            judged = Judged(self._acceptance, hopeful=self.drafter.waits)
            drafts = SequenceDrafts(self.drafter.begin(sequence), judged)
            sequence.drafts = drafts
        drafts.judged.judge(sequence.output)
        offer = drafts.source.offer(unknown + most)
        tokens = offer.tokens
        count = offer.size
        if tokens is not None:
            tokens = self._noted(sequence, tokens, offer.grade)
            count = len(tokens)
        chances = drafts.judged.chain(offer.grade, count)[unknown:]
        least = LEAST_LIKELY if self._predictor.calibrated else LIKELY
        likely = int(np.count_nonzero(chances >= least))
        if tokens is not None:
            tokens = tokens[unknown : unknown + likely]
        return _Offered(slot, drafts.source, offer.grade, chances[:likely], tokens, offer.once)

    def _noted(self, sequence: Sequence, tokens: np.ndarray, grade: int) -> np.ndarray:
        """Returns those of the proposed tokens that structured output allows, which are judged once
        it is known what followed."""
        if sequence.matcher is not None:
            tokens = tokens[: sequence.matcher.count_valid(tokens.tolist())]
        assert sequence.drafts is not None
        sequence.drafts.judged.expect(tokens, grade, len(sequence.output))
        return tokens

    # --- how many

    def _count(
        self,
        decodes: np.ndarray,
        slot: np.ndarray,
        chances: np.ndarray,
        once: dict[int, float],
        budget: StepBudget,
        room: int,
    ) -> int:
        """Returns how many of the likeliest proposed tokens, of `slot` [m] and with these chances
        [m], give most tokens a second. once: see `Offer`, by slot. room: as of `choose`."""
        if not self._predictor.calibrated:
            return min(len(slot), room)
        lane = self._cache.home[slot]
        context = self._slots.issued[slot] + 1
        alone = max(budget.decode_seconds)
        before = max(budget.lane_seconds)
        waiting = 0.0
        if self._predictor.mesh.spp == 1 or self.drafter.waits:
            waiting = WAIT
        best, pace = 0, len(decodes) / alone
        for count in self._sizes(slot, budget, room):
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
            of_slot = np.bincount(slot[:count])
            making = self.drafter.seconds(int(np.count_nonzero(of_slot)), int(of_slot.max()))
            if before + longer + making > self._limit(
                decodes, slot[:count], chances[:count], budget
            ):
                continue
            making += self._shares(slot[:count], chances[:count], once)
            step = alone + longer + making + waiting
            each = (len(decodes) + chances[:count].sum()) / step
            if each > pace:
                best, pace = count, each
        return best

    def _shares(self, slot: np.ndarray, chances: np.ndarray, once: dict[int, float]) -> float:
        """Returns the seconds of a step if what is taken in once is dealt out over all steps that
        its sequences are still likely to have."""
        seconds = 0.0
        for number in once.keys() & set(slot.tolist()):
            most = float(self._slots.max_positions[number] - self._slots.issued[number])
            steps = min(most, self._lengths.remaining) / (1 + chances[slot == number].sum())
            seconds += once[number] / max(steps, 1.0)
        return seconds

    def _limit(
        self, decodes: np.ndarray, slot: np.ndarray, chances: np.ndarray, budget: StepBudget
    ) -> float:
        """Returns the seconds that a step with these proposed tokens may take."""
        if _has_prompts(budget):
            return budget.objective
        likely = np.bincount(slot, chances, int(decodes.max()) + 1)[decodes].min()
        longest = self._config.step_time / self._predictor.mesh.spp
        return max(budget.objective, min(budget.objective * (1 + likely), longest))

    def _sizes(self, slot: np.ndarray, budget: StepBudget, room: int) -> list[int]:
        """Lists numbers of proposed tokens, up to all of `slot` [m]: those that fill the rows for
        which steps are compiled, which take as long with fewer; and, where making tokens takes
        time, those by which no sequence has another one."""
        most = len(slot)
        if len(budget.lanes) == 1:
            most = min(most, room)
        used = max(load.decodes for load in budget.lanes)
        full = (2**power - used for power in itertools.count())
        sizes = {most, *itertools.takewhile(lambda count: count < most, full)}
        if self.drafter.seconds(1, 1):
            nth = _nth_of_slot(slot[:most])
            deepest = np.maximum.accumulate(nth)
            sizes.update((np.flatnonzero(np.diff(deepest)) + 1).tolist())
        return sorted(size for size in sizes if size > 0)

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


def _has_prompts(budget: StepBudget) -> bool:
    return any(load.chunks for load in budget.lanes)


def _nth_of_slot(slot: np.ndarray) -> np.ndarray:
    """Counts the tokens of the same slot up to each [m], itself included."""
    order = np.argsort(slot, kind="stable")
    first = np.searchsorted(slot[order], slot[order])
    nth = np.empty_like(order)
    nth[order] = np.arange(1, len(slot) + 1) - first
    return nth
