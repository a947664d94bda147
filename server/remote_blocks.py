"""Blocks that are cached on a replica of another process, as it reports them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from jaxserve.cache.block_events import BlockEvents, BlockListener, Medium, StoredBlocks
from jaxserve.server import replica_pb2 as pb
from jaxserve.server.replica_messages import stored_of


class RemoteBlocks(BlockEvents):
    """The block events of a remote replica, without tokens. Listeners may subscribe on any thread;
    they are called on that of the replica, with all blocks when it answers again."""

    def __init__(self) -> None:
        super().__init__(self._known)
        self._lock = threading.RLock()
        # the block before each, and its salt
        self._blocks: dict[Medium, dict[bytes, tuple[bytes | None, str]]] = {
            medium: {} for medium in Medium
        }

    def __len__(self) -> int:
        """Blocks that are known to be there, on each medium."""
        return sum(map(len, self._blocks.values()))

    def subscribe(self, listener: BlockListener) -> None:
        with self._lock:
            super().subscribe(listener)

    def unsubscribe(self, listener: BlockListener) -> None:
        with self._lock:
            super().unsubscribe(listener)

    def take(self, change: pb.BlockChange) -> None:
        """Takes one change. Errors: ValueError for a medium of another version."""
        medium = Medium(change.medium)
        with self._lock:
            match change.WhichOneof("kind"):
                case "stored":
                    blocks = stored_of(change.stored, medium)
                    self._remember(blocks)
                    self.stored(blocks)
                case "removed":
                    for key in change.removed.keys:
                        self._blocks[medium].pop(key, None)
                    self.removed(tuple(change.removed.keys), medium)
                case "cleared":
                    self._blocks[medium].clear()
                    self.cleared(medium)

    def forget(self) -> None:
        """Tells the listeners that nothing is known any more."""
        with self._lock:
            for medium, blocks in self._blocks.items():
                if blocks:
                    blocks.clear()
                    self.cleared(medium)

    def _remember(self, blocks: StoredBlocks) -> None:
        parent = blocks.parent
        for key in blocks.keys:
            self._blocks[blocks.medium][key] = (parent, blocks.salt)
            parent = key

    def _known(self) -> Iterator[StoredBlocks]:
        for medium, blocks in self._blocks.items():
            for key, (parent, salt) in blocks.items():
                yield StoredBlocks((key,), medium, parent, salt=salt)
