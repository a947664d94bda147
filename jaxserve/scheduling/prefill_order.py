"""Who is prefilled next: sequences that are partly prefilled and those that wait, as the policy
ranks them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from jaxserve.scheduling.page_admission import PageAdmission
from jaxserve.scheduling.policies import POLICIES
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.slots import SlotTable
from jaxserve.scheduling.waiting_queue import TOKENS, WORK, ranked


class PrefillOrder:
    """The order of one step. Each candidate comes once; who cannot come in is left out."""

    def __init__(self, policy: str, now: float, slots: SlotTable, admission: PageAdmission):
        self.admission = admission
        self._running = tuple(slots.prefilling)
        self._waiting = slots.queue.copy()
        fields = slots.policy_fields()
        self._work = fields[WORK]
        self._tokens = fields[TOKENS]
        self._key = POLICIES[policy](now, *fields[:TOKENS])
        self._left = np.ones(self._key.size, bool)

    def ranked(self, most: float = math.inf) -> Iterator[Sequence]:
        """Those that have not come yet, of at most so many seconds of work, and the first large
        prompt that waits: it may claim pages."""
        some = (
            self._left
            if most == math.inf
            else self._left & (self._work <= most) | self._first_large()
        ).nonzero()[0]
        count = len(self._running)
        runs = int(np.searchsorted(some, count))  # candidates that have a slot
        for place in ranked(self._key[some]):
            index = int(some[place])
            if index < count:
                runs = runs - 1
                sequence = self._running[index]
            elif self.admission.open or runs:
                sequence = self._waiting[index - count]
                if not self.admission.may(sequence):
                    continue
            else:
                return
            self._left[index] = False
            yield sequence

    def _first_large(self) -> np.ndarray:
        """Where it is: [n] bool."""
        large = self._left & (self._tokens > self.admission.small_tokens)
        large[: len(self._running)] = False
        out = np.zeros_like(large)
        if large.any():
            out[np.argmin(np.where(large, self._key, math.inf))] = True
        return out
