"""The pages of all lanes and who holds them.

A page is known by one number, `lane * per_lane + page`. It is in one of three states: free; held,
by as many sequences as `refs` says; or cached, which means that nobody holds it but its block is
published and may be wanted again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np


class PageAllocator:
    """free + held + cached == per_lane on every lane, at all times."""

    def __init__(self, lanes: int, per_lane: int):
        self.lanes = lanes
        self.per_lane = per_lane
        self.refs = np.zeros(lanes * per_lane, np.int32)
        self.generation = np.zeros(lanes * per_lane, np.int32)  # how often a page has lost its key
        self.free = [
            list(range((lane + 1) * per_lane - 1, lane * per_lane - 1, -1)) for lane in range(lanes)
        ]
        # least recently used first
        self.cached: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(lanes)]
        self.page_of: dict[bytes, int] = {}
        self.key_of: dict[int, bytes] = {}

    def available(self) -> list[int]:
        """PageAllocator that can be had on each lane, free or by eviction."""
        return [len(free) + len(cached) for free, cached in zip(self.free, self.cached)]

    def allocate(self, lane: int) -> int:
        """A page of `lane`, held once: a free one, else the least recently used cached one. Errors:
        KeyError where there is neither."""
        if self.free[lane]:
            page = self.free[lane].pop()
        else:
            page, _ = self.cached[lane].popitem(last=False)
            self._lose_key(page)
        self.refs[page] = 1
        return page

    def ref(self, ids: np.ndarray) -> None:
        """One more holder for each of these published pages [n], all different."""
        for page in ids[self.refs[ids] == 0].tolist():
            del self.cached[page // self.per_lane][page]
        self.refs[ids] += 1

    def unref(self, pages: Sequence[int]) -> None:
        """One holder less for each page of a sequence, given in the order of its blocks: the
        deepest will be evicted first."""
        ids = np.asarray(pages, np.intp)[::-1]
        self.refs[ids] -= 1
        for page in ids[self.refs[ids] == 0].tolist():
            lane = page // self.per_lane
            if page in self.key_of:
                self.cached[lane][page] = None
            else:
                self.free[lane].append(page)

    def move(self, page: int, lane: int) -> int:
        """A page of `lane` in place of this one, which one sequence holds: it takes the key along,
        and frees the old one. Errors: KeyError where there is none."""
        assert self.refs[page] == 1, f"page {page} has {self.refs[page]} holders"
        new = self.allocate(lane)
        if key := self.key_of.get(page):
            self._lose_key(page)
            self.publish(new, key)
        self.unref([page])
        return new

    def publish(self, page: int, key: bytes) -> None:
        """The block with this key is on this held page. Where another page has it already, that one
        stays."""
        if key not in self.page_of:
            self.page_of[key] = page
            self.key_of[page] = key

    def retract(self, pages: Iterable[int]) -> None:
        """What is on these held pages must not be wanted again."""
        for page in pages:
            if page in self.key_of:
                self._lose_key(page)

    def flush(self) -> int:
        """Frees the pages that nobody holds; how many."""
        count = 0
        for free, cached in zip(self.free, self.cached):
            count += len(cached)
            for page in cached:
                self._lose_key(page)
            free.extend(cached)
            cached.clear()
        return count

    def _lose_key(self, page: int) -> None:
        del self.page_of[self.key_of.pop(page)]
        self.generation[page] += 1

    def check(self, holders: Iterable[int]) -> None:
        """`holders` names each page once for every sequence that holds it. Errors: AssertionError
        with what differs."""
        counted = Counter(holders)
        held = {page: int(self.refs[page]) for page in np.flatnonzero(self.refs).tolist()}
        assert held == counted, f"references {held} but holders {dict(counted)}"
        assert {page: key for key, page in self.page_of.items()} == self.key_of, (
            "published keys and pages differ"
        )
        for lane in range(self.lanes):
            own = range(lane * self.per_lane, (lane + 1) * self.per_lane)
            parts = self.free[lane], self.cached[lane], [page for page in held if page in own]
            count = " + ".join(str(len(part)) for part in parts)
            assert sorted(chain(*parts)) == list(own), (
                f"lane {lane}: free + cached + held = {count} are not the {self.per_lane} pages"
            )
            assert all(page in self.key_of for page in self.cached[lane]), (
                f"lane {lane}: a cached page has no key"
            )
            assert not any(page in self.key_of for page in self.free[lane]), (
                f"lane {lane}: a free page has a key"
            )
