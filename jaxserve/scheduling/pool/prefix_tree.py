"""The tree of the prefixes that a cache can find, by the events of its blocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxserve.cache.block_events import Medium, StoredBlocks
from jaxserve.cache.published import PublishedBlocks


class PrefixNode(NamedTuple):
    """A published block: its key, that of the block before it (None: it begins a prefix, or that
    is not known), and the sequences that read it now."""

    key: bytes
    parent: bytes | None
    accesses: int


class PrefixTree:
    """The blocks that can be found on the devices, each below the one before it. It says which are
    read, and not where they lie."""

    def __init__(self, published: PublishedBlocks):
        self._pages = published.pages
        self._parents: dict[bytes, bytes | None] = {}
        self._children: dict[bytes | None, dict[bytes, None]] = defaultdict(dict)
        published.events.subscribe(self)

    def __len__(self) -> int:
        return len(self._parents)

    def __contains__(self, key: bytes) -> bool:
        return key in self._parents

    def node(self, key: bytes) -> PrefixNode:
        """Returns a block. Errors: KeyError where it cannot be found."""
        accesses = int(self._pages.refs[list(self._pages.with_key[key])].sum())
        return PrefixNode(key, self._parents[key], accesses)

    def children(self, key: bytes | None = None) -> list[PrefixNode]:
        """Returns the blocks that follow a block; those without one before them for None."""
        return [self.node(child) for child in self._children.get(key, ())]

    def walk(self) -> Iterator[PrefixNode]:
        """Yields all blocks, those nearer to a beginning first."""
        level = self.children()
        while level:
            yield from level
            level = [child for node in level for child in self.children(node.key)]

    # --- events

    def stored(self, blocks: StoredBlocks) -> None:
        """Adds blocks of the devices; those that come without tokens are of unknown prefixes."""
        if blocks.medium is not Medium.DEVICE:
            return
        parent = blocks.parent
        for key in blocks.keys:
            if key not in self._parents:
                self._parents[key] = parent
                self._children[parent][key] = None
            parent = None if blocks.tokens is None else key

    def removed(self, keys: Sequence[bytes], medium: Medium) -> None:
        """Removes blocks; what follows them is not walked to until they come again."""
        if medium is not Medium.DEVICE:
            return
        for key in keys:
            parent = self._parents.pop(key)
            siblings = self._children[parent]
            del siblings[key]
            if not siblings:
                del self._children[parent]

    def cleared(self, medium: Medium) -> None:
        """Removes all blocks."""
        if medium is Medium.DEVICE:
            self._parents.clear()
            self._children.clear()
