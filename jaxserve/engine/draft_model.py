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
from typing import cast

import numpy as np

from jaxserve.api.request import Request
from jaxserve.costs.predictor import Predictor
from jaxserve.drafts.drafter import Drafted, Offer, Wanted
from jaxserve.engine import sampling_rows
from jaxserve.engine.command import DeviceError
from jaxserve.engine.draft_steps import DraftSteps, Rows
from jaxserve.engine.executor import CommandExecutor
from jaxserve.lanes.groups import ChunkPlace
from jaxserve.lanes.load import LaneLoad
from jaxserve.replica.registry import Registry
from jaxserve.replica.weights import WeightsHolder, WeightSource

FIRST_RATE = 0.8  # of tokens that are right behind right ones: most draft models have more
FEW = 8  # tokens of a place that are computed in rows of one
RECENT = 0.1  # weight of a text's length among those before
LEAST_CHUNK = 64  # tokens, if there are as many: a row of most compiled shapes
NO_NUMBER = -1
NOTHING = np.empty(0, np.int32)
log = logging.getLogger(__name__)


class _Source:
    """A sequence for which the draft model proposes tokens."""

    def __init__(self, model: DraftModel, sequence: Drafted):
        self._model = model
        self.sequence = sequence

    def offer(self, count: int) -> Offer:
        return Offer(0 if self._model.broken else count, 1)


