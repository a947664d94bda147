"""Has the blocks that waiting prompts will hit brought to host memory before the prompts get their
slots (Mooncake, section 5.2): from disk while others run, and from a store that replicas share,
which a prompt waits for as long as it takes to learn what is there."""

from __future__ import annotations

import numpy as np

from jaxserve.cache import CacheManager
from jaxserve.cache.prefix_match import BlockPage
from jaxserve.cache.tiers import LowerTiers
from jaxserve.policies import Policy
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.slots import SlotTable

LOOK_SECONDS = 0.05  # between looks at the queue
LOOKED_AT = 4  # prompts at its head
LOOKUP_SECONDS = 0.05  # that a prompt waits for what a shared store has


class QueuePrefetch:
    """Looks at the head of the queue now and then, and at each prompt there once."""

    def __init__(self, cache: CacheManager, slots: SlotTable):
        self._cache = cache
        self._slots = slots
        self._next_look = 0.0  # clock second

    def look(self, policy: Policy, now: float) -> None:
        """Looks at the prompts that are next by the policy, if it is time to."""
        lower = self._cache.lower
        if lower is None or not lower.outlasts or not self._slots.queue or now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        for sequence in self._head(policy, now):
            if sequence.reads_cache:
                self._ask(lower, sequence, now)

    def waits(self, sequence: Sequence, now: float) -> bool:
        """Asks a shared store for a prompt's blocks; returns whether it should wait for the
        answer."""
        lower = self._cache.lower
        if lower is None or not lower.shared or not sequence.reads_cache:
            return False
        if sequence.request.kv_source is not None:  # another replica has its blocks
            return False
        self._ask(lower, sequence, now)
        assert sequence.lookup is not None
        return not sequence.lookup.answered and now < sequence.lookup_until

    def _head(self, policy: Policy, now: float) -> list[Sequence]:
        """Returns the waiting prompts that come first."""
        slots = self._slots
        keys = policy.order(slots.prompts(now))[len(slots.prefilling) :]
        waiting = tuple(slots.queue.copy())
        return [waiting[index] for index in np.argsort(keys)[:LOOKED_AT]]

    def _ask(self, lower: LowerTiers, sequence: Sequence, now: float) -> None:
        if sequence.lookup is None:
            sequence.lookup = lower.prefetch(self._keys(lower, sequence))
            sequence.lookup_until = now + LOOKUP_SECONDS

    def _keys(self, lower: LowerTiers, sequence: Sequence) -> list[bytes]:
        """Returns keys of its blocks that lower tiers may have, behind those that are on the
        devices."""
        cache = self._cache
        hashes = sequence.block_hashes
        last = (sequence.prefill_len - 1) // cache.block_size
        sequence.prefix_match = cache.match(hashes, last, sequence.prefix_match)
        prefix = cache.published.reachable(hashes, last, sequence.prefix_match.pages)
        keys = prefix.keys(hashes)
        if not lower.shared:
            return keys
        # with the pages of all groups: it is not known where what a store has will end
        more = range(prefix.blocks, min(last, prefix.blocks + lower.prefetch_room))
        groups = range(cache.needs.per_block)
        return [*keys, *(BlockPage(block, group).key(hashes) for block in more for group in groups)]
