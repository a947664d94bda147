"""Ranks the sequences that can be prefilled in a step: partly prefilled ones and waiting ones, by
the policy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxserve.policies import Policy
from jaxserve.scheduling.budget import SHARER_WORK_RATIO, size_class
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

    def sharers(self, long: Sequence, step: float) -> Iterator[Sequence]:
        """Sequences that have not come yet and may share the steps of a `long` prompt, which take
        `step` seconds: much shorter ones, and of these the much shorter first, as each leaves most
        of its steps to those; the first large prompt that waits, since it may claim pages; none of
        tenants whose turns are after its own."""
        most = SHARER_WORK_RATIO * long.prefill_seconds_left
        chosen = self._left & (self._work <= most) | self._first_large()
        if self._turn.size:
            chosen &= self._turn <= self.turn(long)
        key = self._key
        if most > step:
            size = size_class(self._work, step)
            key = np.empty(size.size)
            key[np.lexsort((self._key, size))] = np.arange(size.size)
        return self._in_order(chosen, key)

    def ranked(self) -> Iterator[Sequence]:
        """Sequences that have not come yet."""
        return self._in_order(self._left, self._key)

    def _in_order(self, chosen: np.ndarray, key: np.ndarray) -> Iterator[Sequence]:
        """Yields chosen sequences [n] by their key [n]."""
        count = len(self._running)
        if not (self.admission.open or np.count_nonzero(self._left[:count])):
            return
        indices = chosen.nonzero()[0]
        running_left = np.count_nonzero(chosen[:count])
        for place in smallest_first(key[indices]):
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
