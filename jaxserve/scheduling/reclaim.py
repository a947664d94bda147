"""Takes slots and pages back from tenants that use more than their part of them, for one that uses
less than its own and goes before them.

What a tenant does not use others may use, so a tenant that sends much may hold all slots and pages
when another comes. A tenant's part is its share among the tenants that have requests. The youngest
sequence of the tenant that holds most for its share is preempted: it waits again, with its tokens.
The oldest of each tenant is left, so that each tenant goes on.
"""

from __future__ import annotations

import numpy as np

from jaxserve.cache import CacheManager
from jaxserve.scheduling.decode_reserve import DecodeReserve
from jaxserve.scheduling.sequence import NO_SLOT, Sequence
from jaxserve.scheduling.slots import DECODE, LEAVING, PREFILL, SlotTable


class Reclaim:
    """Preempts sequences of tenants above their part. Costs nothing while there is one tenant."""

    def __init__(self, slots: SlotTable, cache: CacheManager, growth: DecodeReserve):
        self._slots = slots
        self._cache = cache
        self._growth = growth
        self._shares = slots.shares
        self._lacking: dict[int, tuple[Sequence, int]] = {}  # by number of the sequence

    def lacks(self, sequence: Sequence, missing: int) -> None:
        """Notes that a waiting sequence lacks pages, for the next step."""
        if len(self._shares) > 1:
            self._lacking[sequence.number] = sequence, missing

    def make_way(self, limit: int) -> None:
        """Preempts sequences before a step for waiting ones that lack one of `limit` slots, or that
        lacked pages in the step before."""
        lacking, self._lacking = self._lacking, {}
        if len(self._shares) < 2 or not self._slots.queue:
            return
        self._give_slots(limit)
        for sequence, missing in lacking.values():
            if sequence.slot == NO_SLOT and sequence.number in self._slots.by_number:
                self._give_pages(sequence, missing)

    def _give_slots(self, limit: int) -> None:
        """Preempts sequences for the waiting prompts of tenants that hold less than their part of
        `limit` slots, as many as lack one."""
        slots = self._slots
        free = int(np.count_nonzero(slots.phase >= LEAVING)) + max(0, limit - slots.running)
        for number, waiting in self._waiting():
            left = int(self._slot_parts(limit)[number] - self._slots_held()[number])
            wanted = min(waiting, left) - free
            for _ in range(wanted):
                if not self._preempt(number, self._slots_held(), self._slot_parts(limit)):
                    break

    def _give_pages(self, sequence: Sequence, missing: int) -> None:
        """Preempts sequences until `missing` pages will come back for a waiting one, as far as
        there are others to preempt."""
        coming = int(self._pages()[self._slots.phase >= LEAVING].sum())
        while coming < missing:
            held = self._pages_held()
            pages = self._preempt(sequence.tenant, held, self._cache.usable * self._shares.parts)
            if not pages:
                break
            coming += pages

    def _waiting(self) -> list[tuple[int, int]]:
        """Numbers of tenants with waiting prompts, and how many these are, by turn."""
        counts = np.bincount(self._slots.queue.tenants)
        turns = self._shares.turns
        numbers = sorted(np.flatnonzero(counts).tolist(), key=lambda number: int(turns[number]))
        return [(number, int(counts[number])) for number in numbers]

    @property
    def _running(self) -> np.ndarray:
        phase = self._slots.phase
        return (phase == PREFILL) | (phase == DECODE)

    def _slots_held(self) -> np.ndarray:
        """Slots of each tenant, by number."""
        return self._by_tenant(self._running.astype(float))

    def _slot_parts(self, limit: int) -> np.ndarray:
        """The part of `limit` slots of each tenant, one at least, by number."""
        return np.maximum(np.floor(limit * self._shares.parts), 1)

    def _pages_held(self) -> np.ndarray:
        """Pages of each tenant, by number."""
        return self._by_tenant(np.where(self._running, self._pages(), 0))

    def _pages(self) -> np.ndarray:
        """Pages of each slot [slots], with those of the rest of its prompt and of what it is
        expected to put out; shared ones count in each."""
        cache = self._cache
        needs = cache.needs
        pages = cache.capacity // cache.block_size * needs.per_block + self._growth.by_slot()
        for sequence in self._slots.prefilling:
            pages[sequence.slot] += needs.left(cache.layouts[sequence.slot], sequence.prefill_len)
        return pages

    def _by_tenant(self, of_slots: np.ndarray) -> np.ndarray:
        return np.bincount(self._slots.tenant, of_slots, len(self._shares.turns))

    def _preempt(self, tenant: int, held: np.ndarray, parts: np.ndarray) -> int:
        """Preempts a sequence for a tenant, if that holds less than its part and another one more.
        Returns the pages that come back; 0 if no sequence can be preempted."""
        turns = self._shares.turns
        if held[tenant] >= parts[tenant]:
            return 0
        above = (held > parts) & (turns > turns[tenant])
        for number in np.argsort(-np.where(above, held / np.maximum(parts, 1e-9), 0.0)).tolist():
            if not above[number]:
                return 0
            victim = self._youngest(number)
            if victim is not None:
                pages = int(self._pages()[victim.slot])
                self._slots.withdraw(victim, LEAVING)
                return max(pages, 1)
        return 0

    def _youngest(self, tenant: int) -> Sequence | None:
        """Returns the youngest running sequence of a tenant; None where it is the only one."""
        slots = self._slots
        places = np.flatnonzero(self._running & (slots.tenant == tenant))
        if places.size < 2:
            return None
        return slots.by_slot[int(places[np.argmax(slots.number[places])])]
