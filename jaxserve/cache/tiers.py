"""Which blocks of KV lie in host memory, the tier below the devices' pages.

Blocks that leave the devices come here, and leave again when their slot is needed: first those that
nobody asked to keep, least recently used first; then those whose time is over; then, least recently
used first, those to be kept (Mooncake, section 5.2: ephemeral blocks never get here, normal ones
are LRU, those of a context cache stay for a time). Keys and integers only; time is an argument.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from jaxserve.api.request import KvSource
from jaxserve.cache.hashes import KEY_BYTES

KEY_WORDS = KEY_BYTES // 4
# columns of a stored page: lane, page on the lane, seconds to keep its block, key as four int32
STORE_COLUMNS = 3 + KEY_WORDS


@dataclass(frozen=True, slots=True)
class TierCounts:
    """What came and went since the start, in blocks. prefetched: brought from disk to host memory
    for prompts that waited. wrong: whose bytes were not what was put."""

    stored: int = 0
    to_disk: int = 0
    host_reads: int = 0
    disk_reads: int = 0
    peer_reads: int = 0
    prefetched: int = 0
    missed: int = 0
    wrong: int = 0
    host_blocks: int = 0
    disk_blocks: int = 0


@dataclass(slots=True)
class Fetched:
    """What came from one other replica since the start, in blocks. source: its address. seconds:
    for which requests waited for it, all together."""

    source: str
    blocks: int = 0
    seconds: float = 0.0


class LowerTiers(Protocol):
    """What a replica asks of the tiers below its devices. block_bytes: of each block."""

    block_bytes: int

    def holds(self, key: bytes) -> bool:
        """Whether the block with this key is believed to be there."""

    def seconds(self, keys: Sequence[bytes]) -> float:
        """How long it should take to bring these blocks to the devices."""

    def prefetch(self, keys: Sequence[bytes]) -> None:
        """Has these blocks brought to the fastest of the tiers, as far as it has room for them
        beside others. Never waits."""

    def wait(self, key: bytes, seconds: float) -> bool:
        """Waits until a block is there, at most so long; whether it is."""

    def read(self, key: bytes, into: np.ndarray) -> bool:
        """Copies a block to `into` [block_bytes] uint8; False where it is not there."""

    def counts(self) -> TierCounts:
        """What came and went."""

    def fetched(self) -> list[Fetched]:
        """What came from each of the other replicas."""

    @property
    def outlasts(self) -> bool:
        """Whether what is there is there after a restart."""


class SourceBlocks(NamedTuple):
    """Blocks of a source of another block size that cover those of a fetch. keys: theirs. size:
    tokens of each. skip: tokens of the first one that come before the fetch's."""

    keys: list[bytes]
    size: int
    skip: int


class Fetch(NamedTuple):
    """Blocks to be brought from lower tiers to pages that a slot holds already.

    ticket: tells this fetch from all others. keys [n]: of the blocks, in the order of the sequence.
    places [n, 2] int32: lane and page of each. source: another replica, which is asked for what
    lower tiers do not hold; there: its blocks, where they are of another size.
    """

    ticket: int
    keys: list[bytes]
    places: np.ndarray
    source: KvSource | None = None
    there: SourceBlocks | None = None


class Placed(NamedTuple):
    """Where a block goes: its slot, and the key, with its clock second, of the block that makes
    room for it, if one does."""

    slot: int
    leaves: tuple[bytes, float] | None = None


class HostTier:
    """The slots of host memory. A block is filled into its slot between `reserve` and `commit`;
    what is pinned stays."""

    def __init__(self, slots: int):
        self._free = list(range(slots - 1, -1, -1))
        self._slot: dict[bytes, int] = {}
        self._keep_until: dict[bytes, float] = {}  # of blocks to be kept, clock seconds
        self._pins: dict[bytes, int] = {}
        self._filling: set[bytes] = set()
        # least recently used first
        self._normal: OrderedDict[bytes, None] = OrderedDict()
        self._kept: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._slot

    def __len__(self) -> int:
        return len(self._slot)

    def whole(self) -> list[bytes]:
        """Keys of the blocks that are whole, least recently used first."""
        return [key for key in (*self._normal, *self._kept) if key not in self._filling]

    def reserve(self, key: bytes, now: float, keep_until: float = 0.0) -> Placed | None:
        """Gives the block a slot, to be filled; None where it has one, or where all slots are
        pinned or being filled. keep_until: clock second until which it should stay."""
        if key in self._slot:
            self.touch(key, keep_until)
            return None
        leaves = None
        if not self._free:
            leaving = self._victim(now)
            if leaving is None:
                return None
            leaves = leaving, self._keep_until.get(leaving, 0.0)
            self.forget(leaving)
        slot = self._free.pop()
        self._slot[key] = slot
        self._filling.add(key)
        self._enlist(key, keep_until)
        return Placed(slot, leaves)

    def commit(self, key: bytes) -> None:
        """The block is in its slot now."""
        self._filling.discard(key)

    def filling(self, key: bytes) -> bool:
        """Whether the block has a slot and is not in it yet."""
        return key in self._filling

    def pin(self, key: bytes) -> int | None:
        """Keeps a block where it is until `unpin`; returns its slot, or None where it is not there
        or not whole yet."""
        if key not in self._slot or key in self._filling:
            return None
        self._pins[key] = self._pins.get(key, 0) + 1
        self.touch(key)
        return self._slot[key]

    def unpin(self, key: bytes) -> None:
        self._pins[key] -= 1
        if not self._pins[key]:
            del self._pins[key]

    def touch(self, key: bytes, keep_until: float = 0.0) -> None:
        """Counts the block as used just now."""
        until = max(keep_until, self._keep_until.get(key, 0.0))
        self._normal.pop(key, None)
        self._kept.pop(key, None)
        self._enlist(key, until)

    def forget(self, key: bytes) -> None:
        """Forgets a block, unless it is pinned or gone."""
        if key in self._pins or key not in self._slot:
            return
        self._free.append(self._slot.pop(key))
        self._filling.discard(key)
        self._keep_until.pop(key, None)
        self._normal.pop(key, None)
        self._kept.pop(key, None)

    def _enlist(self, key: bytes, keep_until: float) -> None:
        if keep_until:
            self._keep_until[key] = keep_until
            self._kept[key] = None
        else:
            self._normal[key] = None

    def _victim(self, now: float) -> bytes | None:
        for key in self._normal:
            if self._movable(key):
                return key
        kept = [key for key in self._kept if self._movable(key)]
        over = (key for key in kept if self._keep_until[key] <= now)
        return next(over, kept[0] if kept else None)

    def _movable(self, key: bytes) -> bool:
        return key not in self._pins and key not in self._filling

    def check(self, slots: int) -> None:
        """Errors: AssertionError with what differs."""
        taken = sorted(self._slot.values())
        assert sorted(taken + self._free) == list(range(slots)), f"taken {taken}, {self._free}"
        listed = list(self._normal) + list(self._kept)
        assert sorted(listed) == sorted(self._slot), "the lists and the slots differ"
        assert set(self._keep_until) == set(self._kept), "times of blocks that are not kept"
        assert set(self._pins) <= set(self._slot) and self._filling <= set(self._slot)


def key_words(key: bytes) -> np.ndarray:
    """A key as int32 [KEY_WORDS]."""
    return np.frombuffer(key, "<i4")


def key_of(words: np.ndarray) -> bytes:
    """The key of its int32 words."""
    return words.astype("<i4").tobytes()
