"""Blocks in host memory by their keys: their bytes, which of them are whole, and which are coming.

A block that has left a device, or host memory for the disk, and is not put yet is expected: it
counts as held, and a reader waits for it. No lock is kept while bytes are copied or checked.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from jaxserve.cache.block_events import Medium
from jaxserve.cache.tier_events import TierEvents
from jaxserve.clock import Clock
from jaxserve.store.backing import BackingTiers
from jaxserve.store.filling import Filling
from jaxserve.store.host_index import HostIndex, Placed
from jaxserve.store.host_memory import HostBlocks
from jaxserve.store.tally import Bandwidth, Tally

HOST_BANDWIDTH = 2e9  # bytes per second that are assumed until something was read


class HostTier:
    """Blocks in host memory; those that make room for others go to the tiers `behind`. All methods
    may be called from any thread."""

    def __init__(
        self,
        blocks: HostBlocks,
        clock: Clock,
        tally: Tally,
        events: TierEvents,
        behind: BackingTiers,
    ):
        self.blocks = blocks
        self.bandwidth = Bandwidth(HOST_BANDWIDTH)
        self._clock = clock
        self._tally = tally
        self._events = events
        self._behind = behind
        self._index = HostIndex(blocks.slots)
        self._filling: dict[bytes, Filling] = {}
        self._expected: Counter[bytes] = Counter()  # how often each block is on its way
        # notified when a block was put, or was not
        self._changed = threading.Condition(threading.Lock())

    def __len__(self) -> int:
        """Number of slots that are taken."""
        return len(self._index)

    def __contains__(self, key: bytes) -> bool:
        """Returns whether the block is whole: it can be read without waiting."""
        return key in self._index and not self._index.filling(key)

    def holds(self, key: bytes) -> bool:
        """Returns whether the block is whole, being put or expected."""
        return key in self._index or key in self._expected

    def keys(self) -> list[bytes]:
        """Keys of the blocks that are whole."""
        with self._changed:
            return [key for key, _ in self._index.whole()]

    @property
    def expected(self) -> list[bytes]:
        """Keys of the blocks that are on their way."""
        with self._changed:
            return list(self._expected)

    # --- what comes

    def expect(self, keys: Iterable[bytes]) -> None:
        """Counts blocks as held until `settle` is called with them."""
        with self._changed:
            self._expected.update(keys)

    def settle(self, keys: Sequence[bytes]) -> None:
        """Ends the expectation of blocks: each was put, or never will be."""
        with self._changed:
            for key in keys:
                self._expected[key] -= 1
                if self._expected[key] <= 0:
                    del self._expected[key]
            self._note(keys)
            self._changed.notify_all()

    def put(self, key: bytes, fill: Callable[[np.ndarray], None], until: float) -> bool:
        """Stores a block that `fill` writes to the array [block_bytes] uint8 that it is given.
        until: see `HostIndex`. False where it is here already or there is no room. Errors: those of
        `fill`; then it is not stored."""
        filling = self.begin(key, until)
        if filling is None:
            return False
        try:
            fill(filling.view)
        except BaseException:
            self.abandon(filling)
            raise
        self.commit(filling)
        return True

    def begin(self, key: bytes, until: float) -> Filling | None:
        """Gives a block a slot, to be filled and then either committed or abandoned. until: see
        `HostIndex`. None where it is here already or there is no room."""
        with self._changed:
            placed = self._index.reserve(key, self._clock.now(), until)
            if placed is None:
                return None
            leaving = self._let_go(placed)
            filling = Filling(key, placed.slot, self.blocks.view(placed.slot))
            self._filling[key] = filling
        try:
            self._move_behind(placed)
        except BaseException:
            self.abandon(filling)
            raise
        finally:
            self.settle(leaving)
        return filling

    def grow(self, fillings: Sequence[Filling]) -> None:
        """Notes that the next part of each of these blocks is in its slot."""
        with self._changed:
            for filling in fillings:
                filling.parts += 1
            self._changed.notify_all()

    def commit(self, filling: Filling) -> None:
        """Notes that a block is whole."""
        self.blocks.seal(filling.slot, filling.key)
        with self._changed:
            del self._filling[filling.key]
            self._index.commit(filling.key)
            self._note([filling.key])
            self._tally.add("stored")
            self._changed.notify_all()

    def abandon(self, filling: Filling) -> None:
        """Gives the slot of a block away that will not be whole."""
        with self._changed:
            del self._filling[filling.key]
            self._index.forget(filling.key)
            self._note([filling.key])
            self._changed.notify_all()

    def _let_go(self, placed: Placed) -> list[bytes]:
        """Lists the block that leaves for the disk, if one does: it is expected until it is there.
        The caller holds the lock."""
        if placed.leaves is None:
            return []
        key, until = placed.leaves
        if not self._behind.takes(until):
            self._note([key])
            return []
        self._expected[key] += 1
        return [key]

    def _move_behind(self, placed: Placed) -> None:
        if placed.leaves is not None:
            key, until = placed.leaves
            block = functools.partial(self._verified, placed.slot, key)
            self._behind.keep(key, block, until)

    def _verified(self, slot: int, key: bytes) -> np.ndarray | None:
        """Returns the bytes of a block in its slot; None, and counts it, where they are not what
        was put."""
        if self.blocks.verify(slot, key):
            return self.blocks.view(slot)
        self._tally.add("wrong")
        return None

    def keep(self, keys: Sequence[bytes], until: float) -> None:
        """Has blocks stay until a clock second, if not for longer."""
        with self._changed:
            for key in keys:
                if key in self._index:
                    self._index.keep(key, until)

    def lock(self, key: bytes) -> None:
        """Has a block stay here until `unlock`."""
        with self._changed:
            self._index.lock(key)

    def unlock(self, key: bytes) -> None:
        """Ends the lock of a block."""
        with self._changed:
            self._index.unlock(key)

    # --- what is read

    def read(self, key: bytes, into: np.ndarray, use: bool = True) -> bool:
        """Copies a block; False where it is not whole, or not what was put: then it is forgotten.
        use: it counts as used."""
        began = self._clock.now()
        with self._changed:
            slot = self._index.pin(key, use)
        if slot is None:
            return False
        np.copyto(into, self.blocks.view(slot))
        right = self.blocks.verify(slot, key)
        with self._changed:
            self._index.unpin(key)
            if not right:
                self._tally.add("wrong")
                self._index.forget(key)
                self._note([key])
        if right:
            self.bandwidth.seen(into.nbytes, self._clock.now() - began)
        return right

    def read_part(self, key: bytes, number: int, part: Sequence[slice], into: np.ndarray) -> bool:
        """Copies part `number`, the bytes `part`, of a block that is being filled to the same bytes
        of `into`; False where the part is not there, and where the block is whole. What is copied
        is not checked."""
        with self._changed:
            filling = self._filling.get(key)
        if filling is None or filling.parts <= number:
            return False
        for some in part:
            into[some] = filling.view[some]
        return True

    def parts(self, key: bytes) -> int:
        """Counts the parts that are there of a block that is being filled; 0 for any other."""
        filling = self._filling.get(key)
        return 0 if filling is None else filling.parts

    def wait(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Waits until `ready`, which is asked again when a block was put or was not; False where
        that takes longer."""
        with self._changed:
            return self._changed.wait_for(ready, seconds)

    def keep_all_behind(self, patience: Callable[[], float]) -> None:
        """Keeps all whole blocks in the tiers behind. patience: returns the seconds to wait for the
        shared store."""
        with self._changed:
            blocks = self._index.whole()
        for key, until in blocks:
            with self._changed:
                slot = self._index.pin(key)
            if slot is None:
                continue
            block = functools.partial(self._verified, slot, key)
            self._behind.keep(key, block, until, patience())
            with self._changed:
                self._index.unpin(key)

    def _note(self, keys: Iterable[bytes]) -> None:
        """Notes for listeners which of these blocks are whole now. The caller holds the lock."""
        for key in keys:
            self._events.changed(Medium.HOST, key, key in self)

    def check(self) -> None:
        """Checks the invariants. Errors: AssertionError with what differs."""
        with self._changed:
            self._index.check(self.blocks.slots)
            for key in self._filling:
                assert self._index.filling(key), "a block is filled that has no slot"
