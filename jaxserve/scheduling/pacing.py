"""Paces decodes by token deadlines: how long the next step may take, so that each keeps its mean
time per token.

The n-th token after a decode's first is due at its first token + n x its objective. A decode that
is ahead of that has time in hand, which a longer step may spend; one that is behind owes time, and
steps are shorter until it is repaid. So where the least chunk of a prompt takes longer than one
token may, steps go without prefill until the decodes can afford one.

Steps do not take what is predicted. `StepSpread` learns, by sizes of steps, how much longer tokens
take on average, and how much longer all but a few take. The step is shortened by the first. Decodes
are kept ahead by the second, so that a completion may end at any token. Medha (4.2) adapts chunks
to the objective of one step; here they are adapted to the deadlines of all tokens so far.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

import numpy as np

from jaxserve.api.batch import Batch
from jaxserve.costs.predictor import Predictor
from jaxserve.scheduling.completion_lengths import CompletionLengths
from jaxserve.scheduling.events import Admitted, EventBus, Tokens
from jaxserve.scheduling.slots import SlotTable

# share of the decodes' time that chunks get where decodes alone take all there is
MIN_PREFILL_SHARE = 0.25
LONGEST_STEP = 2.0  # times the objective per token that a step takes at most of what is in hand
SAVED_STEP = 5.0  # the same of a step for which decodes saved
MOST_AHEAD = 4.0  # tokens' time that a decode may have in hand
MOST_BEHIND = 8.0  # tokens' time that a decode may owe; what it is later than that is forgiven
MIN_MARGIN = 0.02  # share of a token's time by which decodes are kept ahead at least
# a decode comes to be ahead by the margin in this share of the tokens of a completion, at most
BUILD_SHARE = 1 / 40
BUILD_TOKENS = 16.0
FIRST_SHARE = 0.5  # of the margin, by which its second token is to be ahead already
MAX_RATIO = 4.0  # times its prediction that a step is taken for at most, in learning
MISSES = 0.005  # share of steps that may take longer than the margin says
# by what one that does raises the margin; others let it shrink, so that `MISSES` keep it
MARGIN_GROWTH = 1.2
MARGIN_STEP = 0.01
SMOOTHING = 0.02  # weight of the last step in the mean
RING = 64  # predicted ends of batches that are kept: more than fly at once
SIZE_CLASSES = 24  # times per token of 2^k to 2^(k + 1) ms


class StepSpread:
    """The ratio of what a token takes to what was predicted for it, by size: `mean` on average, and
    `high` in all but `MISSES` of steps."""

    def __init__(self) -> None:
        self._mean = [1.0] * SIZE_CLASSES
        self._margin = [MIN_MARGIN] * SIZE_CLASSES

    def mean(self, seconds: float) -> float:
        return self._mean[_size_class(seconds)]

    def high(self, seconds: float) -> float:
        size = _size_class(seconds)
        return self._mean[size] + self._margin[size]

    def learn(self, predicted: float, seconds: float) -> None:
        """Learns from a token that was predicted to take `predicted` seconds."""
        if predicted <= 0:
            return
        ratio = min(max(seconds / predicted, 1 / MAX_RATIO), MAX_RATIO)
        size = _size_class(predicted)
        margin = self._margin[size]
        if ratio > self.high(predicted):
            margin = MARGIN_GROWTH * margin + MARGIN_STEP
        else:
            margin *= MARGIN_GROWTH**-MISSES
        self._margin[size] = max(margin, MIN_MARGIN)
        self._mean[size] += SMOOTHING * (ratio - self._mean[size])


class _Flight(NamedTuple):
    """A batch in flight. Clock seconds at which it was issued, and at which it should be read, of
    a clock in which steps take what is predicted. prefills: whether it has prompts."""

    issued: float
    end: float
    prefills: bool


class StepTarget(NamedTuple):
    """Predicted seconds of a step in one stage. objective: of a token; each: that steps may take on
    average, which is more where decodes alone take as long; now: that the next step may take; most:
    that one may take once the decodes have saved for it; spare: that the next one may take where a
    prompt's least chunk takes longer than `most`."""

    objective: float
    each: float
    now: float
    most: float
    spare: float


