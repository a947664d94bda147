"""Knows which published blocks lie behind a hole: a block before them, in every sequence that has
them, is published no more, so that no prefix reaches them until it is again."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator

STEP = 8  # blocks whose followers are looked at with each block that leaves


class PrefixChains:
    """The published blocks as a prefix tree, by their keys.

    published: those that are found on pages. `behind`: those of them behind a hole, as far as this
    has been followed: a few blocks further with each call of `follow`, so that no call takes long,
    however large the tree.
    """

    def __init__(self, published: Container[bytes]):
        self.behind: set[bytes] = set()
        self._published = published
        self._parent: dict[bytes, bytes] = {}
        # most blocks have one follower: only further ones have a set
        self._first: dict[bytes, bytes] = {}
        self._others: dict[bytes, set[bytes]] = {}
        self._changed: list[bytes] = []  # whose followers are to be looked at

    def add(self, key: bytes, parent: bytes | None) -> None:
        """Adds a block that is published from now on. parent: the block before it; None for the
        first of a sequence."""
        if parent is not None:
            self._parent[key] = parent
            if self._first.setdefault(parent, key) != key:
                self._others.setdefault(parent, set()).add(key)
            if parent not in self._published or parent in self.behind:
                self.behind.add(key)
        if key in self._first:
            self._changed.append(key)

    def remove(self, key: bytes) -> None:
        """Removes a block that is published no more."""
        self.behind.discard(key)
        if key in self._first:
            self._changed.append(key)
        parent = self._parent.pop(key, None)
        if parent is None:
            return
        others = self._others.get(parent)
        if self._first[parent] != key:
            assert others is not None
            others.discard(key)
        elif others:
            self._first[parent] = others.pop()
        else:
            del self._first[parent]
        if others is not None and not others:
            del self._others[parent]

    def clear(self) -> None:
        """Removes all blocks."""
        for each in (self.behind, self._parent, self._first, self._others, self._changed):
            each.clear()

    def _followers(self, key: bytes) -> Iterator[bytes]:
        if key in self._first:
            yield self._first[key]
            yield from self._others.get(key, ())

    def follow(self, changed: Callable[[bytes], None], steps: int = STEP) -> None:
        """Looks at the followers of some blocks that were added or removed; calls `changed` for
        each that is behind a hole from now on, or no more."""
        for _ in range(steps):
            if not self._changed:
                return
            key = self._changed.pop()
            hole = key not in self._published or key in self.behind
            for follower in self._followers(key):
                if (follower in self.behind) == hole:
                    continue
                if hole:
                    self.behind.add(follower)
                else:
                    self.behind.discard(follower)
                changed(follower)
                self._changed.append(follower)
