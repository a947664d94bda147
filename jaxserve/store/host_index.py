"""Index of the blocks of KV in host memory: which block is in which slot, and which leaves first.

Blocks that leave the devices come here, and leave again when their slot is needed, least recently
used first: first those that only pass through, on their way to another replica; then those without
a retention, and those whose time is over; then those to be kept (Mooncake, section 5.2: ephemeral
blocks are not stored, normal ones are LRU, those of a context cache stay for a time). Locked ones
stay. Keys and numbers only; time is an argument.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from typing import NamedTuple

from jaxserve.api.request import EPHEMERAL

# clock seconds until which blocks stay without a retention, and those that only pass through
NORMAL = 0.0
PASSING = -1.0
LOCKED_SHARE = 2  # blocks that are locked may take one of this number of slots
PREFETCHED_SHARE = 4  # prefetches under way may take one of this number of slots
MAX_OUTDATED = 64  # entries of a heap beside twice those that count


def kept_until(retention: int, now: float) -> float:
    """Returns the clock second until which a block of a retention (see `Request`) stays, that comes
    or is used at clock second `now`."""
    if retention == EPHEMERAL:
        return PASSING
    return now + retention if retention else NORMAL


class Placed(NamedTuple):
    """Place of a new block: its slot, and the block that makes room for it, if one does: its key,
    and the clock second until which it was to stay."""

    slot: int
    leaves: tuple[bytes, float] | None = None


class HostIndex:
    """The slots of host memory. A block is filled into its slot between `reserve` and `commit`;
    what is pinned stays.

    A block stays until a clock second (`until`): NORMAL, that of blocks without a retention,
    is over always; PASSING is that of blocks that only pass through, and before all others. Where
    blocks are asked for more than once the latest second counts. At most half of the slots are for
    blocks to be kept, so that there is room for others.
    """

    def __init__(self, slots: int):
        self._free = list(range(slots - 1, -1, -1))
        self._most_kept = max(slots // 2, 1)
        self._slot: dict[bytes, int] = {}
        self._until: dict[bytes, float] = {}
        self._pins: dict[bytes, int] = {}
        self._filling: set[bytes] = set()
        # least recently used first
        self._passing: OrderedDict[bytes, None] = OrderedDict()
        self._normal: OrderedDict[bytes, None] = OrderedDict()
        self._kept: OrderedDict[bytes, None] = OrderedDict()
        self._locked: OrderedDict[bytes, None] = OrderedDict()
        self._locks: set[bytes] = set()  # keys, also of blocks that are not here
        self._ends: list[tuple[float, bytes]] = []  # a heap of (until, key), some of them outdated

    def __contains__(self, key: bytes) -> bool:
        return key in self._slot

    def __len__(self) -> int:
        return len(self._slot)

    def whole(self) -> list[tuple[bytes, float]]:
        """Keys of the blocks that are whole and the seconds until which they stay, first those that
        would leave first."""
        return [
            (key, self._until[key])
            for key in (*self._passing, *self._normal, *self._kept, *self._locked)
            if key not in self._filling
        ]

    def reserve(self, key: bytes, now: float, until: float = NORMAL) -> Placed | None:
        """Gives a block a slot, to be filled; None where it has one, or where all slots are pinned
        or being filled."""
        if key in self._slot:
            self.keep(key, until)
            return None
        leaves = None
        if not self._free:
            leaving = self._victim(now)
            if leaving is None:
                return None
            leaves = leaving, self._until[leaving]
            self.forget(leaving)
        slot = self._free.pop()
        self._slot[key] = slot
        self._filling.add(key)
        self._enlist(key, until)
        return Placed(slot, leaves)

    def commit(self, key: bytes) -> None:
        """Notes that a block is in its slot."""
        self._filling.discard(key)

    def filling(self, key: bytes) -> bool:
        """Returns whether the block has a slot and is not in it yet."""
        return key in self._filling

    def pin(self, key: bytes, use: bool = True) -> int | None:
        """Keeps a block where it is until `unpin`; returns its slot, or None where it is not there
        or not whole yet. use: it counts as used just now."""
        if key not in self._slot or key in self._filling:
            return None
        self._pins[key] = self._pins.get(key, 0) + 1
        if use:
            self.touch(key)
        return self._slot[key]

    def unpin(self, key: bytes) -> None:
        self._pins[key] -= 1
        if not self._pins[key]:
            del self._pins[key]

    def lock(self, key: bytes) -> None:
        """Keeps a block where it is until `unlock`, from when it comes if it is not here."""
        self._set_lock(key, locked=True)

    def unlock(self, key: bytes) -> None:
        """Ends the lock of a block, which counts as used just now."""
        self._set_lock(key, locked=False)

    def _set_lock(self, key: bytes, locked: bool) -> None:
        until = self._until.get(key)
        if until is not None:
            del self._list(key)[key]
        if locked:
            self._locks.add(key)
        else:
            self._locks.discard(key)
        if until is not None:
            self._enlist(key, until)

    def touch(self, key: bytes) -> None:
        """Counts the block as used just now."""
        self._list(key).move_to_end(key)

    def keep(self, key: bytes, until: float) -> None:
        """Counts the block as used just now, and has it stay until then, if not for longer."""
        later = max(until, self._until[key])
        del self._list(key)[key]
        self._enlist(key, later)

    def forget(self, key: bytes) -> None:
        """Forgets a block, unless it is pinned or gone."""
        if key in self._pins or key not in self._slot:
            return
        self._free.append(self._slot.pop(key))
        self._filling.discard(key)
        del self._list(key)[key]
        del self._until[key]

    def _list(self, key: bytes) -> OrderedDict[bytes, None]:
        """The list that the block is on."""
        if key in self._locks:
            return self._locked
        until = self._until[key]
        if until == NORMAL:
            return self._normal
        return self._kept if until > NORMAL else self._passing

    def _enlist(self, key: bytes, until: float) -> None:
        previous = self._until.get(key)
        self._until[key] = until
        self._list(key)[key] = None
        if until > NORMAL and until != previous:
            self._note_end(key, until)
        if len(self._kept) > self._most_kept:
            self._end_keeping(next(iter(self._kept)))

    def _note_end(self, key: bytes, until: float) -> None:
        heapq.heappush(self._ends, (until, key))
        if len(self._ends) > 2 * len(self._slot) + MAX_OUTDATED:
            self._ends = [(end, kept) for kept, end in self._until.items() if end > NORMAL]
            heapq.heapify(self._ends)

    def _end_keeping(self, key: bytes) -> None:
        """Counts a block that was kept as a normal one, used just now."""
        del self._list(key)[key]
        self._enlist(key, NORMAL)

    def _end_times(self, now: float) -> None:
        """Ends the keeping of blocks whose time is over."""
        while self._ends and self._ends[0][0] <= now:
            until, key = heapq.heappop(self._ends)
            if self._until.get(key) == until:
                self._end_keeping(key)

    def _victim(self, now: float) -> bytes | None:
        self._end_times(now)
        blocks = itertools.chain(self._passing, self._normal, self._kept)
        return next((key for key in blocks if self._movable(key)), None)

    def _movable(self, key: bytes) -> bool:
        return key not in self._pins and key not in self._filling

    def check(self, slots: int) -> None:
        """Checks the invariants. Errors: AssertionError with what differs."""
        taken = sorted(self._slot.values())
        assert sorted(taken + self._free) == list(range(slots)), f"taken {taken}, {self._free}"
        listed = [*self._passing, *self._normal, *self._kept, *self._locked]
        assert sorted(listed) == sorted(self._slot), "the lists and the slots differ"
        assert set(self._until) == set(self._slot), "times of blocks that are not there"
        assert all(key in self._list(key) for key in listed), "a block is on a wrong list"
        ends = {key: until for key, until in self._until.items() if until > NORMAL}
        assert ends.items() <= {(key, until) for until, key in self._ends}, "an end is not known"
        assert len(self._ends) <= 2 * len(self._slot) + MAX_OUTDATED, "too many outdated ends"
        assert set(self._pins) <= set(self._slot) and self._filling <= set(self._slot)
