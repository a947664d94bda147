"""The pages of all lanes: which are free, held or cached, and which block each of them has.

A page is known on the host by one number, `lane * per_lane + page on that lane`; the device knows
it by its lane and its number there.

A page is at any time exactly one of: free; held by sequences; cached, which is held by none, but
published: its block is kept until the room is needed. One page of a locked block is evicted after
all others of its lane, once its lock was given up (`locks`).

A published block lies on one page or on several, on any lanes: copies, each of which has its key.
The key is lost with the last of them.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxserve.cache.block_events import BlockEvents, Medium
from jaxserve.cache.chains import PrefixChains

COPIES_TRIED = 4  # least recently used pages of which one whose block has another is evicted first


class PageCounts(NamedTuple):
    """Numbers of pages by their state."""

    free: int
    cached: int
    held: int


class PageAllocator:
    """Allocates the pages of each lane, and finds published blocks by their keys.

    `refs` [pages] counts the sequences that hold a page. `generation` [pages] counts how often a
    page has lost its key: as long as it is the same, the page holds the block that it held.
    `with_key` has the pages of each published block, the oldest copy first, `key_of` the key of
    each of these pages, `copied` the keys of blocks on several pages. events: gets the keys that
    are lost; who publishes tells what is stored.
    """

    def __init__(self, lanes: int, per_lane: int, events: BlockEvents | None = None):
        self.lanes = lanes
        self.per_lane = per_lane
        self.refs = np.zeros(lanes * per_lane, np.int32)
        self.generation = np.zeros(lanes * per_lane, np.int32)
        # the last is allocated first: a new cache hands out ascending pages
        self.free = [list(reversed(self.pages_of(lane))) for lane in range(lanes)]
        # least recently used first
        self.cached: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(lanes)]
        # others, which no prefix reaches any more: see `PrefixChains`
        self.unreachable: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(lanes)]
        self.with_key: dict[bytes, tuple[int, ...]] = {}
        self.key_of: dict[int, bytes] = {}
        self.copied: set[bytes] = set()
        self.locks = Counter[bytes]()  # of each block
        # others: the first pages of locked blocks
        self.locked: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(lanes)]
        # one lane evicts the end of a chain before its beginning
        self._chains = PrefixChains(self.with_key) if lanes > 1 else None
        self._events = BlockEvents() if events is None else events
        # called with a page and the key of the block that is about to leave it
        self.on_evict: Callable[[int, bytes], None] | None = None
        # called with a lane of which only locked pages are left: has locks given up
        self.on_shortage: Callable[[int], object] | None = None

    def pages_of(self, lane: int) -> range:
        """Returns the numbers of a lane's pages."""
        return range(lane * self.per_lane, (lane + 1) * self.per_lane)

    def by_lane(self) -> list[PageCounts]:
        """Counts free, cached and held pages of each lane."""
        available = zip(self.free, self.available())
        return [
            PageCounts(len(free), count - len(free), self.per_lane - count)
            for free, count in available
        ]

    def available(self) -> list[int]:
        """Counts the pages that can be allocated on each lane: free ones, and cached ones by
        eviction, locked ones among them."""
        lanes = zip(self.free, self.cached, self.unreachable, self.locked)
        return [
            len(free) + len(cached) + len(behind) + len(locked)
            for free, cached, behind, locked in lanes
        ]

    def available_unlocked(self) -> list[int]:
        """Counts the pages that can be allocated on each lane while all locks stay."""
        lanes = zip(self.free, self.cached, self.unreachable)
        return [len(free) + len(cached) + len(behind) for free, cached, behind in lanes]

    def evictable(self, pages: np.ndarray) -> int:
        """Counts those of these pages [n] that are neither held nor locked: taking them makes that
        many fewer available to others."""
        if not len(pages):
            return 0
        idle = pages[self.refs[pages] == 0]
        if not self.locks:
            return len(idle)
        return sum(page not in self.locked[page // self.per_lane] for page in idle.tolist())

    def count_by_lane(self, pages: np.ndarray) -> np.ndarray:
        """Counts how many of these pages [n] each lane has [lanes]."""
        return np.bincount(pages // self.per_lane, minlength=self.lanes)

    def readable_by_lane(self, pages: np.ndarray) -> np.ndarray:
        """Counts on how many blocks of these pages [n] each lane has a page [lanes]: the pages
        themselves, or copies."""
        count = self.count_by_lane(pages)
        if self.copied:
            for page in pages.tolist():
                copies = self.copies(page)
                if len(copies) > 1:
                    others = {copy // self.per_lane for copy in copies} - {page // self.per_lane}
                    count[list(others)] += 1
        return count

    def copied_by_lane(self) -> list[int]:
        """Counts the pages of each lane whose block other pages have too."""
        several = [page for key in self.copied for page in self.with_key[key]]
        return self.count_by_lane(np.array(several, np.intp)).tolist()

    def copies(self, page: int) -> tuple[int, ...]:
        """Returns all pages of the block on this page; the page alone where its block has no
        key."""
        key = self.key_of.get(page)
        return (page,) if key is None else self.with_key[key]

    def on_lane(self, key: bytes, lane: int) -> int | None:
        """Returns the page of a lane that has the block with this key; None where none has."""
        pages = self.with_key.get(key, ())
        return next((page for page in pages if page // self.per_lane == lane), None)

    def allocate(self, lane: int) -> int:
        """Takes a page of `lane`, held once: a free one, else a cached one. Of these first those
        that no prefix reaches, then the least recently used, of the oldest few rather one whose
        block has another page; locked ones come last. Errors: KeyError where it has none."""
        if self.free[lane]:
            page = self.free[lane].pop()
        else:
            page = self._evict(lane)
            if self.on_evict is not None:
                self.on_evict(page, self.key_of[page])
            self._lose_key(page)
        self.refs[page] = 1
        return page

    def _evict(self, lane: int) -> int:
        """Takes a cached page of a lane out of those that can be evicted."""
        if self._chains is not None:
            self._chains.follow(self._requeue)
        cached = self.cached[lane]
        unreachable = self.unreachable[lane]
        if not cached and not unreachable and self.on_shortage is not None:
            self.on_shortage(lane)
        if unreachable:
            return unreachable.popitem()[0]  # the deepest
        if self.copied:
            for page in itertools.islice(cached, COPIES_TRIED):
                if self.key_of[page] in self.copied:
                    del cached[page]
                    return page
        return cached.popitem(last=False)[0]

    def _queue(self, page: int) -> OrderedDict[int, None]:
        """Returns the cached pages of which a published page that is not held is one."""
        lane = page // self.per_lane
        key = self.key_of[page]
        if key in self.locks and self.with_key[key][0] == page:
            return self.locked[lane]
        behind = self._chains is not None and key in self._chains.behind
        return (self.unreachable if behind else self.cached)[lane]

    def _requeue(self, key: bytes) -> None:
        """Moves the cached pages of a block to where they belong: it was locked or unlocked, or
        prefixes reach it again, or no more."""
        for page in self.with_key.get(key, ()):
            if not self.refs[page]:
                lane = page // self.per_lane
                self.cached[lane].pop(page, None)
                self.unreachable[lane].pop(page, None)
                self.locked[lane].pop(page, None)
                self._queue(page)[page] = None

    def lock(self, key: bytes) -> None:
        """Adds a lock to a block, which need not be here yet."""
        self.locks[key] += 1
        if self.locks[key] == 1:
            self._requeue(key)

    def unlock(self, key: bytes) -> None:
        """Takes a lock from a block; after the last one it counts as used just now."""
        self.locks[key] -= 1
        if not self.locks[key]:
            del self.locks[key]
            self._requeue(key)

    def ref(self, pages: np.ndarray) -> None:
        """Adds a holder to each of these published pages [n], all different."""
        for page in pages[self.refs[pages] == 0].tolist():
            del self._queue(page)[page]
        self.refs[pages] += 1

    def unref(self, pages: Sequence[int]) -> None:
        """Takes a holder from each page of a sequence, given in the order of its blocks. Pages that
        are not held then are cached if published, else free; the deepest is evicted first."""
        deepest_first = np.asarray(pages, np.intp)[::-1]
        self.refs[deepest_first] -= 1
        for page in deepest_first[self.refs[deepest_first] == 0].tolist():
            if page in self.key_of:
                self._queue(page)[page] = None
            else:
                self.free[page // self.per_lane].append(page)

    def demote(self, pages: Sequence[int]) -> None:
        """Has those of these pages that are cached, and not locked, evicted before others, the last
        one first."""
        for page in pages:
            cached = self.cached[page // self.per_lane]
            if page in cached:
                cached.move_to_end(page, last=False)

    def move(self, pages: Sequence[int], lane: int) -> list[int]:
        """Allocates pages of `lane` in place of these of one other lane, each of which one sequence
        holds: they take over the keys, and the old ones become free. Errors: KeyError where the
        lane has fewer."""
        new = [self.allocate(lane) for _ in pages]
        keyed = [page for page in pages if page in self.key_of]
        for page, target in zip(pages, new):
            key = self.key_of.pop(page, None)
            if key is not None:
                copies = self.with_key[key]
                self.with_key[key] = tuple(target if copy == page else copy for copy in copies)
                self.key_of[target] = key
        self.generation[keyed] += 1
        self.refs[pages] -= 1
        self.free[pages[0] // self.per_lane] += reversed(pages)
        return new

    def publish(self, page: int, key: bytes, parent: bytes | None = None) -> bool:
        """Lets the block on this held page be found by its key. Where another page has the key
        already, that one stays, and False is returned. parent: key of the block before it; None for
        the first of a sequence."""
        if key in self.with_key:
            return False
        if self._chains is not None:
            self._chains.add(key, parent)
        self.with_key[key] = (page,)
        self.key_of[page] = key
        return True

    def add_copy(self, page: int, key: bytes) -> None:
        """Lets a published block be found on this held page too, which has no key and, before it is
        read, has been given what the others hold."""
        self.with_key[key] += (page,)
        self.key_of[page] = key
        self.copied.add(key)

    def copy(self, page: int, lane: int) -> int:
        """Allocates a page of another lane for the block on a published page, cached and found by
        its key from now on. Returns it. Errors: KeyError where the lane has none available."""
        key = self.key_of[page]
        copy = self.allocate(lane)
        self.add_copy(copy, key)
        self.unref([copy])
        return copy

    def retract(self, pages: Iterable[int]) -> None:
        """Takes the keys from these pages and from all copies of their blocks, so that they are not
        found again."""
        published = [page for page in pages if page in self.key_of]
        for copy in dict.fromkeys(copy for page in published for copy in self.copies(page)):
            if not self.refs[copy]:
                del self._queue(copy)[copy]
                self.free[copy // self.per_lane].append(copy)
            self._lose_key(copy)

    def flush(self) -> int:
        """Frees all cached pages; returns how many."""
        freed = 0
        lost: list[bytes] = []
        for lane in range(self.lanes):
            for cached in (self.cached[lane], self.unreachable[lane], self.locked[lane]):
                keys = map(self._take_key, cached)
                lost += [key for key in keys if key is not None]
                self.free[lane].extend(cached)
                freed += len(cached)
                cached.clear()
        if lost and self.with_key:
            self._events.removed(lost, Medium.DEVICE)
        elif lost:
            self._events.cleared(Medium.DEVICE)
        return freed

    def _lose_key(self, page: int) -> None:
        """Takes the key from a page that has one."""
        key = self._take_key(page)
        if key is not None and self._events:
            self._events.removed((key,), Medium.DEVICE)

    def _take_key(self, page: int) -> bytes | None:
        """Takes the key from a page that has one, without an event; returns the key where it is
        lost by that, for this was the last page with it."""
        key = self.key_of.pop(page)
        self.generation[page] += 1
        copies = self.with_key.pop(key)
        if len(copies) > 1:
            self.with_key[key] = tuple(copy for copy in copies if copy != page)
            if len(copies) == 2:
                self.copied.remove(key)
            if key in self.locks:
                self._requeue(key)
            return None
        if self._chains is not None:
            self._chains.remove(key)
        return key

    def check(self, holders: Iterable[int]) -> None:
        """Compares with `holders`, which names each page once for every sequence that holds it.
        Errors: AssertionError with what differs."""
        counted = Counter(holders)
        held = {page: int(self.refs[page]) for page in np.flatnonzero(self.refs).tolist()}
        assert held == counted, f"references {held} but holders {dict(counted)}"
        published = [(page, key) for key, copies in self.with_key.items() for page in copies]
        assert dict(published) == self.key_of and len(published) == len(self.key_of), (
            "published keys and pages differ"
        )
        assert all(self.with_key.values()), "a key without a page"
        several = {key for key, copies in self.with_key.items() if len(copies) > 1}
        assert several == self.copied, "keys with several pages differ"
        for lane in range(self.lanes):
            self._check_lane(lane)

    def _check_lane(self, lane: int) -> None:
        free = self.free[lane]
        behind = self.unreachable[lane]
        locked = self.locked[lane]
        cached = [*self.cached[lane], *behind, *locked]
        held = [page for page in self.pages_of(lane) if self.refs[page]]
        assert sorted([*free, *cached, *held]) == list(self.pages_of(lane)), (
            f"lane {lane}: free {free}, cached {cached} and held {held} are not all pages"
        )
        assert all(page in self.key_of for page in cached), f"lane {lane}: a cached page has no key"
        assert not any(page in self.key_of for page in free), f"lane {lane}: a free page has a key"
        assert all((self._queue(page) is behind) == (page in behind) for page in cached), (
            f"lane {lane}: {list(behind)} are not those that no prefix reaches"
        )
        assert all((self._queue(page) is locked) == (page in locked) for page in cached), (
            f"lane {lane}: {list(locked)} are not the pages of locked blocks"
        )
