"""Pages whose blocks are to be kept in lower tiers: they leave the devices, or another replica
wants them.

Such a page is read by the devices before the step that gives it to another block, so what is
pending must be taken with the next command. A page that was itself filled by what is pending, a
move or a new block, holds nothing yet: its block is not kept.

Each block has a retention, the strongest wish of the requests that used it (see `Request`). One
that is ephemeral is not kept when it leaves; where somebody elsewhere wants it, it passes through.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from jaxserve.api.batch import NO_STORES, PageStores
from jaxserve.api.request import EPHEMERAL, NORMAL_RETENTION
from jaxserve.cache.pages import PageAllocator


class PendingStores:
    """Stores since the last command, of evicted and of wanted blocks. pages: the allocator of the
    pages."""

    def __init__(self, pages: PageAllocator):
        self._pages = pages
        self._keys: dict[int, tuple[bytes, int]] = {}  # by page: block and its retention
        self._retention: dict[int, int] = {}  # by page, where it is not the normal one
        self._renewed: set[int] = set()  # pages whose content the next command changes
        self.wanted: Counter[bytes] = Counter()  # how often each block is wanted
        self.promised: set[bytes] = set()  # wanted ones that were on pages: they are on their way

    def __bool__(self) -> bool:
        """Returns whether anything is pending."""
        return bool(self._keys)

    def retain(self, page: int, retention: int) -> None:
        """Sets the retention of the block on a page."""
        if retention == NORMAL_RETENTION:
            self._retention.pop(page, None)
        else:
            self._retention[page] = retention

    def retain_longer(self, pages: Iterable[int], retention: int) -> None:
        """Raises the retention of the blocks on these pages, if it is less."""
        if not self._retention and retention <= NORMAL_RETENTION:
            return  # all are retained as long
        for page in pages:
            self.retain(page, max(retention, self.retention(page)))

    def retention(self, page: int) -> int:
        """Retention of the block on a page."""
        return self._retention.get(page, NORMAL_RETENTION)

    def evicted(self, page: int, key: bytes) -> bool:
        """Notes that a block is about to leave its page; returns whether it is kept."""
        return self.retention(page) != EPHEMERAL and self._add(page, key)

    def _add(self, page: int, key: bytes) -> bool:
        if page in self._renewed:
            return False
        self._keys[page] = key, self.retention(page)
        return True

    def want(self, keys: Iterable[bytes], kept: Callable[[bytes], bool]) -> None:
        """Has blocks kept, now where they are on pages, else once they are. kept: returns whether a
        block is in lower tiers already."""
        for key in keys:
            self.wanted[key] += 1
            copies = self._pages.with_key.get(key)
            if copies is not None and not kept(key):
                self._promise(copies[0], key)

    def unwant(self, keys: Iterable[bytes]) -> None:
        """Ends the wish of a call of `want`."""
        for key in keys:
            self.wanted[key] -= 1
            if self.wanted[key] <= 0:
                del self.wanted[key]
                self.promised.discard(key)

    def published(self, keys: Iterable[tuple[int, bytes]]) -> None:
        """Notes blocks, each with its page, that are on the devices by a command that was issued or
        is being made."""
        for page, key in keys:
            if key in self.wanted:
                self._promise(page, key)

    def _promise(self, page: int, key: bytes) -> None:
        self._add(page, key)
        self.promised.add(key)

    def drop(self, pages: Iterable[int]) -> None:
        """Forgets the blocks on these pages: they are not to be kept."""
        for page in pages:
            self._keys.pop(page, None)
            self._retention.pop(page, None)

    def renewed(self, page: int) -> None:
        """Notes that a page is given to another block by the next command."""
        self._renewed.add(page)
        self._retention.pop(page, None)

    def renewed_all(self, pages: Sequence[int]) -> None:
        """Does what `renewed` does for each of these pages."""
        self._renewed.update(pages)
        if self._retention:
            for page in pages:
                self._retention.pop(page, None)

    def moved(self, pages: Sequence[int], targets: Sequence[int]) -> None:
        """Notes that blocks move from these pages to the targets with the next command."""
        self._renewed.update(targets)
        if self._retention:
            for page, target in zip(pages, targets):
                self.retain(target, self.retention(page))

    def take(self) -> PageStores:
        """Returns the stores since the last call."""
        keys = self._keys
        self._keys = {}
        self._renewed.clear()
        return self._stores(keys)

    def all(self) -> PageStores:
        """Returns stores of all published blocks, as if all their pages were needed."""
        kept: dict[int, tuple[bytes, int]] = {}
        for key, copies in self._pages.with_key.items():
            page = max(copies, key=self.retention)
            if self.retention(page) != EPHEMERAL:
                kept[page] = key, self.retention(page)
        return self._stores(kept)

    def _stores(self, blocks: dict[int, tuple[bytes, int]]) -> PageStores:
        """blocks: by page, key and retention of the block on it."""
        if not blocks:
            return NO_STORES
        lanes, pages = divmod(np.fromiter(blocks, np.int32), self._pages.per_lane)
        retention = np.array([retention for _, retention in blocks.values()], np.int32)
        return PageStores(lanes, pages, retention, [key for key, _ in blocks.values()])