@dataclasses.dataclass
class _Place:
    """A place of the draft model, with keys and values of a sequence's tokens. first: the first of
    these; computed: behind the last. known: tokens of the sequence when some were `proposed` last.
    used: counts up with each use."""

    index: int
    number: int = NO_NUMBER
    first: int = 0
    computed: int = 0
    known: int = 0
    proposed: np.ndarray = dataclasses.field(default_factory=lambda: NOTHING)
    used: int = 0

    def take(self, number: int) -> None:
        """Forgets the sequence that it had for another."""
        self.number = number
        self.first = self.computed = self.known = 0
        self.proposed = NOTHING

    def heed(self, sequence: Drafted, room: int, capacity: int) -> None:
        """Forgets what was computed of proposed tokens that did not come; and all but the last half
        of `capacity` tokens where `room` more would not fit."""
        history = sequence.history
        came = history(self.known, min(len(history), self.known + len(self.proposed)))
        wrong = np.flatnonzero(came != self.proposed[: len(came)])
        right = int(wrong[0]) if wrong.size else len(came)
        # the newest token is computed in any case, for what follows it is sampled behind it
        self.computed = min(self.computed, self.known + right, len(history) - 1)
        self.known = len(history)
        self.proposed = NOTHING
        if len(history) + room - self.first > capacity:
            self.first = self.computed = len(history) - capacity // 2


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
        self._uses = 0

    def follow(self, registry: Registry) -> None:
        """Draws by the seeds of these requests from now on."""
        self._registry = registry

    def begin(self, sequence: Drafted) -> _Source:
        """See `Drafter.begin`."""
        self._seen(len(sequence.history))
        return _Source(self, sequence)

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
        """See `Drafter.make`. A fault of its device ends its proposals, and nothing else."""
        began = time.perf_counter()
        compiles = self.worker.compiles
        try:
            made = self._make(wanted, seconds)
        except DeviceError:
            log.exception("the draft model proposes nothing from now on")
            self.broken = True
            return [NOTHING] * len(wanted)
        taken = time.perf_counter() - began
        self.spent += taken
        sizes = [len(tokens) for tokens in made]
        if all(sizes) and self._steps.only_sampled and self.worker.compiles == compiles:
            self._predictor.seen(self.seconds(len(sizes), max(sizes)), taken)
        return made

    def _make(self, wanted: list[Wanted], seconds: float) -> list[np.ndarray]:
        ready: list[tuple[_Place, Drafted, int]] = []
        sources = [cast(_Source, source) for source, _ in wanted]
        for source, (_, count) in zip(sources, wanted):
            place = self._place(source.sequence, [one for one, _, _ in ready])
            if place is None:
                continue
            place.heed(source.sequence, count, self._capacity)
            self._seen(len(source.sequence.history) - place.first)
            seconds = self._catch_up(place, source.sequence, seconds)
            if len(source.sequence.history) - place.computed <= self._few:
                ready.append((place, source.sequence, count))
        self._issue_newest(ready)
        for nth in range(1, max((count for *_, count in ready), default=0)):
            self._issue_next([one for one in ready if one[2] > nth], nth)
        proposed = self._read(ready)
        return [proposed.get(source.sequence.number, NOTHING) for source in sources]

    @property
    def _few(self) -> int:
        return min(FEW, self._steps.rows)

    def _place(self, sequence: Drafted, taken: list[_Place]) -> _Place | None:
        """Returns the place of a sequence, which may be that of the one that was idle longest; None
        where all are taken."""
        self._uses += 1
        mine = [place for place in self._places if place.number == sequence.number]
        free = [place for place in self._places if place not in taken]
        if not mine and not free:
            return None
        place = mine[0] if mine else min(free, key=lambda one: one.used)
        if not mine:
            place.take(sequence.number)
            self._admit(place, sequence.request, sequence)
        place.used = self._uses
        return place

    def _admit(self, place: _Place, request: Request, sequence: Drafted) -> None:
        """Has a place sample as a sequence does, but for penalties and biases."""
        seed = sampling_rows.fold_seed(self._registry[request.id].seed, sequence.index)
        params = request.sampling
        none = NOTHING
        self._steps.admit(sampling_rows.admissions(params, 0, place.index, none, [], seed, ())[:1])

    def _catch_up(self, place: _Place, sequence: Drafted, seconds: float) -> float:
        """Issues steps for the tokens of a sequence that were not computed, but for the last few,
        while there are seconds left, and a short one if it is the first; returns how many there are
        then."""
        history = sequence.history
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

    def _chunk_seconds(self, place: _Place, count: int) -> float:
        """Predicts the seconds of the next `count` tokens of a place; 0 where costs are not
        known."""
        if not self._predictor.calibrated:
            return 0.0
        loads = [LaneLoad()]
        self._predictor.add_chunk(loads, ChunkPlace(0), place.computed - place.first, count)
        return self._predictor.lane(loads[0])

    def _issue_newest(self, ready: list[tuple[_Place, Drafted, int]]) -> None:
        """Issues the last few tokens of each sequence, after which the first token of each proposal
        is sampled."""
        parts: list[Rows] = []
        for place, sequence, _ in ready:
            tokens = sequence.history(place.computed, place.known)
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

    def _issue_next(self, going: list[tuple[_Place, Drafted, int]], nth: int) -> None:
        """Issues the step after which proposed token number `nth` of each is sampled."""
        count = len(going)
        first = np.array([place.first for place, _, _ in going], np.int32)
        for place, _, _ in going:
            place.computed = place.known + nth
        self._steps.issue(
            Rows(
                np.array([place.index for place, _, _ in going], np.int32),
                np.array([place.computed - 1 for place, _, _ in going], np.int32) - first,
                np.ones(count, np.int32),
                NOTHING,
                np.ones(count, bool),
                first,
            )
        )

    def _issue_all(self, parts: list[Rows]) -> None:
        if parts:
            self._steps.issue(Rows(*map(np.concatenate, zip(*parts))))

    def _read(self, ready: list[tuple[_Place, Drafted, int]]) -> dict[int, np.ndarray]:
        """Reads what was sampled; returns the proposals by number of the sequence, up to a token
        that the model does not have."""
        steps = self._steps.read()
        found = {}
        for place, sequence, _ in ready:
            tokens = np.array(
                [step[place.index] for step in steps if place.index in step], np.int32
            )
            faulty = np.flatnonzero((tokens < 0) | (tokens >= self._vocab))
            place.proposed = tokens[: faulty[0]] if faulty.size else tokens
            found[sequence.number] = place.proposed
        return found

    def sleep(self) -> None:
        """Takes its weights and KV from the device; the weights go to host memory, whence `wake`
        brings them."""
        for place in self._places:
            place.take(NO_NUMBER)
        self.worker.weights.sleep(1)
        self._asleep = True

    def wake(self) -> None:
        """Brings back what sleeps, if it does."""
        if not self._asleep:
            return
        self._asleep = False
        self.worker.weights.wake()
        self._steps.reset()


class WeightsWithDraft(WeightsHolder):
    """Weights of a replica with a draft model, which sleeps and wakes with it; new weights are the
    replica's alone."""

    def __init__(self, own: WeightsHolder, draft: DraftModel):
        self._own = own
        self._draft = draft

    def read(self, source: WeightSource) -> str:
        return self._own.read(source)

    def use(self) -> None:
        self._own.use()
        self._draft.wake()

    def forget(self) -> None:
        self._own.forget()

    def sleep(self, level: int) -> None:
        self._own.sleep(level)
        self._draft.sleep()

    def wake(self) -> None:
        self._own.wake()
        self._draft.wake()
