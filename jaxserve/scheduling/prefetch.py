"""Has the blocks that waiting prompts will hit brought from disk to host memory before the prompts
get their slots (Mooncake, section 5.2)."""

from __future__ import annotations

import numpy as np

from jaxserve.cache import CacheManager
from jaxserve.scheduling.policies import POLICIES
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.slots import SlotTable
from jaxserve.scheduling.waiting_queue import TOKENS

LOOK_SECONDS = 0.05  # between looks at the queue
LOOKED_AT = 4  # prompts at its head


class QueuePrefetch:
    """Looks at the head of the queue now and then, and at each prompt there once."""

    def __init__(self, cache: CacheManager, slots: SlotTable):
        self._cache = cache
        self._slots = slots
        self._next_look = 0.0  # clock second

    def look(self, policy: str, now: float) -> None:
        """Looks at the prompts that are next by the policy, if it is time to."""
        lower = self._cache.lower
        if lower is None or not lower.outlasts or not self._slots.queue or now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        for sequence in self._head(policy, now):
            if sequence.reads_cache and not sequence.prefetched:
                sequence.prefetched = True
                lower.prefetch(self._keys(sequence))

    def _head(self, policy: str, now: float) -> list[Sequence]:
        """The waiting prompts that come first."""
        slots = self._slots
        fields = slots.policy_fields()
        keys = POLICIES[policy](now, *fields[:TOKENS])[len(slots.prefilling) :]
        waiting = tuple(slots.queue.copy())
        return [waiting[index] for index in np.argsort(keys)[:LOOKED_AT]]

    def _keys(self, sequence: Sequence) -> list[bytes]:
        """Keys of its blocks in lower tiers, behind those that are on the devices."""
        cache = self._cache
        last = (sequence.prefill_len - 1) // cache.block_size
        sequence.prefix_match = cache.match(sequence.block_hashes, last, sequence.prefix_match)
        return cache.fetchable(sequence.block_hashes, len(sequence.prefix_match.pages), last)
