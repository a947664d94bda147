"""Whether a request can have its first token in time, asked before anything of it is computed.

All prompts that are partly prefilled or wait are put in the order in which they are due, with the
one that came among them, and it is worked out when each would have its first token: when it gets a
slot and pages, and when the prefill before it is done, at the pace that decodes leave. Those ahead
of it will be decodes by then, and some of those that run will have ended. The one that came is
refused where its own first token would be late, or where it would make one late that was accepted
before. Only so many get a slot as a step can have decodes within the tightest objective per token
of those that run; one with a tighter objective is refused where more than that run already.

What such a model cannot know is learnt: how much prefill a step gets done in the time it has for
it, how long completions last, and by how much, as a share of the time that was given, all but a few
first tokens come later than they were predicted (`margin`).
"""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

import numpy as np

from jaxserve.api.batch import Batch
from jaxserve.api.errors import RequestError
from jaxserve.cache import CacheManager
from jaxserve.costs.predictor import LaneLoad, Predictor
from jaxserve.scheduling.budget import LEAST
from jaxserve.scheduling.events import BatchPacked, EventBus, FirstToken, Tokens
from jaxserve.scheduling.packing import SHORTER
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.slots import DECODE, SlotTable
from jaxserve.scheduling.waiting_queue import ARRIVAL, DUE, TOKENS, WORK
from jaxserve.settings.schema import SchedulerConfig

POINTS = 9  # numbers of decodes for which a step's time is predicted; in between, by a line
TIGHT = 0.9  # of the objective per token: the most that decodes alone may take
MISSED = 0.02  # share of first tokens that may come later than predicted and `margin`
RATE = 0.03  # of the time given: by how much a late first token moves `margin`
SPARE = 0.5  # of the time given: what a long prompt behind another leaves to short ones to come
MARGIN = 0.05, 0.6  # its limits
CALM = 0.8  # what one that finds no prompt before it leaves of it
SIZES = 16  # prompts of 4^k to 4^(k + 1) tokens have a `margin` of their own
MEMORY = 0.1  # weight of the last step in what is known of `yielded`
YIELD = 0.05, 4.0  # its limits
HURRY = 1.25  # times what steps have taken of late that they may take soon
FORGET = 0.999  # what a decoded token leaves of the weight of those before, for how long they last
BEHIND = 1e7  # seconds: more than any two deadlines are apart
SPENT = 1024  # entries of sequences that have begun, before they are thrown away
SOON = 0.05  # seconds: the shortest wait that is told


class LoadForecast(NamedTuple):
    """What runs, as seconds from now. `pace` [slots + 1]: seconds of prefill done per second beside
    so many decodes. `ends` [decodes] and `slots` [at most slots]: when decodes end and slots come
    free, soonest first; `lasts`: how long a completion that begins later takes."""

    tpot: float  # the tightest objective per token
    decodes: int
    step: float  # of a step with these decodes and prompts, through all stages
    room: float  # seconds of prefill done in such a step
    pace: np.ndarray
    curve: np.ndarray  # [slots + 1], of a step in a stage with so many decodes alone
    ends: np.ndarray
    slots: np.ndarray
    lasts: float
    most: int  # decodes that this objective allows


