"""The blocks of KV on each replica, by medium: a shadow of what the replicas hold, for choosing
among them.

Each block key has a bit set of members. What a member holds is closed under prefixes, up to what it
evicts out of order: so the members that hold a chain's block b are among those that hold the
blocks before it, and one search over the chain, in steps that double, finds the depth of all
members at once. It asks for few keys, and a chain's keys are hashed as they are asked for.

The directory may be out of date: a replica knows best what it has, and computes what it lacks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Protocol

from jaxserve.cache.block_events import Medium, StoredBlocks


class Chain(Protocol):
    """Keys of the blocks of one prompt, by number."""

    def __getitem__(self, block: int, /) -> bytes: ...


class Directory:
    """Members by the keys of the blocks that they hold. Members are numbers from 0 on.

    It has no lock of its own.
    """

    def __init__(self) -> None:
        self._members: dict[Medium, dict[bytes, int]] = {}  # by medium: bit sets of members by key
        self._keys: dict[tuple[int, Medium], set[bytes]] = {}  # by member and medium

    def stored(self, member: int, keys: Iterable[bytes], medium: Medium = Medium.DEVICE) -> None:
        """Notes that a member holds these blocks on a medium."""
        members = self._members.setdefault(medium, {})
        stored_keys = self._keys.setdefault((member, medium), set())
        bit = 1 << member
        for key in keys:
            members[key] = members.get(key, 0) | bit
            stored_keys.add(key)

    def removed(self, member: int, keys: Iterable[bytes], medium: Medium = Medium.DEVICE) -> None:
        """Notes that a member lost these blocks from a medium; unknown ones are ignored."""
        members = self._members.get(medium, {})
        stored_keys = self._keys.get((member, medium), set())
        for key in keys:
            if key in stored_keys:
                stored_keys.discard(key)
                self._clear_bit(members, key, member)

    def cleared(self, member: int, medium: Medium | None = None) -> None:
        """Notes that a member holds nothing on a medium, or, without one, nothing at all."""
        for known in Medium if medium is None else (medium,):
            for key in self._keys.pop((member, known), ()):
                self._clear_bit(self._members[known], key, member)

    @staticmethod
    def _clear_bit(members: dict[bytes, int], key: bytes, member: int) -> None:
        others = members[key] & ~(1 << member)
        if others:
            members[key] = others
        else:
            del members[key]

    # --- questions

    def holders(self, key: bytes) -> int:
        """The members that hold a block on any medium, as a bit set."""
        mask = 0
        for members in self._members.values():
            mask |= members.get(key, 0)
        return mask

    def count(self, member: int) -> int:
        """Blocks that a member holds, once for each medium."""
        return sum(len(keys) for (holder, _), keys in self._keys.items() if holder == member)

    def __len__(self) -> int:
        """Blocks that any member holds, once for each medium."""
        return sum(len(members) for members in self._members.values())

    def prefix_blocks(self, chain: Chain, blocks: int, members: int) -> list[int]:
        """Returns how many of a chain's first `blocks` blocks each member holds [members]."""
        depths = [0] * members
        low = 0
        holding = (1 << members) - 1
        step = 1
        while low < blocks and holding:
            high = min(low + step, blocks)
            still = holding & self.holders(chain[high - 1])
            self._search(chain, low, holding, high, still, depths)
            low = high
            holding = still
            step *= 2
        _note(depths, holding, blocks)
        return depths

    def _search(
        self, chain: Chain, low: int, holding: int, high: int, still: int, depths: list[int]
    ) -> None:
        """Finds the depths of the members that hold `low` blocks (`holding`) and not `high`
        (`still` do)."""
        if holding == still:
            return
        if high - low == 1:
            _note(depths, holding & ~still, low)
            return
        middle = (low + high) // 2
        between = holding & self.holders(chain[middle - 1])
        # one that holds the end counts as holding the middle: chains have no gaps but by accident
        between |= still
        self._search(chain, low, holding, middle, between, depths)
        self._search(chain, middle, between, high, still, depths)


def _note(depths: list[int], members: int, blocks: int) -> None:
    """Sets the depth of each member of a bit set."""
    while members:
        lowest = members & -members
        depths[lowest.bit_length() - 1] = blocks
        members ^= lowest


class DirectoryFeed:
    """Tells a directory what one member says that it stores and loses; see
    `cache.block_events.BlockListener`. lock: held while the directory changes."""

    def __init__(self, directory: Directory, member: int, lock: threading.Lock):
        self._directory = directory
        self._member = member
        self._lock = lock
        self._closed = False

    def stored(self, blocks: StoredBlocks) -> None:
        with self._lock:
            if not self._closed:
                self._directory.stored(self._member, blocks.keys, blocks.medium)

    def removed(self, keys: Sequence[bytes], medium: Medium) -> None:
        with self._lock:
            if not self._closed:
                self._directory.removed(self._member, keys, medium)

    def cleared(self, medium: Medium) -> None:
        with self._lock:
            if not self._closed:
                self._directory.cleared(self._member, medium)

    def close(self) -> None:
        """Drops what the member has, and ignores what it reports from now on."""
        with self._lock:
            self._closed = True
            self._directory.cleared(self._member)
