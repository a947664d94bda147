"""Locks on cached blocks: of prompts that wait, and of leases.

A locked block is evicted only where a sequence that runs needs its page and no other can be had:
then the lock that is due last is given up, as a whole. Locks take a share of the pages, and of
the blocks in host memory, at most; where more are wanted, those that are due last are given up.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from jaxserve.cache.lower_blocks import LowerBlocks
from jaxserve.cache.pages import PageAllocator


class Lock(NamedTuple):
    """The blocks that one holder has locked, from the first of its prompt on. due: clock second;
    of all locks the one that is due last is given up first. order: of locks that are due together,
    the later one first. on_pages, below: keys of blocks on the devices and in tiers below them."""

    due: float
    order: int
    holder: Hashable
    on_pages: list[bytes]
    below: list[bytes]


class BlockLocks:
    """Locks by holder. most_pages, most_below: blocks that they take at most, each block counted
    once. `given_up` counts the locks that ended before their holders released them."""

    def __init__(self, pages: PageAllocator, below: LowerBlocks, most_pages: int, most_below: int):
        self.most_pages = most_pages
        self.most_below = most_below
        self.given_up = 0
        self._pages = pages
        self._lower = below
        self._locks: dict[Hashable, Lock] = {}
        self._by_due: list[tuple[float, int, Hashable]] = []  # sorted
        self._on_pages = Counter[bytes]()  # locks of each block
        self._below = Counter[bytes]()
        self._made = 0

    def __len__(self) -> int:
        """Number of blocks that are locked, on the devices and below."""
        return len(self._on_pages) + len(self._below)

    def holders(self) -> list[Hashable]:
        """Returns who has locked blocks."""
        return list(self._locks)

    def all(self) -> list[Lock]:
        """Returns all locks, in the order in which they were made."""
        return list(self._locks.values())

    def has_room(self, on_pages: Sequence[bytes], below: Sequence[bytes]) -> bool:
        """Returns whether these blocks can be locked without giving up others."""
        more = len(set(on_pages).difference(self._on_pages))
        more_below = len(set(below).difference(self._below))
        return (
            len(self._on_pages) + more <= self.most_pages
            and len(self._below) + more_below <= self.most_below
        )

    def lock(
        self, holder: Hashable, due: float, on_pages: Iterable[bytes], below: Sequence[bytes] = ()
    ) -> Lock:
        """Locks the first blocks of a prompt, as many as there is room for: those with a page, then
        those in tiers below. What the holder had locked before is released."""
        self.release(holder)
        self._made += 1
        made = Lock(due, self._made, holder, [], [])
        for key in on_pages:
            if not self._has_room(self._on_pages, key, self.most_pages, made):
                below = ()
                break
            self._count(self._on_pages, key)
            made.on_pages.append(key)
        for key in below:
            if not self._has_room(self._below, key, self.most_below, made):
                break
            self._count(self._below, key)
            made.below.append(key)
        if made.on_pages or made.below:
            self._locks[holder] = made
            insort(self._by_due, made[:3])
        return made

    def _has_room(self, counts: Counter[bytes], key: bytes, most: int, made: Lock) -> bool:
        """Returns whether one more block may be locked; later locks are given up for it."""
        while key not in counts and len(counts) >= most:
            if not (self._by_due and self._by_due[-1] > made[:3]):
                return False
            self._give_up(self._by_due[-1][-1])
        return True

    def _count(self, counts: Counter[bytes], key: bytes) -> None:
        counts[key] += 1
        if counts[key] == 1:
            self._place_of(counts).lock(key)

    def _uncount(self, counts: Counter[bytes], keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            counts[key] -= 1
            if not counts[key]:
                del counts[key]
                self._place_of(counts).unlock(key)

    def _place_of(self, counts: Counter[bytes]) -> PageAllocator | LowerBlocks:
        """Returns where the blocks are that these count."""
        return self._pages if counts is self._on_pages else self._lower

    def release(self, holder: Hashable) -> None:
        """Releases what a holder has locked; the deepest blocks are evicted first. Holders of
        nothing are ignored."""
        lock = self._locks.pop(holder, None)
        if lock is None:
            return
        self._by_due.remove(lock[:3])
        self._uncount(self._on_pages, lock.on_pages)
        self._uncount(self._below, lock.below)

    def release_due(self, now: float) -> None:
        """Releases the locks that were due at clock second `now` or before."""
        while self._by_due and self._by_due[0][0] <= now:
            self.release(self._by_due[0][-1])

    def clear(self) -> None:
        """Releases all locks."""
        for holder in list(self._locks):
            self.release(holder)

    # --- giving up

    def _give_up(self, holder: Hashable) -> None:
        self.given_up += 1
        self.release(holder)

    def give_up_later(self, due: float, but: Hashable = None) -> bool:
        """Gives up the lock that is due last, if that is after clock second `due`; never that of
        the holder `but`. Returns whether there was one."""
        for when, _, holder in reversed(self._by_due):
            if when <= due:
                return False
            if holder != but:
                self._give_up(holder)
                return True
        return False

    def make_room(self, lane: int) -> bool:
        """Gives up locks, the last due first, until a page of a lane can be evicted. Returns
        whether one can."""
        pages = self._pages
        for _, _, holder in reversed(self._by_due.copy()):
            locked = pages.locked[lane]
            keys = self._locks[holder].on_pages
            if any(page in locked for key in keys for page in pages.with_key.get(key, ())):
                self._give_up(holder)
            if pages.cached[lane] or pages.unreachable[lane]:
                return True
        return False

    def check(self) -> None:
        """Checks the invariants. Errors: AssertionError with what differs."""
        locks = self._locks.values()
        assert self._on_pages == Counter(key for lock in locks for key in lock.on_pages)
        assert self._below == Counter(key for lock in locks for key in lock.below)
        assert self._by_due == sorted(lock[:3] for lock in locks), "the order of locks differs"
        assert set(self._on_pages) <= set(self._pages.locks), "a block is not locked on its page"
        assert len(self._on_pages) <= self.most_pages, "more pages are locked than may be"
        assert len(self._below) <= self.most_below, "more blocks below are locked than may be"