class AdmissionController:
    """See the module. Refuses nothing while nobody knows what steps cost."""

    def __init__(
        self, config: SchedulerConfig, cache: CacheManager, slots: SlotTable, predictor: Predictor
    ):
        self.config = config
        self.cache = cache
        self.slots = slots
        self.predictor = predictor
        self.margin = np.full(SIZES, MARGIN[0])  # by size of the prompt, see SIZES
        # seconds of prefill alone that a step does in a second that it has for prefill
        self.yielded = 1.0
        self._mixed = math.inf  # seconds in a stage of steps with decodes and prompts
        self._tokens = self._ended = 0.0  # decoded, and ends among them: recent ones
        self._counts = np.unique(np.linspace(0, config.max_seqs, POINTS).astype(int))
        self._seen: LoadForecast | None = None
        # clock second of the first token, by number of a sequence that waits for it
        self._promised: dict[int, float] = {}
        # a heap: when these are due, and some that are no more
        self._due: list[tuple[float, int]] = []

    def listen(self, bus: EventBus) -> None:
        """Learns from what happens."""
        bus.subscribe(BatchPacked, lambda event: self.issued(event.batch, event.backlog_before))
        bus.subscribe(FirstToken, lambda event: self.began(event.sequence, event.now))
        bus.subscribe(Tokens, lambda event: self.spoke(event.sampled, event.ended))

    # --- the question

    def check(self, sequence: Sequence, now: float, begun: float, feasible: bool) -> float:
        """Clock second at which the sequence, which has come just now, should have its first token.

        begun: seconds until the batches in flight are done. feasible: whether its objective could
        be met if it were alone; where it could not, it is served as well as can be when nobody
        waits. Errors: RequestError where it is refused, with `retry_after`.
        """
        slots = self.slots
        self._settle(now)
        if sequence.request.deadline is not None and sequence.request.deadline <= now:
            raise RequestError("deadline", "has passed", "DEADLINE_EXCEEDED")
        work = slots.work(0, sequence.prefill_len)
        # what was learnt in a crowd says little of better times
        if not slots.queue and not slots.prefilling:
            self.margin = np.maximum(CALM * self.margin, MARGIN[0])
        if not self.predictor.calibrated or not slots.by_number:
            return now + begun + work
        view, tighter = self._view_for(sequence)
        if tighter:
            self._check_decodes(sequence, view)
        own = sequence.request.arrival, sequence.ttft_deadline, work, sequence.prefill_len
        fields = np.concatenate([slots.policy_fields(), np.array(own)[:, None]], axis=1)
        # the youngest goes after those that rank as it does
        order = np.argsort(self._rank(fields, view, now), kind="stable")
        place = int(np.argmax(order))
        fields = fields[:, order]
        waits = order >= len(slots.prefilling)
        # its last chunk's step is shared with decodes: they are waited for
        lag = begun + (view.step / 2 if view.decodes else 0.0)
        first = self._firsts(fields, waits, view) + lag
        before = np.empty(0)
        if place + 1 < len(first):
            others = np.arange(len(first)) != place
            before = self._firsts(fields[:, others], waits[others], view)[place:] + lag
        alone = not feasible and not len(slots.queue) and not slots.prefilling
        self._check_time(sequence, now, place, before, first, fields, alone, view.room / SHORTER)
        return now + float(first[place])

    def _check_decodes(self, sequence: Sequence, view: LoadForecast) -> None:
        """Errors: RequestError where too many run beside it for its objective per token, which is
        the tightest."""
        count = view.decodes + len(self.slots.prefilling) + sequence.request.sampling.n
        if count > max(view.most, 1):
            after = (
                float(view.ends[min(count - view.most, len(view.ends)) - 1])
                if len(view.ends)
                else view.step
            )
            raise _refused(
                f"{count} sequences would run, {view.most} can within {sequence.tpot:g} s per token",
                "tpot",
                after,
            )

    def _check_time(
        self,
        sequence: Sequence,
        now: float,
        place: int,
        before: np.ndarray,
        first: np.ndarray,
        fields: np.ndarray,
        alone: bool,
        long: float,
    ) -> None:
        """Errors: RequestError where its own first token would be late (not asked where it is
        served `alone`), or another one by it. before: when those behind it would have theirs
        without it. long: seconds of work from which prompts count as long."""
        due = fields[DUE, place:] - now
        own = float(first[place])
        given = fields[DUE, place:] - fields[ARRIVAL, place:]
        lines = due - self.margin[_size(fields[TOKENS, place:])] * given
        if fields[WORK, place] > long and np.count_nonzero(fields[WORK] > long) > 1:
            lines[0] = min(lines[0], due[0] - SPARE * given[0])
        deadline = sequence.request.deadline
        if deadline is not None and (after := own - (deadline - now)) > 0:
            raise _refused(
                f"its first token would come {after:.3g} s after its deadline", "deadline", after
            )
        if not alone and (after := own - float(lines[0])) > 0:
            raise _refused(
                f"its first token is due in {due[0]:.3g} s and would come {after:.3g} s too late",
                "ttft",
                after,
            )
        if before.size:
            then = first[place + 1 :]
            line = lines[1:]
            last = (due - MARGIN[0] * given)[1:]
            crosses = (before <= line) & (then > line)
            # in time only if nobody comes before it
            presses = (fields[WORK, place + 1 :] <= last) & (then > last)
            after = float(np.where(crosses | presses, then - last, -math.inf).max())
            if (crosses | presses).any():
                raise _refused(
                    "others, whose first tokens are due, would have to wait for it", "ttft", after
                )

    def _rank(self, fields: np.ndarray, view: LoadForecast, now: float) -> np.ndarray:
        """By which prompts go, smallest first. Policies that look at deadlines end up with the
        first that is due, as long as there is time; those that need several steps leave most of
        these to much shorter ones."""
        config, (arrival, due, work, _) = self.config, fields
        rank = arrival - now if config.policy == "fcfs" else due - now
        if config.chunking == "adaptive" and config.sharing > 0:
            steps = np.log(np.maximum(work * (1 / view.room), 1.0)) * (1 / math.log(1 / SHORTER))
            rank = rank + BEHIND * steps.astype(int)
        return (
            np.where(due - now < work, rank + BEHIND**2, rank) if config.policy == "slack" else rank
        )

    # --- the model

    def _firsts(self, fields: np.ndarray, waits: np.ndarray, view: LoadForecast) -> np.ndarray:
        """Seconds [n] to the first tokens of prompts that go in this order; `waits` [n] bool: for a
        slot."""
        slots = len(view.slots)
        work = fields[WORK]
        at = np.arange(len(waits))
        # slots, each again and again
        turns = (view.slots + view.lasts * np.arange(1 + len(waits) // slots)[:, None]).ravel()
        ready = np.where(waits, turns[np.cumsum(waits) - 1], 0.0)
        ready = np.maximum(ready, self._pages_ready(fields[TOKENS], waits, view))
        about = np.maximum(ready, np.cumsum(work) * (1 / float(view.pace[view.decodes])))
        ended = np.searchsorted(view.ends, about) + np.searchsorted(about + view.lasts, about)
        seconds = work / view.pace[np.minimum(np.maximum(view.decodes + at - ended, 0), slots)]
        before = np.cumsum(seconds) - seconds
        if self.predictor.mesh.kvp > 1:  # lanes share the work of several, not that of one
            before /= self.predictor.mesh.kvp
        return np.maximum.accumulate(ready - before) + before + seconds

    def _pages_ready(
        self, tokens: np.ndarray, waits: np.ndarray, view: LoadForecast
    ) -> np.ndarray | float:
        """When there are pages for each, where there are not enough for all."""
        slots = self.slots
        cache = self.cache
        spare = cache.available - sum(
            cache.blocks(s.prefill_len) - len(cache.tables[s.slot]) for s in slots.prefilling
        )
        if cache.blocks(int(tokens.sum())) + len(tokens) <= spare:
            return 0.0
        short = np.cumsum(np.where(waits, np.ceil(tokens * (1 / cache.block_size)), 0.0)) - max(
            spare, 0
        )
        last = float(view.slots[-1]) or view.lasts  # pages come back evenly until then
        return np.maximum(short, 0.0) * (last / max(cache.total - cache.available, 1))

    def _view_for(self, sequence: Sequence) -> tuple[LoadForecast, bool]:
        """What runs as it is since the last batch came or went, and as if `sequence` were there
        too; whether its objective per token is tighter than those of the others."""
        view = self._running()
        tighter = sequence.tpot < view.tpot
        if tighter:
            view = self._view(sequence.tpot, sequence.prefill_len)
        return view._replace(
            lasts=min(sequence.max_new_tokens - 1, self._lasting) * view.step
        ), tighter

    def _running(self) -> LoadForecast:
        if self._seen is None:
            coming = self.slots.policy_fields()[TOKENS]
            self._seen = self._view(math.inf, float(coming.mean()) if coming.size else 0.0)
        return self._seen

    def most(self, tpot: float) -> int:
        """Sequences that may have a slot, so that a step of their decodes leaves some of `tpot` to
        prompts; one in any case."""
        if not self.predictor.calibrated:
            return self.config.max_seqs
        return max(1, _fitting(self._running().curve, tpot / self.predictor.mesh.spp))

    @property
    def _lasting(self) -> float:
        """Tokens that a completion may still be expected to put out, whenever one looks."""
        return self._tokens / self._ended if self._ended else math.inf

    def _view(self, tpot: float, context: float) -> LoadForecast:
        """With a tightest objective of `tpot` at most; `context`: tokens, of decodes to come."""
        slots = self.slots
        stages = self.predictor.mesh.spp
        lasting = self._lasting
        running = slots.phase == DECODE
        tpot = slots.tightest(tpot)
        decodes = int(np.count_nonzero(running))
        curve = self._curve(slots.issued[running], context)
        step, share = self._step(curve, tpot / stages)
        pace = np.maximum(share * self.yielded, 1e-3)
        period = min(float(step[decodes]), HURRY * self._mixed) * stages
        ends = np.minimum(slots.max_positions - slots.issued, lasting) * period
        busy = np.where(running, ends, 0.0)
        for other in slots.prefilling:
            busy[other.slot] = (
                other.prefill_seconds_left / pace[decodes]
                + min(other.max_positions - other.prefill_len, lasting) * period
            )
        most = _fitting(curve, tpot / stages)
        room = period / stages * float(pace[decodes])
        free = np.sort(busy)[len(busy) - max(1, most) :]
        return LoadForecast(
            tpot, decodes, period, room, pace, curve, np.sort(ends[running]), free, 0.0, most
        )

    def _step(self, curve: np.ndarray, target: float) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of a step [slots + 1] in a stage beside so many decodes while prompts wait, and
        the share of it that is theirs."""
        config = self.config
        if config.chunking == "static":
            chunk = self.predictor.prefill(0, config.chunk_tokens, config.chunk_tokens)
            chunk = min(chunk, self.slots.backlog or chunk)
            return curve + chunk, chunk / (curve + chunk)
        target = (
            min(target, config.step_time / self.predictor.mesh.spp)
            if target == math.inf
            else target
        )
        step = np.where(target > curve, target, (1 + LEAST) * curve)
        return step, 1 - curve / step

    def _curve(self, contexts: np.ndarray, context: float) -> np.ndarray:
        """Seconds of a step [slots + 1] in a stage with so many decodes alone: of these contexts,
        and of `context` tokens the others."""
        mesh = self.predictor.mesh
        running = len(contexts)
        mean, longest = (
            (float(contexts.mean()), float(contexts.max())) if running else (0.0, context)
        )
        seconds = [0.0]
        for count in self._counts[1:].tolist():
            tokens = mean * min(count, running) + context * max(count - running, 0)
            lanes = mesh.kvp * mesh.spp
            each = -(-count // lanes)
            seconds.append(
                self.predictor.lane(LaneLoad(each, tokens / lanes, longest, samples=each))
            )
        return np.interp(
            np.arange(self.config.max_seqs + 1), self._counts, np.maximum.accumulate(seconds)
        )

    # --- what is learnt

    def issued(self, batch: Batch, before: float) -> None:
        """A batch was packed; `before`: the backlog until then. It tells what a step gets done
        where there is more than it can do."""
        after = self.slots.backlog
        self._seen = None
        if not batch.tokens.size or after <= 0 or after >= before or not self.predictor.calibrated:
            return
        fed = batch.is_decode
        lanes = self.predictor.decodes(
            batch.start[fed], batch.lane[fed], batch.spread[fed], batch.blocks_per_lane[fed]
        )
        if fed.any():
            self._mixed = (
                batch.seconds
                if self._mixed == math.inf
                else self._mixed + MEMORY * (batch.seconds - self._mixed)
            )
        had = batch.seconds - (self.predictor.stage(lanes) if fed.any() else 0.0)
        if had > 0:
            ratio = min(max((before - after) / self.predictor.mesh.kvp / had, YIELD[0]), YIELD[1])
            self.yielded += MEMORY * (ratio - self.yielded)

    def promise(self, sequence: Sequence, first: float) -> None:
        """A sequence is accepted, with its first token at clock second `first`."""
        self._promised[sequence.number] = first
        heappush(self._due, (sequence.ttft_deadline, sequence.number))
        if len(self._due) > 2 * len(self._promised) + SPENT:
            self._due = [entry for entry in self._due if entry[1] in self._promised]
            heapify(self._due)

    def began(self, sequence: Sequence, now: float) -> None:
        """A sequence has its first token."""
        first = self._promised.pop(sequence.number, None)
        if first is not None:
            self._learn(
                sequence,
                (now - first) / max(sequence.ttft_deadline - sequence.request.arrival, 1e-9),
            )

    def _settle(self, now: float) -> None:
        """Those whose first token was due are late, whenever it comes: policies may put them off
        for long."""
        while self._due and self._due[0][0] < now:
            _, number = heappop(self._due)
            late = self._promised.pop(number, None) is not None
            if late and (sequence := self.slots.by_number.get(number)) is not None:
                self._learn(sequence, math.inf)

    def _learn(self, sequence: Sequence, late: float) -> None:
        """late: by which share of the time that was given its first token came later than
        predicted."""
        size = _size(len(sequence.request.prompt))
        margin = self.margin[size] + RATE * ((1 - MISSED) if late > self.margin[size] else -MISSED)
        self.margin[size] = min(max(margin, MARGIN[0]), MARGIN[1])

    def spoke(self, count: int, ended: int) -> None:
        """A batch gave `count` tokens, and so many completions ended by them."""
        kept = FORGET**count
        self._seen = None
        self._tokens = kept * self._tokens + count
        self._ended = kept * self._ended + ended


def _fitting(curve: np.ndarray, target: float) -> int:
    """The most decodes whose steps take little enough of the target."""
    return int(np.searchsorted(curve, TIGHT * target, side="right")) - 1


def _size(tokens: Any) -> Any:
    return np.minimum(np.log2(tokens) * 0.5, SIZES - 1).astype(int)


def _refused(said: str, reason: str, after: float) -> RequestError:
    after = max(after, SOON)
    return RequestError(
        "", f"{said}; try again in {after:.3g} s", "RESOURCE_EXHAUSTED", after, reason
    )
