"""Who is prefilled next: sequences that are partly prefilled and those that wait, as the policy ranks them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxserve.scheduling.admission import Admission
from jaxserve.scheduling.line import WORK, ranked
from jaxserve.scheduling.roster import Roster
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.slack import POLICIES, relative_slack


class Candidate(NamedTuple):
    """A sequence that may be prefilled next: seconds of prefill that are left, and its relative slack."""

    sequence: Sequence
    work: float
    slack: float


class Order:
    """The order of one step. Each candidate comes once; who cannot come in is left out."""

    def __init__(self, policy: str, now: float, roster: Roster, admission: Admission):
        self.admission = admission
        self._running, self._waiting = tuple(roster.prefilling), roster.queue.copy()
        fields = roster.facts()
        self._work, self._slack, self._key = fields[WORK], relative_slack(now, *fields), POLICIES[policy](now, *fields)
        self._left = np.ones(len(self._key), bool)

    def candidates(self, most: float = math.inf) -> Iterator[Candidate]:
        """Those that have not come yet, of at most so many seconds of work."""
        some = np.flatnonzero(self._left & (self._work <= most))
        count = len(self._running)
        runs = int(np.searchsorted(some, count))                     # candidates that have a slot
        for place in ranked(self._key[some]):
            index = int(some[place])
            if index < count:
                runs, sequence = runs - 1, self._running[index]
            elif self.admission.open or runs:
                sequence = self._waiting[index - count]
                if not self.admission.may(sequence):
                    continue
            else:
                return
            self._left[index] = False
            yield Candidate(sequence, float(self._work[index]), float(self._slack[index]))
