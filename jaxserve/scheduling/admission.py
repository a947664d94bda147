"""Admission control: refuses a request that could not have its first token in time, or that would
make another one late, before anything of it is computed. With the setting `stated` only those that
state an objective themselves; the others wait, as nothing was promised to them.

All prompts that are partly prefilled or wait are put in the order in which they will be prefilled,
with the new one among them, and the forecast says when each would have its first token. The new one
is refused where its own would be late, or where it would make one late that was accepted before,
but for those of tenants that have used more than their share, which go behind it.
As many get a slot as a step can have decodes within the tightest objective per token of those
that run; a request with a tighter objective is refused where more than that run already.

By how much first tokens come later than they were forecast is learnt (`LatenessMargins`).
"""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

from jaxserve.api.errors import RequestError
from jaxserve.api.request import Slo
from jaxserve.cache import CacheManager
from jaxserve.costs.predictor import Predictor
from jaxserve.policies import LAST, POLICIES, PromptView
from jaxserve.scheduling.budget import SHARER_WORK_RATIO, size_class
from jaxserve.scheduling.completion_lengths import CompletionLengths
from jaxserve.scheduling.events import BatchPacked, EventBus, FirstToken, Tokens
from jaxserve.scheduling.forecast import LoadForecast, LoadModel
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.slots import SlotTable
from jaxserve.settings.schema import SchedulerConfig

# share of its TTFT budget that a long prompt behind another keeps free, for short ones to come
LONG_PROMPT_RESERVE = 0.5
MIN_MARGIN, MAX_MARGIN = 0.05, 0.6  # shares of the TTFT budget
TARGET_MISSES = 0.02  # share of first tokens that may come later than forecast and margin say
MARGIN_STEP = 0.03  # share of the TTFT budget by which a late first token raises the margin
IDLE_DECAY = 0.8  # factor on the margins when a request finds no prompt before it
SIZE_CLASSES = 16  # prompts of 4^k to 4^(k + 1) tokens have a margin of their own
MAX_STALE = 1024  # entries of sequences that have begun, before they are thrown away
LAST_CLASS = 1024  # added to the size class of prompts that go behind all others
MIN_RETRY_AFTER = 0.05  # seconds


class LatenessMargins:
    """By how much, as a share of the TTFT budget, all but a few first tokens come later than they
    were forecast: one margin for each tenant and class of prompt sizes."""

    def __init__(self, slots: SlotTable):
        self.slots = slots
        self._margin = np.empty((0, SIZE_CLASSES))  # by number of the tenant
        slots.shares.joined.append(self._joined)
        # clock second of the forecast first token, by number of a sequence that waits for it
        self._forecast: dict[int, float] = {}
        # a heap of deadlines and numbers of these sequences, and of some that have begun
        self._due: list[tuple[float, int]] = []

    def _joined(self, tenant: int) -> None:
        """Sets the margins of a tenant that was not known."""
        if tenant == len(self._margin):
            self._margin = np.append(self._margin, np.empty((1, SIZE_CLASSES)), 0)
        self._margin[tenant] = MIN_MARGIN

    def of(self, prompts: PromptView) -> np.ndarray:
        """Returns the margins of prompts [n]."""
        return self._margin[prompts.tenant, _size_class(prompts.tokens)]

    def promise(self, sequence: Sequence, first: float) -> None:
        """Notes that a sequence was accepted, with its first token forecast for clock second
        `first`."""
        self._forecast[sequence.number] = first
        heappush(self._due, (sequence.ttft_deadline, sequence.number))
        if len(self._due) > 2 * len(self._forecast) + MAX_STALE:
            self._due = [entry for entry in self._due if entry[1] in self._forecast]
            heapify(self._due)

    def first_token(self, sequence: Sequence, now: float) -> None:
        """Learns from a first token that came at clock second `now`."""
        forecast = self._forecast.pop(sequence.number, None)
        if forecast is not None:
            budget = max(sequence.ttft_deadline - sequence.request.arrival, 1e-9)
            self._learn(sequence, (now - forecast) / budget)

    def overdue(self, now: float) -> None:
        """Learns from first tokens that were due before `now` and did not come: they are late,
        whenever they come, and policies may put them off for long."""
        while self._due and self._due[0][0] < now:
            _, number = heappop(self._due)
            late = self._forecast.pop(number, None) is not None
            sequence = self.slots.by_number.get(number)
            if late and sequence is not None:
                self._learn(sequence, math.inf)

    def relax(self) -> None:
        """Lowers the margins at a request that finds no prompt before it: what was learnt in a
        crowd says little of better times."""
        self._margin = np.maximum(IDLE_DECAY * self._margin, MIN_MARGIN)

    def _learn(self, sequence: Sequence, late: float) -> None:
        """late: share of the TTFT budget by which a first token came later than forecast."""
        size = int(_size_class(np.asarray(len(sequence.request.prompt))))
        margins = self._margin[sequence.tenant]
        missed = late > margins[size]
        margin = margins[size] + MARGIN_STEP * (float(missed) - TARGET_MISSES)
        margins[size] = min(max(margin, MIN_MARGIN), MAX_MARGIN)


