"""What the tiers below a cache's devices hold, told to the cache's listeners.

Tiers change on threads of their own, and listeners hear on the replica's. So changes wait here
until that thread has them told, of each block the last one: what comes first, then what goes, so
that no listener believes a block to be nowhere that moved. A block that leaves its page for host
memory is told of before it leaves (`coming`); where it does not come after all, that is a change
too. Where nobody listens nothing is noted.
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
        self._heard = False  # somebody listens
        self._told: dict[Medium, set[bytes]] = {tier: set() for tier in TIERS}

    # --- any thread

    def changed(self, tier: Medium, key: bytes, there: bool) -> None:
        """Whether a tier holds a block now. To be called in the order of the changes; never
        waits."""
        if not self._heard:
            return
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append((tier, key, there))
        else:
            self._outdated = True

    def recheck(self) -> None:
        """Compares, with the next `tell`, what was told with what is there."""
        self._outdated = True

    # --- the thread that changes the cache

    def present(self) -> Iterator[StoredBlocks]:
        """What listeners know so far, for one more of them."""
        if not self._heard:
            self._heard = True
            self._waiting.clear()
            for tier in TIERS:
                self._told[tier] = set(self._keys(tier))
        for tier, keys in self._told.items():
            if keys:
                yield StoredBlocks(list(keys), tier)

    def coming(self, key: bytes, events: BlockEvents) -> None:
        """A block is about to leave its page, for host memory."""
        if self._heard and key not in self._told[Medium.HOST]:
            self._told[Medium.HOST].add(key)
            events.stored(StoredBlocks((key,), Medium.HOST))

    def tell(self, events: BlockEvents) -> None:
        """Tells what has changed."""
        if not self._heard:
            return
        if not events:
            self._heard = False
        outdated, self._outdated = self._outdated, False
        last = {}  # what is last said of each block
        for _ in range(len(self._waiting)):
            tier, key, there = self._waiting.popleft()
            last[tier, key] = there
        if outdated:
            last = dict(itertools.chain.from_iterable(map(self._differences, TIERS)))
        for there in (True, False):
            for tier in TIERS:
                told = self._told[tier]
                keys = [
                    key
                    for (of, key), state in last.items()
                    if of is tier and state is there and (key in told) is not there
                ]
                if keys:
                    self._tell(tier, keys, there, events)

    def _differences(self, tier: Medium) -> Iterator[tuple[tuple[Medium, bytes], bool]]:
        """What was told wrongly of a tier."""
        there = set(self._keys(tier))
        return (((tier, key), key in there) for key in there ^ self._told[tier])

    def _tell(self, tier: Medium, keys: Sequence[bytes], there: bool, events: BlockEvents) -> None:
        if there:
            self._told[tier].update(keys)
            events.stored(StoredBlocks(keys, tier))
        else:
            self._told[tier].difference_update(keys)
            events.removed(keys, tier)
