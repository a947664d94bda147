"""Proposes what an EAGLE-3 draft head says (Li et al., 2025): one layer that takes hidden states of
the model, and so sees what the model sees.

A sequence has one of a few places, from its first step on if there is one. Each step of the model
leaves hidden states, which become features of the rows behind them; rows whose tokens were proposed
are computed again once the model has computed theirs. It samples by the parameters and the seed of
the request, as a draft model does.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from jaxserve.api.batch import Batch
from jaxserve.drafts.drafter import Drafted, Offer, Tokens, Wanted
from jaxserve.engine.command import StepCommand
from jaxserve.engine.device_drafter import NO_OFFER, NOTHING, admission_of, within
from jaxserve.engine.eagle_device import EagleDevice
from jaxserve.engine.eagle_programs import COLUMNS
from jaxserve.engine.eagle_times import EagleTimes
from jaxserve.engine.executor import CommandExecutor
from jaxserve.engine.step_rows import token_places
from jaxserve.replica.registry import Registry
from jaxserve.scheduling import Scheduler
from jaxserve.scheduling.events import StepIssued, StepRead, StepsLost
from jaxserve.scheduling.sequence import Sequence as TokenSequence

FIRST_RATE = 0.7  # of tokens that are right behind right ones
Captured = Sequence[jax.Array]  # hidden states of a step: see `HiddenStates`
log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class _Place:
    """A place and the sequence that has it, with its text; what it had stays until it is another's.
    first: position of row 0 in the text. computed: rows whose keys and values are there, with
    features of the model. stored: rows whose features are. admitted: it samples as the sequence
    does."""

    index: int
    sequence: int = -1
    text: Tokens | None = None
    first: int = 0
    computed: int = 0
    stored: int = 0
    admitted: bool = False

    def begin(self, sequence: int, text: Tokens | None, first: int) -> None:
        """Forgets what it had, for a sequence of which rows come from position `first` on."""
        self.admitted = self.admitted and sequence == self.sequence
        self.sequence = sequence
        self.text = text
        self.first = first
        self.computed = self.stored = 0

    def common(self, text: Tokens, start: int) -> int:
        """Counts the rows that it has for a text of which the model computes tokens from `start`
        on: those of a conversation that goes on."""
        rows = start + 1 - self.first
        if self.text is None or len(self.text) < start or not 1 < rows <= self.stored:
            return 0
        same = np.array_equal(self.text(0, start), text(0, start))
        return rows if same else 0

    def go_on(self, sequence: int, text: Tokens, rows: int) -> None:
        """Keeps its first rows, as `common` counts them, for another sequence."""
        self.sequence = sequence
        self.text = text
        self.computed = min(self.computed, rows - 1)
        self.stored = rows
        self.admitted = False


class _Source:
    def __init__(self, head: EagleHead, sequence: Drafted):
        self.head = head
        self.sequence = sequence

    def offer(self, count: int) -> Offer:
        place = self.head.place_of(self.sequence)
        if place is None:
            return NO_OFFER
        return Offer(count, 1, once=self.head.catch_up_seconds(place, self.sequence))


class EagleHead:
    """Implements `Drafter`. times: None where it is not known what steps cost. `spent`: seconds of
    the host in which it made tokens."""

    waits = True

    def __init__(self, device: EagleDevice, times: EagleTimes | None):
        self.first_rates = np.full(device.programs.sizes.most, FIRST_RATE)
        self.broken = False
        self.spent = 0.0
        self._device = device
        self._times = times
        self._sizes = device.programs.sizes
        self._places = [_Place(index) for index in range(self._sizes.places)]
        self._registry = Registry()
        self._sequences: Mapping[int, TokenSequence] = {}
        self._asleep = False
        self._worker: CommandExecutor | None = None
        self._unread: dict[int, tuple[StepCommand, Captured]] = {}  # steps by number of the batch

    def follow(self, registry: Registry, scheduler: Scheduler, worker: CommandExecutor) -> None:
        """Takes the hidden states of this worker's steps from now on, and draws by the seeds of
        these requests."""
        self._registry = registry
        self._sequences = scheduler.sequences
        self._worker = worker
        self._device.programs.expect_steps(worker.plan)
        scheduler.bus.subscribe(StepIssued, self._issued)
        scheduler.bus.subscribe(StepRead, self._read)
        scheduler.bus.subscribe(StepsLost, self._lost)

    # --- places

    def place_of(self, sequence: Drafted) -> _Place | None:
        """Returns the place of a sequence with the features of its newest row, if it has them."""
        if self.broken:
            return None
        for place in self._places:
            if place.sequence == sequence.number:
                newest = len(sequence.history) - 1 - place.first
                return place if 0 <= newest < place.stored else None
        return None

    def _free(self) -> list[_Place]:
        """Lists the places whose sequences do not run, those that were given first first."""
        return [place for place in self._places if not self._runs(place.sequence)]

    def _runs(self, number: int) -> bool:
        sequence = self._sequences.get(number)
        return sequence is not None and sequence.slot >= 0

    def _given(self, free: list[_Place], number: int, start: int) -> _Place:
        """Gives a sequence one of the free places: that which has most rows of its text already, or
        else the first."""
        text = self._sequences[number].history
        common = [place.common(text, start) for place in free]
        place = free.pop(common.index(max(common)))
        if max(common):
            place.go_on(number, text, max(common))
        self._places.remove(place)
        self._places.append(place)
        return place

    # --- features

    def _issued(self, step: StepIssued) -> None:
        """Takes the hidden states of a step that was issued, until it is read: they are there
        then, and nothing waits for them."""
        assert self._worker is not None and step.command is not None
        if not (self.broken or self._asleep):
            self._unread[step.batch.number] = step.command, self._worker.captured
        self._worker.captured = ()

    def _read(self, step: StepRead) -> None:
        """Stores the features of a step. A fault of it or of its device ends its proposals, and
        nothing else."""
        issued = self._unread.pop(step.batch.number, None)
        if issued is None or self.broken or self._asleep:
            return
        try:
            self._store(step.batch, *issued)
        except Exception:
            self._break()

    def _lost(self, event: StepsLost) -> None:
        """Begins again with empty places, as sequences do."""
        self._unread.clear()
        self._forget()
        if self.broken or self._asleep:
            return
        try:
            self._device.reset()
        except Exception:
            self._break()

    def _forget(self) -> None:
        for place in self._places:
            place.begin(-1, None, 0)

    def _store(self, batch: Batch, command: StepCommand, captured: Captured) -> None:
        assert self._worker is not None
        plan = self._worker.plan
        index = np.full(plan.slots, self._sizes.places, np.int32)  # out of range
        first = np.zeros(plan.slots, np.int32)
        places = {place.sequence: place for place in self._places}
        free = self._free()
        of_rows = zip(
            *(each.tolist() for each in (batch.seq, batch.slot, batch.start, batch.length))
        )
        for number, slot, start, length in of_rows:
            sequence = self._sequences.get(number)
            if sequence is None:
                continue
            place = places.get(number)
            if place is None and free and not sequence.request.embed:
                place = places[number] = self._given(free, number, start)
            if place is None:
                continue
            self._take_in(place, number, start, length)
            index[slot] = place.index
            first[slot] = place.first
        if (index == self._sizes.places).all():
            return
        slot, position = token_places(plan, plan.shapes[command.shape], command.rows)
        slot = np.where(position < 0, 0, slot)
        row = position + 1 - first[slot]
        stored = (position >= 0) & (row >= 0)
        place_of = np.where(stored, index[slot], self._sizes.places)
        self._device.store(captured, place_of, np.maximum(row, 0))

    def _take_in(self, place: _Place, number: int, start: int, length: int) -> None:
        """Makes room for the features of positions `start` to before `start + length` of a
        sequence: where they do not fit, half of the place is left for what follows."""
        text = self._sequences[number].history
        half = self._sizes.capacity // 2
        first = max(start + 1 + length, len(text)) - half
        row = start + 1 - place.first
        if place.sequence != number or row > place.stored:
            place.begin(number, text, max(start + 1, first))
        elif row + length + self._sizes.few > self._sizes.capacity:
            if first > start:
                place.begin(number, text, first)
            else:
                self._device.slide(place.index, first - place.first)
                place.first = first
                place.computed = 0
        place.stored = max(start + 1 + length - place.first, 0)

    # --- proposals

    def begin(self, sequence: Drafted) -> _Source:
        """See `Drafter.begin`."""
        if self._times is not None:
            self._times.fade()
        return _Source(self, sequence)

    def seconds(self, sequences: int, tokens: int) -> float:
        """See `Drafter.seconds`. 0 where it is not known what steps cost."""
        if self._times is None or not tokens:
            return 0.0
        return self._times.propose(sequences, tokens)

    def catch_up_seconds(self, place: _Place, sequence: Drafted) -> float:
        """Predicts the seconds of the rows that were not computed, but for the last few."""
        unseen = len(sequence.history) - place.first - place.computed
        if self._times is None or unseen <= self._sizes.few:
            return 0.0
        return -(-unseen // self._sizes.chunk) * self._times.chunk

    def make(self, wanted: list[Wanted], seconds: float) -> list[np.ndarray]:
        """See `Drafter.make`. A fault of it or of its device ends its proposals, and nothing
        else."""
        began = time.perf_counter()
        try:
            return self._make(wanted, seconds)
        except Exception:
            self._break()
            return [NOTHING] * len(wanted)
        finally:
            self.spent += time.perf_counter() - began

    def _break(self) -> None:
        """Makes no tokens from now on: what it has on its device may be wrong or lost."""
        log.exception("the draft head proposes nothing from now on")
        self.broken = True

    def _make(self, wanted: list[Wanted], seconds: float) -> list[np.ndarray]:
        """Makes the tokens. Errors: those of its device."""
        made = [NOTHING] * len(wanted)
        seconds = max(seconds, self._chunk_seconds)  # for one launch in any case
        ready: list[int] = []
        rows: list[np.ndarray] = []
        reach = 0
        drawn = False
        for number, (source, size) in enumerate(wanted):
            assert isinstance(source, _Source)
            sequence = source.sequence
            place = self.place_of(sequence)
            assert place is not None, "what it offered, it has not"
            seconds = self._catch_up(place, sequence, seconds)
            text = len(sequence.history)
            if text - place.first - place.computed > self._sizes.few:
                continue
            if not place.admitted:
                self._device.admit(admission_of(sequence, place.index, self._registry))
                place.admitted = True
            rows.append(self._ints(place, sequence, text, self._sizes.few))
            place.computed = text - place.first
            ready.append(number)
            reach = max(reach, text + size - place.first)
            drawn = drawn or sequence.request.sampling.temperature > 0
        if not ready:
            return made
        steps = max(wanted[number].size for number in ready)
        tokens = self._launched(np.stack(rows), reach, steps, drawn)
        for number, some in zip(ready, tokens):
            made[number] = within(some[: wanted[number].size], self._device.programs.config.vocab)
        return made

    def _launched(self, rows: np.ndarray, reach: int, steps: int, drawn: bool) -> np.ndarray:
        """Proposes tokens, and learns what that takes: [n, most]."""
        self._device.wait()
        compiles = self._device.programs.compiles
        began = time.perf_counter()
        tokens = np.asarray(self._device.propose(rows, reach, steps, drawn))
        if self._times is not None and compiles == self._device.programs.compiles:
            predicted = self._times.propose(len(rows), steps)
            self._times.seen(predicted, time.perf_counter() - began)
        return tokens

    def _catch_up(self, place: _Place, sequence: Drafted, seconds: float) -> float:
        """Issues launches for the rows that were not computed, but for the last few, while there
        are seconds left; returns how many there are then."""
        chunk = self._sizes.chunk
        taken = self._chunk_seconds
        stop = len(sequence.history) - 1
        while taken <= seconds and stop + 1 - place.first - place.computed > self._sizes.few:
            start = place.first + place.computed
            end = min(start + chunk, stop)
            self._device.extend(self._ints(place, sequence, end, chunk)[None], end - place.first)
            place.computed = end - place.first
            seconds -= taken
        return seconds

    @property
    def _chunk_seconds(self) -> float:
        """Predicted seconds of a launch that extends a place; 0 where that is not known."""
        return 0.0 if self._times is None else self._times.chunk

    def _ints(self, place: _Place, sequence: Drafted, stop: int, width: int) -> np.ndarray:
        """Returns the integers of a place's rows before position `stop`: see `EagleProgram`."""
        start = place.first + place.computed
        count = stop - start
        ints = np.zeros(COLUMNS + width, np.int32)
        ints[:COLUMNS] = place.index, place.computed, count, place.first
        ints[COLUMNS : COLUMNS + count] = sequence.history(start, stop)
        return ints

    # --- sleep

    def sleep(self) -> None:
        """Takes its weights and what it holds of sequences from the device; the weights go to host
        memory, whence `wake` brings them."""
        self._unread.clear()
        self._forget()
        self._asleep = True
        try:
            self._device.drop()
        except Exception:
            self._break()

    def wake(self) -> None:
        """Brings back what sleeps, if it does."""
        if not self._asleep:
            return
        self._asleep = False
        try:
            self._device.restore()
        except Exception:
            self._break()

    def close(self) -> None:
        """Does nothing: its device is this process's."""
