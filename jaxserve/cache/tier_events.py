"""Events of the tiers below a cache's devices, for the cache's listeners.

Tiers change on threads of their own, and listeners are called on the replica's. So changes wait
here until that thread publishes them, of each block the last one: what comes first, then what goes,
so that no listener believes a block to be gone that moved. A block that leaves its page for host
memory is published before it leaves (`coming`); where it does not come after all, that is a change
too. Without listeners nothing is noted.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from jaxserve.cache.block_events import BlockEvents, Medium, StoredBlocks

TIERS = (Medium.HOST, Medium.DISK)
MAX_WAITING = 2**16  # changes; where there are more, all that is there is compared


class TierEvents:
    """Changes of the tiers below one cache. keys: those of the blocks that a tier holds now."""

    def __init__(self, keys: Callable[[Medium], Iterable[bytes]]):
        self._keys = keys
        self._waiting: deque[tuple[Medium, bytes, bool]] = deque()
        self._outdated = False  # what waits is not all
        self._listened = False
        self._published: dict[Medium, set[bytes]] = {tier: set() for tier in TIERS}

    # --- any thread

    def changed(self, tier: Medium, key: bytes, held: bool) -> None:
        """Notes whether a tier holds a block now. To be called in the order of the changes; never
        waits."""
        if not self._listened:
            return
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append((tier, key, held))
        else:
            self._outdated = True

    def recheck(self) -> None:
        """Has the next `tell` compare what was published with what the tiers hold."""
        self._outdated = True

    # --- the thread that changes the cache

    def present(self) -> Iterator[StoredBlocks]:
        """Yields what listeners know so far, for one more of them."""
        if not self._listened:
            self._listened = True
            self._waiting.clear()
            for tier in TIERS:
                self._published[tier] = set(self._keys(tier))
        for tier, keys in self._published.items():
            if keys:
                yield StoredBlocks(list(keys), tier)

    def coming(self, key: bytes, events: BlockEvents) -> None:
        """Publishes that a block is about to leave its page, for host memory."""
        if self._listened and key not in self._published[Medium.HOST]:
            self._published[Medium.HOST].add(key)
            events.stored(StoredBlocks((key,), Medium.HOST))

    def tell(self, events: BlockEvents) -> None:
        """Publishes what has changed."""
        if not self._listened:
            return
        if not events:
            self._listened = False
        outdated, self._outdated = self._outdated, False
        last = {}  # change of each block
        for _ in range(len(self._waiting)):
            tier, key, held = self._waiting.popleft()
            last[tier, key] = held
        if outdated:
            last = dict(itertools.chain.from_iterable(map(self._differences, TIERS)))
        for came in (True, False):
            for tier in TIERS:
                known = self._published[tier]
                keys = [
                    key
                    for (of, key), held in last.items()
                    if of is tier and held is came and (key in known) is not came
                ]
                if keys:
                    self._publish(tier, keys, came, events)

    def _differences(self, tier: Medium) -> Iterator[tuple[tuple[Medium, bytes], bool]]:
        """Yields what listeners know wrongly of a tier."""
        keys = set(self._keys(tier))
        return (((tier, key), key in keys) for key in keys ^ self._published[tier])

    def _publish(
        self, tier: Medium, keys: Sequence[bytes], came: bool, events: BlockEvents
    ) -> None:
        if came:
            self._published[tier].update(keys)
            events.stored(StoredBlocks(keys, tier))
        else:
            self._published[tier].difference_update(keys)
            events.removed(keys, tier)