class Pacer:
    """The deadlines of decodes' tokens, by slot, and what the next step may take by them."""

    def __init__(self, slots: SlotTable, predictor: Predictor, lengths: CompletionLengths):
        self.spread = StepSpread()
        self._lengths = lengths
        self._slots = slots
        self.predictor = predictor
        self._stages = predictor.mesh.spp
        # clock second at which the newest token that is issued or read is due; NaN before the first
        self._due = np.full(len(slots.phase), np.nan)
        self._built = np.zeros(len(slots.phase))  # share of the margin that a decode has to have
        self._flights: dict[int, _Flight] = {}  # by number of the batch
        self._ends = np.zeros(RING)  # clock seconds at which they should be read, without `_late`
        # of the last batches that were read: when they were, and when they should have been
        self._reads: deque[tuple[float, float]] = deque(maxlen=self._stages)
        self._free = [0.0] * self._stages  # clock seconds at which stages are free, without `_late`
        self._late = 0.0  # by which the last batch was read later than predicted
        self._least = 0.0  # time per token that leaves something to prompts, of the last batch
        self._saved_for = 0.0  # seconds of a token for which decodes save

    def listen(self, bus: EventBus) -> None:
        """Follows what the scheduler publishes on this bus."""
        bus.subscribe(Admitted, self._admitted)
        bus.subscribe(Tokens, self._tokens)

    # --- what a step may take

    def target(self, running: np.ndarray, decode_seconds: float, now: float) -> StepTarget:
        """Returns what the next step may take. running [n]: slots of all decodes, at least one;
        decode_seconds: predicted, of the step with its decodes alone, in a stage."""
        slots = self._slots
        tpot = slots.tpot[running]
        self._least = self._least_of(decode_seconds)
        objective = np.maximum(tpot, self._least)
        tightest = float(objective.min())
        seconds = tightest / self._stages
        own = float(tpot.min()) / self._stages
        if not self.predictor.calibrated:
            return StepTarget(own, seconds, seconds, seconds, math.inf)
        begin = max(now, self._free[0] + self._late)
        begins = np.maximum(self._ends[slots.last_batch[running] % RING] + self._late, begin)
        ahead = self._due[running] - begins
        ahead[np.isnan(ahead)] = 0.0
        gap = float(slots.tbt[running].min())
        size = min(tightest, gap)
        mean = self.spread.mean(size)
        high = self.spread.high(size)
        ahead += (1 - (high - mean) * self._built[running]) * objective
        scale = mean * self._stages
        allowed = float(ahead.min()) / scale
        limit = gap / (high * self._stages)
        target = min(allowed, LONGEST_STEP * tightest / scale, limit)
        return StepTarget(own, seconds, target, min(SAVED_STEP * tightest / scale, limit), allowed)

    def due(self, slot: int, now: float) -> float:
        """Returns the clock second at which the newest issued token of a decode is due. now: at
        which the token before it is read, if that is its first."""
        due = float(self._due[slot])
        return now + float(self._slots.tpot[slot]) if math.isnan(due) else due

    def _least_of(self, decode_seconds: float) -> float:
        """Returns the least time per token that leaves something to prompts: that of the batch
        before where this one has no decodes."""
        if not decode_seconds:
            return self._least
        return (1 + MIN_PREFILL_SHARE) * decode_seconds * self._stages

    def save_for(self, seconds: float) -> None:
        """Lets decodes get as far ahead as a step of `seconds` in a stage needs."""
        self._saved_for = 2 * seconds * self._stages

    # --- what happens

    def issued(self, batch: Batch, decode_seconds: float, now: float) -> None:
        """Notes a batch that was packed at clock second `now`. decode_seconds: as of `target`."""
        decodes = batch.slot[batch.is_decode].astype(np.intp)
        self._least = self._least_of(decode_seconds)
        self._due[decodes] += np.maximum(self._slots.tpot[decodes], self._least)
        built = self._built[decodes] + (1 - FIRST_SHARE) / self._build_tokens()
        self._built[decodes] = np.minimum(built, 1.0)
        end = self._passage(batch, now - self._late)
        prefills = len(decodes) + len(batch.drafts) < len(batch.slot)
        self._flights[batch.number] = _Flight(now, end, prefills)
        self._ends[batch.number % RING] = end

    def _build_tokens(self) -> float:
        """Returns the tokens in which a decode comes to have its margin: few beside those that
        completions have, most of which so end with it. Were it sooner, each new decode would
        shorten the steps of all."""
        return min(max(BUILD_SHARE * self._lengths.remaining, 1.0), BUILD_TOKENS)

    def _passage(self, batch: Batch, at: float) -> float:
        """Returns the clock second, without `_late`, at which a batch that is issued `at` one
        leaves the last stage."""
        free = self._free
        end = max(at, free[0]) + batch.seconds
        free[0] = end
        if self._stages > 1:
            hop = self.predictor.hop(int(batch.length.sum()))
            for stage in range(1, self._stages):
                end = max(end + hop, free[stage]) + batch.seconds
                free[stage] = end
        return end

    def reset(self) -> None:
        """Forgets the batches in flight: they are lost."""
        self._flights.clear()
        self._reads.clear()

    def _admitted(self, event: Admitted) -> None:
        self._due[event.slot] = np.nan
        self._built[event.slot] = FIRST_SHARE

    def _tokens(self, event: Tokens) -> None:
        slots = self._slots
        now = event.now
        read = event.slots
        self._read(event.batch.number, now)
        if event.further.size:
            np.add.at(self._due, event.further, slots.tpot[event.further])
        due = self._due[read]
        tpot = slots.tpot[read]
        each = np.maximum(tpot, self._least)
        behind = slots.in_flight[read] * each  # of tokens that are issued behind this one
        first = np.isnan(due)
        if first.any():
            for place in first.nonzero()[0].tolist():
                due[place] = behind[place] + self._first_due(int(read[place]), now)
        most = np.maximum(MOST_AHEAD * each, self._saved_for)
        ahead = np.minimum(np.maximum(due - behind - now, -MOST_BEHIND * each), most)
        self._due[read] = now + ahead + behind

    def _first_due(self, slot: int, now: float) -> float:
        """Returns the clock second at which the token is due that a slot's sequence has just got,
        its first in this slot: it may have had others before it was preempted, or elsewhere."""
        sequence = self._slots.by_slot.get(slot)
        if sequence is None or sequence.first_token_at is None:  # it has ended with this token
            return now
        return sequence.first_token_at + (len(sequence.output) - 1) * sequence.tpot

    def _read(self, number: int, now: float) -> None:
        """Learns from when a batch was read: what the time of a token was, over as many batches as
        there are stages, where these followed each other."""
        flight = self._flights.pop(number, None)
        if flight is None:
            return
        self._late = now - float(self._ends[number % RING])
        if len(self._reads) == self._stages and flight.prefills:
            since, planned = self._reads[0]
            predicted = flight.end - planned
            if flight.issued <= since + self.predictor.early(predicted):
                self.spread.learn(predicted, now - since)
        self._reads.append((now, flight.end))


def _size_class(seconds: float) -> int:
    """Returns the class of a time per token: of 2^k to 2^(k + 1) ms."""
    return min(max(math.frexp(seconds * 1000)[1], 0), SIZE_CLASSES - 1)
