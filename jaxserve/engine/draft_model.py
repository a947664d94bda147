"""A draft model: proposes what a smaller model with the same tokenizer says (Leviathan et al.,
2023).

It samples by the parameters and the seed of the request, at the same positions, and what is drawn
is a function of these and of the logits: where both models are of one mind about a token, they
draw the same one, however high the temperature. It sees the last tokens of long texts only, so that
neither its memory nor its time grow with the context.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import NamedTuple, cast

import numpy as np

from jaxserve.costs.predictor import Predictor
from jaxserve.drafts.drafter import Drafted, Offer, Tokens, Wanted
from jaxserve.engine.device_drafter import NO_OFFER, NOTHING, admission_of, within
from jaxserve.engine.draft_steps import DraftSteps, Rows
from jaxserve.engine.executor import CommandExecutor
from jaxserve.lanes.groups import ChunkPlace
from jaxserve.lanes.load import LaneLoad
from jaxserve.replica.registry import Registry
from jaxserve.scheduling import Scheduler

FIRST_RATE = 0.8  # of tokens that are right behind right ones: most draft models have more
FEW = 8  # tokens of a place that are computed in rows of one
RECENT = 0.1  # weight of a text's length among those before
LEAST_CHUNK = 64  # tokens, if there are as many: a row of most compiled shapes
log = logging.getLogger(__name__)


class _Source:
    """A sequence for which the draft model proposes tokens, in the place that it has, if any."""

    def __init__(self, model: DraftModel, sequence: Drafted):
        self._model = model
        self.sequence = sequence
        self.place: _Place | None = None

    def offer(self, count: int) -> Offer:
        if self._model.broken:
            return NO_OFFER
        self._model.give_place(self)
        if self.place is None:
            return NO_OFFER
        return Offer(count, 1, once=self._model.catch_up_seconds(self.place))


@dataclasses.dataclass(eq=False)
class _Place:
    """A place of the draft model, with keys and values of a sequence's tokens. first: the first of
    these; computed: behind the last. known: tokens of the sequence when some were `proposed`
    last. admitted: it samples as the sequence does."""

    index: int
    source: _Source | None = None
    admitted: bool = False
    first: int = 0
    computed: int = 0
    known: int = 0
    proposed: np.ndarray = dataclasses.field(default_factory=lambda: NOTHING)

    @property
    def needed(self) -> bool:
        """True if its sequence runs."""
        return self.source is not None and self.source.sequence.slot >= 0

    def take(self, source: _Source | None) -> None:
        """Forgets the sequence that it had for another, or for none."""
        if self.source is not None:
            self.source.place = None
        self.source = source
        self.admitted = False
        self.first = self.computed = self.known = 0
        self.proposed = NOTHING
        if source is not None:
            source.place = self

    def take_in(self, room: int, capacity: int) -> None:
        """Takes in the tokens that came: forgets what was computed of proposed ones that did not
        come, and all but the last half of `capacity` tokens where `room` more would not fit."""
        assert self.source is not None
        history = self.source.sequence.history
        came = history(self.known, min(len(history), self.known + len(self.proposed)))
        wrong = np.flatnonzero(came != self.proposed[: len(came)])
        right = int(wrong[0]) if wrong.size else len(came)
        # the newest token is computed in any case, for what follows it is sampled behind it
        self.computed = min(self.computed, self.known + right, len(history) - 1)
        self.known = len(history)
        self.proposed = NOTHING
        if len(history) + room - self.first > capacity:
            self.first = self.computed = len(history) - capacity // 2


class _Ready(NamedTuple):
    """A place whose text is computed but for the last few tokens, and how many tokens it is to
    propose."""

    place: _Place
    history: Tokens
    size: int


class DraftModel:
    """Implements `Drafter`. predictor: of its own steps. capacity: tokens of a place. vocab: ids
    that may be proposed. longest: most tokens of a proposal. `spent`: seconds of the host in
    which it made tokens."""

    waits = True

    def __init__(
        self,
        worker: CommandExecutor,
        steps: DraftSteps,
        predictor: Predictor,
        capacity: int,
        vocab: int,
        longest: int,
    ):
        self.first_rates = np.full(longest, FIRST_RATE)
        self.broken = False
        self.spent = 0.0
        self._asleep = False
        self.worker = worker
        self._steps = steps
        self._predictor = predictor
        self._capacity = capacity
        self._vocab = vocab
        self._registry = Registry()
        self._places = [_Place(index) for index in range(worker.plan.slots)]
        self._context = 0.0  # mean tokens of its texts

    def follow(self, registry: Registry, scheduler: Scheduler, worker: CommandExecutor) -> None:
        """Draws by the seeds of these requests from now on; it sees tokens alone."""
        self._registry = registry

    def begin(self, sequence: Drafted) -> _Source:
        """See `Drafter.begin`. What was learnt of its times fades with each sequence: where they
        are thought too long it makes no tokens, by which it could learn better."""
        self._predictor.scale **= 1 - RECENT
        self._seen(len(sequence.history))
        return _Source(self, sequence)

    def give_place(self, source: _Source) -> None:
        """Gives a sequence a place, if it has none and there is one whose sequence does not
        run."""
        if source.place is None:
            free = [place for place in self._places if not place.needed]
            if free:
                min(free, key=lambda place: place.source is not None).take(source)

    def seconds(self, sequences: int, tokens: int) -> float:
        """See `Drafter.seconds`: the first step has the tokens that came since, two of a sequence
        where all that were proposed were right. 0 where it is not known what steps cost."""
        if not self._predictor.calibrated or not tokens:
            return 0.0
        return self._step_seconds(2 * sequences) + (tokens - 1) * self._step_seconds(sequences)

    def _step_seconds(self, rows: int) -> float:
        return self._predictor.lane(LaneLoad(rows, rows * self._context, self._context, rows))

    def _seen(self, tokens: int) -> None:
        """Takes in the length of a text, for the mean by which steps are predicted."""
        self._context += RECENT * (min(tokens, self._capacity) - self._context)

    def make(self, wanted: list[Wanted], seconds: float) -> list[np.ndarray]:
        """See `Drafter.make`. A fault of it or of its device ends its proposals, and nothing
        else."""
        began = time.perf_counter()
        compiles = self.worker.compiles
        try:
            made, caught_up = self._make(wanted, seconds)
        except Exception:
            self._break()
            return [NOTHING] * len(wanted)
        taken = time.perf_counter() - began
        self.spent += taken
        sizes = [len(tokens) for tokens in made]
        if all(sizes) and caught_up and self.worker.compiles == compiles:
            self._predictor.seen(self.seconds(len(sizes), max(sizes)), taken)
        return made

    def _break(self) -> None:
        """Makes no tokens from now on: what it has on its device may be wrong or lost."""
        log.exception("the draft model proposes nothing from now on")
        self.broken = True

    def _make(self, wanted: list[Wanted], seconds: float) -> tuple[list[np.ndarray], bool]:
        """Makes the tokens; also returns whether all texts were computed but for the last few.
        Errors: those of its device."""
        ready: list[_Ready] = []
        places: list[_Place] = []
        for source, size in wanted:
            place = cast(_Source, source).place
            assert place is not None and place.source is not None, "what it offered, it has not"
            places.append(place)
            if not place.admitted:
                admission = admission_of(place.source.sequence, place.index, self._registry)
                self._steps.admit([admission])
                place.admitted = True
            place.take_in(size, self._capacity)
            history = place.source.sequence.history
            self._seen(len(history) - place.first)
            seconds = self._catch_up(place, history, seconds)
            if len(history) - place.computed <= self._few:
                ready.append(_Ready(place, history, size))
        caught_up = not self._steps.waiting
        self._issue_newest(ready)
        for nth in range(1, max((one.size for one in ready), default=0)):
            self._issue_next([one.place for one in ready if one.size > nth], nth)
        self._read([one.place for one in ready])
        return [place.proposed for place in places], caught_up

    @property
    def _few(self) -> int:
        return min(FEW, self._steps.rows)

    def _catch_up(self, place: _Place, history: Tokens, seconds: float) -> float:
        """Issues steps for the tokens of a sequence that were not computed, but for the last few,
        while there are seconds left, and a short one if it is the first; returns how many there are
        then."""
        while len(history) - place.computed > self._few:
            start = place.computed
            count = min(len(history) - 1 - start, self._steps.tokens)
            while count > LEAST_CHUNK and self._chunk_seconds(place, count) > seconds:
                count = max(count // 2, LEAST_CHUNK)
            taken = self._chunk_seconds(place, count)
            if taken > seconds and self._steps.waiting:
                break
            seconds -= taken
            self._steps.issue(
                Rows(
                    np.array([place.index], np.int32),
                    np.array([start - place.first], np.int32),
                    np.array([count], np.int32),
                    history(start, start + count),
                    np.zeros(1, bool),
                    np.array([place.first], np.int32),
                )
            )
            place.computed = start + count
        return seconds

    def catch_up_seconds(self, place: _Place) -> float:
        """Predicts the seconds of the tokens that a place has not seen, but for the last few."""
        assert place.source is not None
        unseen = min(len(place.source.sequence.history) - place.computed, self._capacity)
        if unseen <= self._few:
            return 0.0
        chunks = -(-unseen // self._steps.tokens)
        return chunks * self._chunk_seconds(place, -(-unseen // chunks))

    def _chunk_seconds(self, place: _Place, count: int) -> float:
        """Predicts the seconds of the next `count` tokens of a place; 0 where costs are not
        known."""
        if not self._predictor.calibrated:
            return 0.0
        loads = [LaneLoad()]
        self._predictor.add_chunk(loads, ChunkPlace(0), place.computed - place.first, count)
        return self._predictor.lane(loads[0])

    def _issue_newest(self, ready: list[_Ready]) -> None:
        """Issues the last few tokens of each sequence, after which the first token of each proposal
        is sampled."""
        parts: list[Rows] = []
        for place, history, _ in ready:
            tokens = history(place.computed, place.known)
            count = len(tokens)
            if sum(len(part.place) for part in parts) + count > self._steps.rows:
                self._issue_all(parts)
                parts = []
            start = place.computed - place.first
            parts.append(
                Rows(
                    np.full(count, place.index, np.int32),
                    np.arange(start, start + count, dtype=np.int32),
                    np.ones(count, np.int32),
                    tokens,
                    np.arange(count) == count - 1,
                    np.full(count, place.first, np.int32),
                )
            )
            place.computed = place.known
        self._issue_all(parts)

    def _issue_all(self, parts: list[Rows]) -> None:
        if parts:
            self._steps.issue(Rows(*map(np.concatenate, zip(*parts))))

    def _issue_next(self, places: list[_Place], nth: int) -> None:
        """Issues the step after which proposed token number `nth` of each place is sampled."""
        count = len(places)
        first = np.array([place.first for place in places], np.int32)
        for place in places:
            place.computed = place.known + nth
        self._steps.issue(
            Rows(
                np.array([place.index for place in places], np.int32),
                np.array([place.computed - 1 for place in places], np.int32) - first,
                np.ones(count, np.int32),
                NOTHING,
                np.ones(count, bool),
                first,
            )
        )

    def _read(self, places: list[_Place]) -> None:
        """Reads what was sampled: the proposals of these places, up to a token that the model does
        not have."""
        steps = self._steps.read()
        for place in places:
            mine = [step[place.index] for step in steps if place.index in step]
            place.proposed = within(np.array(mine, np.int32), self._vocab)

    # --- sleep

    def sleep(self) -> None:
        """Takes its weights and KV from the device; the weights go to host memory, whence `wake`
        brings them."""
        for place in self._places:
            place.take(None)
        try:
            self.worker.weights.sleep(1)
        except Exception:
            self._break()
        self._asleep = True

    def wake(self) -> None:
        """Brings back what sleeps, if it does."""
        if not self._asleep:
            return
        self._asleep = False
        try:
            self.worker.weights.wake()
            self._steps.reset()
        except Exception:
            self._break()

    def close(self) -> None:
        """Ends what its worker began."""
        self.worker.close()
