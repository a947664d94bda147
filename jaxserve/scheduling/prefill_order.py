"""Ranks the sequences that can be prefilled in a step: partly prefilled ones and waiting ones, by
the policy."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from jaxserve.policies import Policy
from jaxserve.scheduling.page_admission import PageAdmission
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.slots import SlotTable
from jaxserve.scheduling.waiting_queue import smallest_first


class PrefillOrder:
    """The order of one step. Each sequence comes once, in whichever pass reaches it first; waiting
    ones that cannot be admitted any more are left out."""

    def __init__(self, policy: Policy, now: float, slots: SlotTable, admission: PageAdmission):
        self.admission = admission
        self._running = tuple(slots.prefilling)
        self._shares = slots.shares
        self._waiting = slots.queue.copy()
        prompts = slots.prompts(now)
        self._work = prompts.work
        self._tokens = prompts.tokens
        self._key = policy.order(prompts)
        self._turn = prompts.turn
        self._left = np.ones(self._key.size, bool)

    def turn(self, sequence: Sequence) -> int:
        """Returns the turn of a sequence's tenant; 0 while there is one tenant."""
        return int(self._shares.turns[sequence.tenant]) if self._turn.size else 0

    def first(self, most: int, running: bool = True) -> list[Sequence]:
        """Returns the first sequences, at most `most`, which come none the less; running: partly
        prefilled ones too."""
        count = len(self._running)
        chosen: list[Sequence] = []
        for place in smallest_first(self._key):
            index = int(place)
            sequence = self._running[index] if index < count else self._waiting[index - count]
            if running if index < count else self.admission.may(sequence):
                chosen.append(sequence)
            if len(chosen) == most:
                break
        return chosen

    def ranked(
        self, most_work: float = math.inf, beside: Sequence | None = None
    ) -> Iterator[Sequence]:
        """Sequences that have not come yet, of at most `most_work` seconds of prefill, and the
        first large prompt that waits: it may claim pages. beside: only those whose tenants' turns
        are not after this one's."""
        count = len(self._running)
        if not (self.admission.open or np.count_nonzero(self._left[:count])):
            return
        chosen = self._left
        if most_work < math.inf:
            chosen = self._left & (self._work <= most_work) | self._first_large()
        if beside is not None and self._turn.size:
            chosen = chosen & (self._turn <= self.turn(beside))
        indices = chosen.nonzero()[0]
        running_left = np.count_nonzero(chosen[:count])
        for place in smallest_first(self._key[indices]):
            index = int(indices[place])
            if index < count:
                running_left -= 1
                sequence = self._running[index]
            elif self.admission.open or running_left:
                sequence = self._waiting[index - count]
                if not self.admission.may(sequence):
                    continue
            else:
                return
            self._left[index] = False
            yield sequence

    def _first_large(self) -> np.ndarray:
        """[n] bool: True for the first large prompt that waits, if there is any."""
        count = len(self._running)
        first = np.zeros(self._left.size, bool)
        large = self._left[count:] & (self._tokens[count:] > self.admission.small_tokens)
        places = large.nonzero()[0]
        if places.size:
            places += count
            first[places[self._key[places].argmin()]] = True
        return first
