"""KV events in vLLM's form, made of what a cache tells: what other people's routers (llm-d, Dynamo)
read to know which replica has which prefix.

The cache's thread writes into a `KvEventLog` and never waits; another thread takes the events out
and sends them (`observe.kv_event_publisher`). Where that thread falls behind, the log drops what
waits and resends all blocks after an AllBlocksCleared, so that routers are late but never wrong for
long. For this the log keeps the tokens of all blocks that can be found.

Source: vLLM's vllm/distributed/kv_events.py (maps with a `type`, since May 2026). Routers hash the
tokens themselves and use our hashes only to tell blocks apart.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxserve.api.request import adapter_name, split_key_salt
from jaxserve.cache.block_events import Medium, StoredBlocks

KvEvent = dict[str, Any]
MAX_WAITING = 1 << 16  # blocks of changes that were not taken yet, and changes
MAX_BATCH = 1 << 12  # the same, of events that are sent at once: some 300 KB
HASH_BYTES = 8
MEDIA = {Medium.DEVICE: "GPU", Medium.HOST: "CPU", Medium.DISK: "STORAGE"}  # vLLM's names
log = logging.getLogger(__name__)


def block_hash(key: bytes) -> int:
    """The number by which routers know a block: the last 8 bytes of its key, signed."""
    return int.from_bytes(key[-HASH_BYTES:], "big", signed=True)


def block_stored(blocks: StoredBlocks, block_size: int) -> KvEvent:
    """The event of blocks with their tokens. The salt stands where each reader looks for it: with
    the first block of a prompt for vLLM's, and in a field `cache_salt` of every event for Dynamo's
    (lib/kv-router/src/zmq_wire), which hashes the salt with each block; the adapter's name stands
    with each block of its own."""
    assert blocks.tokens is not None
    adapter, salt = split_key_salt(blocks.salt)
    name = adapter_name(adapter) or None
    own = None if name is None else [name]
    extra_keys: list[list[str] | None] = [own] * len(blocks.keys)
    salted: KvEvent = {}
    if salt:
        salted["cache_salt"] = salt
        if blocks.parent is None:
            extra_keys[0] = [*(own or []), salt]
    return {
        "type": "BlockStored",
        "block_hashes": [block_hash(key) for key in blocks.keys],
        "parent_block_hash": None if blocks.parent is None else block_hash(blocks.parent),
        "token_ids": blocks.tokens.tolist(),
        "block_size": block_size,
        "lora_id": None,
        "medium": MEDIA[blocks.medium],
        "lora_name": name,
        "extra_keys": extra_keys,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        **salted,
    }


def block_removed(keys: Iterable[bytes], medium: Medium) -> KvEvent:
    return {
        "type": "BlockRemoved",
        "block_hashes": [block_hash(key) for key in keys],
        "medium": MEDIA[medium],
        "group_idx": 0,
    }


def all_blocks_cleared() -> KvEvent:
    return {"type": "AllBlocksCleared"}


class KnownBlock(NamedTuple):
    """The contents of a block's event. tokens: int32 as bytes."""

    parent: bytes | None
    tokens: bytes
    salt: str


class Removed(NamedTuple):
    """Blocks that are no longer on a medium."""

    keys: Sequence[bytes]
    medium: Medium


class Cleared(NamedTuple):
    """No block is left anywhere."""

    keys: Sequence[bytes] = ()


Change = StoredBlocks | Removed | Cleared