class RankedPrompts(NamedTuple):
    """Prompts that are partly prefilled or wait, with the new one among them, in the order in which
    they will be prefilled."""

    view: PromptView
    waits: np.ndarray  # [n] bool, for a slot
    place: int  # of the new one

    def without_new(self) -> tuple[PromptView, np.ndarray]:
        """Returns the view and `waits` of the others."""
        others = np.arange(len(self.waits)) != self.place
        return self.view.at(others), self.waits[others]


class AdmissionController:
    """Accepts or refuses requests. Refuses nothing while it is unknown what steps cost."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        slots: SlotTable,
        predictor: Predictor,
        lengths: CompletionLengths,
    ):
        self.config = config
        self.slots = slots
        self.predictor = predictor
        self.load = LoadModel(config, cache, slots, predictor, lengths)
        self.margins = LatenessMargins(slots)

    def listen(self, bus: EventBus) -> None:
        """Learns from what the scheduler publishes on this bus."""
        bus.subscribe(BatchPacked, self._learn_batch)
        bus.subscribe(FirstToken, self._learn_first_token)
        bus.subscribe(Tokens, lambda event: self.load.changed())

    def check(self, sequence: Sequence, now: float, begun: float, feasible: bool) -> float:
        """Returns the clock second of the first token, as forecast, of a sequence that has just
        come.

        begun: seconds until the batches in flight are done. feasible: whether its objective could
        be met if it were alone; where it could not, it is served as well as can be if no prompt
        waits. Errors: RequestError where it is refused, with `retry_after`.
        """
        slots = self.slots
        self.margins.overdue(now)
        if sequence.request.deadline is not None and sequence.request.deadline <= now:
            raise RequestError("deadline", "has passed", "DEADLINE_EXCEEDED")
        work = slots.work(sequence.received, sequence.prefill_len)
        nobody_before = not slots.queue and not slots.prefilling
        if nobody_before:
            self.margins.relax()
        if not self.predictor.calibrated or not slots.by_number:
            return now + begun + work
        forecast, tighter = self.load.beside(sequence)
        promises = self._promises(sequence)
        if promises and tighter:
            self._check_decodes(sequence, forecast)
        prompts = self._ranked(sequence, work, forecast, now)
        first, before = self._first_tokens(prompts, forecast, begun)
        first_token = float(first[prompts.place])
        self._check_deadline(sequence, now, first_token)
        if not promises:
            return now + first_token
        due = prompts.view.deadline[prompts.place :] - now
        latest = self._latest(prompts, due, forecast)
        if feasible or not nobody_before:
            self._check_own(first_token, due, latest)
        self._check_others(prompts, due, latest, first, before)
        return now + first_token

    def _promises(self, sequence: Sequence) -> bool:
        """Returns whether a sequence is promised its first token in time if it is accepted."""
        return self.config.admission == "predict" or sequence.request.slo != Slo()

    def _check_decodes(self, sequence: Sequence, forecast: LoadForecast) -> None:
        """Checks the tightest objective per token. Errors: RequestError if too many sequences
        run."""
        limit = forecast.most_decodes
        count = forecast.decodes + forecast.prefills + sequence.request.sampling.n
        if count <= max(limit, 1):
            return
        after = forecast.step
        ends = forecast.decode_ends
        if len(ends):
            after = float(ends[min(count - limit, len(ends)) - 1])
        raise _refused(
            f"{count} sequences would run, {limit} can within {sequence.tpot:g} s per token",
            "tpot",
            after,
        )

    # --- the order of prompts, and when their first tokens come

    def _ranked(
        self, sequence: Sequence, work: float, forecast: LoadForecast, now: float
    ) -> RankedPrompts:
        sequence.prefill_seconds_left = work
        view = self.slots.prompts(now, sequence)
        order = self._order(view, forecast)
        waits = order >= len(self.slots.prefilling)
        return RankedPrompts(view.at(order), waits, int(np.argmax(order)))

    def _order(self, prompts: PromptView, forecast: LoadForecast) -> np.ndarray:
        """Returns the places [n] of prompts in the order in which they will be prefilled, of equal
        ones the older first. Prompts that need several steps leave most of these to much shorter
        ones."""
        config = self.config
        key = POLICIES[config.policy].forecast(prompts)
        order = np.argsort(key, kind="stable")
        if config.chunking == "adaptive" and config.sharing > 0:
            size = size_class(prompts.work, forecast.prefill_per_step)
            # late ones have a key some seconds from LAST
            size[key >= LAST / 2] += LAST_CLASS
            order = order[np.argsort(size[order], kind="stable")]
        if prompts.turn.size:
            order = order[np.argsort(prompts.turn[order], kind="stable")]
        return order

    def _first_tokens(
        self, prompts: RankedPrompts, forecast: LoadForecast, begun: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Predicts seconds to the first token of each prompt, and of those behind the new one
        without it."""
        # the step of a prompt's last chunk is shared with decodes: they are waited for
        lag = begun + (forecast.step / 2 if forecast.decodes else 0.0)
        first = self.load.first_tokens(prompts.view, prompts.waits, forecast) + lag
        if prompts.place + 1 == len(first):
            return first, np.empty(0)
        before = self.load.first_tokens(*prompts.without_new(), forecast)[prompts.place :] + lag
        return first, before

    # --- whether these are in time

    def _latest(
        self, prompts: RankedPrompts, due: np.ndarray, forecast: LoadForecast
    ) -> np.ndarray:
        """Returns the latest seconds at which first tokens may be forecast: of the new prompt and
        those behind it, which are `due`."""
        behind = prompts.view.at(slice(prompts.place, None))
        budget = behind.deadline - behind.arrival
        latest = due - self.margins.of(behind) * budget
        is_long = prompts.view.work > forecast.prefill_per_step / SHARER_WORK_RATIO
        if prompts.view.turn.size:  # others make way for it
            is_long &= prompts.view.turn <= prompts.view.turn[prompts.place]
        if is_long[prompts.place] and np.count_nonzero(is_long) > 1:
            latest[0] = min(latest[0], due[0] - LONG_PROMPT_RESERVE * budget[0])
        return latest

    def _check_deadline(self, sequence: Sequence, now: float, first_token: float) -> None:
        """Checks a deadline. Errors: RequestError if the first token would come after it."""
        deadline = sequence.request.deadline
        if deadline is None:
            return
        after = first_token - (deadline - now)
        if after > 0:
            raise _refused(
                f"its first token would come {after:.3g} s after its deadline", "deadline", after
            )

    def _check_own(self, first_token: float, due: np.ndarray, latest: np.ndarray) -> None:
        """Checks the new prompt. Errors: RequestError if its own first token would be late."""
        after = first_token - float(latest[0])
        if after > 0:
            raise _refused(
                f"its first token is due in {due[0]:.3g} s and would come {after:.3g} s too late",
                "ttft",
                after,
            )

    def _check_others(
        self,
        prompts: RankedPrompts,
        due: np.ndarray,
        latest: np.ndarray,
        first: np.ndarray,
        before: np.ndarray,
    ) -> None:
        """Checks the prompts behind the new one. Errors: RequestError if it would make a first
        token late that would be in time `before` it came."""
        if not before.size:
            return
        behind = prompts.view.at(slice(prompts.place + 1, None))
        first = first[prompts.place + 1 :]
        latest = latest[1:]
        # the latest with the smallest margin, which is what is needed if no other comes
        at_best = due[1:] - MIN_MARGIN * (behind.deadline - behind.arrival)
        made_late = (before <= latest) & (first > latest)
        made_late |= (behind.work <= at_best) & (first > at_best)
        if behind.turn.size:  # those of tenants that used more than their share may become late
            made_late &= behind.turn <= prompts.view.turn[prompts.place]
        if made_late.any():
            after = float(np.where(made_late, first - at_best, -math.inf).max())
            raise _refused(
                "others, whose first tokens are due, would have to wait for it", "ttft", after
            )

    def max_running(self, tpot: float) -> int:
        """Returns how many sequences may have a slot, so that a step of their decodes leaves some
        of `tpot` to prompts; as many as there are slots where not even one decode does: nothing
        can be kept then, and each would wait for the end of the one before it."""
        if not self.predictor.calibrated:
            return self.config.max_seqs
        return self.load.most_decodes(tpot) or self.config.max_seqs

    # --- what happens, to learn from

    def promise(self, sequence: Sequence, first: float) -> None:
        """Notes that a sequence is accepted, with its first token at clock second `first`."""
        if self._promises(sequence):
            self.margins.promise(sequence, first)

    def _learn_batch(self, event: BatchPacked) -> None:
        if self.predictor.calibrated:
            self.load.learn_step(event.batch, event.backlog_before)

    def _learn_first_token(self, event: FirstToken) -> None:
        self.margins.first_token(event.sequence, event.now)


def _size_class(tokens: np.ndarray) -> np.ndarray:
    return np.minimum(np.log2(tokens) * 0.5, SIZE_CLASSES - 1).astype(int)


def _refused(message: str, reason: str, after: float) -> RequestError:
    after = max(after, MIN_RETRY_AFTER)
    return RequestError(
        "", f"{message}; try again in {after:.3g} s", "RESOURCE_EXHAUSTED", after, reason
    )
