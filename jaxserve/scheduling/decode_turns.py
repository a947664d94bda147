"""Has decodes of tenants that used more than their share wait for prompts of others.

A step with many decodes of one tenant leaves little time to the prompts of another, whose turn is
earlier. So these decodes are left out of steps with such prompts, as long as these get on: after a
step that had none of them, for want of a slot, pages or blocks that are fetched, no decode waits.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jaxserve.scheduling.prefill_step import PrefillChunk
from jaxserve.scheduling.slots import SlotTable

LAST_TURN = 2**62


class DecodeTurns:
    """Chooses the decodes that go in a step. Costs nothing while there is one tenant."""

    def __init__(self, slots: SlotTable):
        self._slots = slots
        self._lead = LAST_TURN  # the earliest turn of prompts
        self._newest = -1  # number of the last of its prompts
        self._stuck = -1  # the same of a step that had none of these prompts

    def begin(self) -> None:
        """Begins a step: decodes wait whose tenants' turns are later than that of a prompt."""
        slots = self._slots
        self._lead = LAST_TURN
        if len(slots.shares) < 2:
            return
        tenants = np.array([one.tenant for one in slots.prefilling], np.intp)
        turns = slots.shares.turns[np.append(tenants, slots.queue.tenants)]
        if turns.size:
            self._lead = int(turns.min())
            last = int(np.flatnonzero(turns == self._lead)[-1]) - tenants.size
            # both are by age
            youngest = slots.prefilling[last] if last < 0 else slots.queue[last]
            self._newest = youngest.number

    @property
    def all_in_debt(self) -> bool:
        """True if there are prompts, and all of tenants that have used more than their share."""
        return 0 < self._lead < LAST_TURN

    def going(self, decodes: np.ndarray) -> np.ndarray:
        """Returns those of the slots [n] of decodes that do not wait."""
        if self._lead == LAST_TURN or self._newest <= self._stuck:
            return decodes
        return decodes[self._slots.shares.turns[self._slots.tenant[decodes]] <= self._lead]

    def end(self, chunks: Iterable[PrefillChunk]) -> None:
        """Notes the step's prefill chunks."""
        if self._lead == LAST_TURN:
            return
        turns = self._slots.shares.turns
        tenant = self._slots.tenant
        if not all(turns[tenant[chunk.slot]] > self._lead for chunk in chunks):
            self._stuck = -1
        elif not self._slots.draining:  # else slots and pages may be on their way to them
            self._stuck = self._newest