class KvEventLog:
    """Takes what a cache tells (a `BlockListener`), and gives it as KV events.

    The cache's thread is the only one that writes, another the only one that calls `take`; neither
    waits for the other. `changed` is set when there is something to take. `overflows` counts how
    often all had to be resent.
    """

    def __init__(self, block_size: int, max_waiting: int = MAX_WAITING):
        self.changed = threading.Event()
        self.overflows = 0
        self._block_size = block_size
        self._max_waiting = max_waiting
        self._known: dict[bytes, KnownBlock] = {}
        self._on: dict[Medium, set[bytes]] = {medium: set() for medium in Medium}
        self._waiting: deque[Change] = deque()
        # sizes of all changes that were put in, and taken out: each written by one thread
        self._put = 0
        self._taken = 0
        self._overflowed = False

    # --- the cache's thread

    def stored(self, blocks: StoredBlocks) -> None:
        """Notes blocks; those without tokens only if their tokens were reported before."""
        if blocks.tokens is None:
            for key in blocks.keys:
                if (known := self._known.get(key)) is not None:
                    self._on[blocks.medium].add(key)
                    self._append(_stored([key], known, blocks.medium))
            return
        data = np.ascontiguousarray(blocks.tokens, "<i4").tobytes()
        size = len(data) // len(blocks.keys)
        parent = blocks.parent
        for number, key in enumerate(blocks.keys):
            tokens = data[number * size : (number + 1) * size]
            self._known[key] = KnownBlock(parent, tokens, blocks.salt)
            parent = key
        self._on[blocks.medium].update(blocks.keys)
        self._append(blocks)

    def removed(self, keys: Sequence[bytes], medium: Medium) -> None:
        self._on[medium].difference_update(keys)
        self._forget(keys)
        self._append(Removed(keys, medium))

    def cleared(self, medium: Medium) -> None:
        keys = list(self._on[medium])
        self._on[medium].clear()
        self._forget(keys)
        self._append(Removed(keys, medium) if self._known else Cleared())

    def _forget(self, keys: Iterable[bytes]) -> None:
        """Drops what is known of blocks that are nowhere any more."""
        for key in keys:
            if not any(key in on for on in self._on.values()):
                self._known.pop(key, None)

    def _append(self, change: Change) -> None:
        if not self._overflowed:
            self._put += _size(change)
            self._overflowed = self._put - self._taken > self._max_waiting
            self._waiting.append(change)
        if not self.changed.is_set():
            self.changed.set()

    # --- the thread that sends

    def take(self) -> Iterator[list[KvEvent]]:
        """Gives the events of all changes so far, in their order, in lists that are small enough to
        be sent. After an overflow: all that is there now, after an AllBlocksCleared."""
        self.changed.clear()
        if self._overflowed:
            yield from self._resend()
        while self._waiting:
            yield [self._event(change) for change in _joined(self._take_some())]

    def lose(self) -> None:
        """Has everything resent by the next `take`: what was taken could not be sent."""
        self._overflowed = True
        self.changed.set()

    def _take_some(self) -> Iterator[Change]:
        taken = 0
        while self._waiting and taken < MAX_BATCH:
            change = self._waiting.popleft()
            taken += _size(change)
            self._taken += _size(change)
            yield change

    def _event(self, change: Change) -> KvEvent:
        if isinstance(change, StoredBlocks):
            return block_stored(change, self._block_size)
        if isinstance(change, Removed):
            return block_removed(change.keys, change.medium)
        return all_blocks_cleared()

    def _resend(self) -> Iterator[list[KvEvent]]:
        """Changes that come while the copies are made are in the log as well. That is harmless: the
        last event of a block is what became of it."""
        self._waiting.clear()
        self._taken = self._put
        self._overflowed = False
        known = self._known.copy()
        on = {medium: keys.copy() for medium, keys in self._on.items()}
        self.overflows += 1
        log.warning("KV events fell behind: all %d blocks are sent again", len(known))
        yield [all_blocks_cleared()]
        for medium, keys in on.items():
            blocks = {key: known[key] for key in known if key in keys}
            for run in runs(blocks):
                yield [block_stored(_stored(run, blocks[run[0]], medium, blocks), self._block_size)]


def runs(blocks: Mapping[bytes, KnownBlock]) -> Iterator[list[bytes]]:
    """The blocks as runs of consecutive ones, each run after the block that it follows."""
    children: dict[bytes | None, list[bytes]] = {}
    for key, block in blocks.items():
        parent = block.parent if block.parent in blocks else None
        children.setdefault(parent, []).append(key)
    pending = list(reversed(children.get(None, [])))
    while pending:
        run = [pending.pop()]
        while len(run) < MAX_BATCH and len(children.get(run[-1], [])) == 1:
            run += children[run[-1]]
        pending.extend(reversed(children.get(run[-1], [])))
        yield run


def _size(change: Change) -> int:
    return 1 + len(change.keys)


def _stored(
    keys: Sequence[bytes],
    first: KnownBlock,
    medium: Medium,
    blocks: Mapping[bytes, KnownBlock] | None = None,
) -> StoredBlocks:
    """Consecutive blocks, of which the `first` is given; blocks: what is known of the others."""
    data = first.tokens
    if blocks is not None:
        data = b"".join(blocks[key].tokens for key in keys)
    return StoredBlocks(keys, medium, first.parent, np.frombuffer(data, "<i4"), first.salt)


def _joined(changes: Iterable[Change]) -> Iterator[Change]:
    """Evicted blocks come one by one: removals from one medium, one after the other, become one."""
    removed: Removed | None = None
    for change in changes:
        if removed is not None and isinstance(change, Removed) and change.medium is removed.medium:
            removed = Removed([*removed.keys, *change.keys], change.medium)
            continue
        if removed is not None:
            yield removed
        removed = change if isinstance(change, Removed) else None
        if removed is None:
            yield change
    if removed is not None:
        yield removed
