"""Blocks of KV that a node allocates and locks on behalf of conductors: TxAllocate and TxCommit
(Mooncake, section 5.3).

The node owns the metadata; conductors keep none that matters, so that they can be restarted, and
several can be at work. A conductor asks for a transaction over the chain of a prompt's block keys:
the node locks the blocks that it has of it, allocates those that it lacks, and returns handles. The
conductor has the blocks filled, then commits: their keys can be found from then on. A transaction
that is not committed in time is rolled back, and so is one whose conductor says so.

A block is free, locked by the one transaction that fills it, or cached: found by its key, and
locked by any number of transactions that read it. An allocation evicts the least recently used
cached blocks that nobody reads. Every handle carries the block's epoch, which grows with every
allocation: what was handed out before is recognised and refused. Time is an argument, in clock
seconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxserve.api.errors import RequestError

MAX_BLOCKS = 1 << 16  # of one transaction
MAX_TRANSACTIONS = 4096  # open at once
MAX_SECONDS = 600.0  # that a transaction may stay open


class Handle(NamedTuple):
    """A block as a transaction has it. reused: it holds its key's KV already and is only read;
    others are to be filled by this transaction."""

    block: int
    epoch: int
    reused: bool


@dataclass(frozen=True)
class Transaction:
    """Blocks that are locked for a conductor until `deadline`, one handle for each key."""

    number: int
    keys: tuple[bytes, ...]
    handles: tuple[Handle, ...]
    deadline: float


class BlockLedger:
    """The blocks of one node: who has them locked, and which keys are found on which.

    It has no lock of its own: a node calls it from one thread.
    """

    def __init__(self, blocks: int):
        if blocks < 1:
            raise ValueError(f"blocks must be at least 1, not {blocks}")
        self.blocks = blocks
        self.epoch = [0] * blocks
        self._free = list(reversed(range(blocks)))
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._readers = [0] * blocks
        self._unread: OrderedDict[int, None] = OrderedDict()  # cached, least recently used first
        self._open: dict[int, Transaction] = {}
        self._born = 0

    # --- questions

    @property
    def available(self) -> int:
        """Blocks that can be allocated: free ones, and cached ones that nobody reads."""
        return len(self._free) + len(self._unread)

    @property
    def open(self) -> int:
        """Transactions that are neither committed nor rolled back."""
        return len(self._open)

    def keys(self) -> list[bytes]:
        """Keys that can be found: from these a conductor rebuilds its directory."""
        return list(self._block_of)

    def cached(self, keys: Sequence[bytes]) -> int:
        """How many of a chain's first blocks are here."""
        return next((n for n, key in enumerate(keys) if key not in self._block_of), len(keys))

    # --- transactions

    def allocate(self, keys: Sequence[bytes], now: float, seconds: float) -> Transaction:
        """Locks the blocks of a chain's keys for at most `seconds`: those that are here to be read,
        new ones for the rest to be filled. All of them or none.

        Errors: RequestError, RESOURCE_EXHAUSTED, where there is no room; INVALID_ARGUMENT for
        limits that are exceeded and keys that are given more than once.
        """
        self._check(keys, seconds)
        self.expire(now)
        self._check_room(keys, now)
        cached = self.cached(keys)
        handles = [self._read(self._block_of[key]) for key in keys[:cached]]
        handles += [self._take() for _ in keys[cached:]]
        self._born += 1
        transaction = Transaction(self._born, tuple(keys), tuple(handles), now + seconds)
        self._open[transaction.number] = transaction
        return transaction

    def commit(self, number: int, now: float) -> int:
        """Lets the blocks that a transaction filled be found by their keys, and unlocks all its
        blocks; returns how many are new. A key that another transaction has committed meanwhile
        stays where it is, and this one's block is free again.

        Errors: RequestError, NOT_FOUND, for a transaction that is not open: it was ended, or its
        time is over and its blocks may be another's.
        """
        self.expire(now)
        transaction = self._end(number)
        new = 0
        for key, handle in zip(transaction.keys, transaction.handles):
            if handle.reused:
                self._unread_one(handle.block)
            elif key in self._block_of:
                self._free.append(handle.block)
            else:
                self._block_of[key] = handle.block
                self._key_of[handle.block] = key
                new += 1
        # the deepest is evicted first: prefixes stay whole
        for key, handle in reversed(list(zip(transaction.keys, transaction.handles))):
            if self._key_of.get(handle.block) == key and not self._readers[handle.block]:
                self._unread[handle.block] = None
                self._unread.move_to_end(handle.block)
        return new

    def rollback(self, number: int) -> None:
        """Unlocks the blocks of a transaction; those that it was to fill are free. Errors:
        RequestError, NOT_FOUND, for one that is not open."""
        transaction = self._end(number)
        for handle in reversed(transaction.handles):
            if handle.reused:
                self._unread_one(handle.block)
            else:
                self._free.append(handle.block)

    def expire(self, now: float) -> list[int]:
        """Rolls back the transactions whose time is over; returns their numbers."""
        late = [number for number, one in self._open.items() if one.deadline <= now]
        for number in late:
            self.rollback(number)
        return late

    def valid(self, handle: Handle) -> bool:
        """Whether a block is still what it was when the handle was given: whoever writes to it or
        reads from it for a conductor asks first."""
        return self.epoch[handle.block] == handle.epoch

    # --- blocks

    def _check(self, keys: Sequence[bytes], seconds: float) -> None:
        if not 0 < len(keys) <= MAX_BLOCKS:
            raise RequestError("keys", f"must be 1 to {MAX_BLOCKS} block keys, not {len(keys)}")
        if len(set(keys)) < len(keys):
            raise RequestError("keys", "a key is given more than once")
        if not 0 < seconds <= MAX_SECONDS:
            raise RequestError("seconds", f"must be above 0 and at most {MAX_SECONDS:g}")

    def _check_room(self, keys: Sequence[bytes], now: float) -> None:
        if len(self._open) >= MAX_TRANSACTIONS:
            self._refuse(f"{MAX_TRANSACTIONS} transactions are open, which is the limit", now)
        cached = self.cached(keys)
        own = sum(not self._readers[self._block_of[key]] for key in keys[:cached])
        room = self.available - own  # what it reads itself is not evicted
        if len(keys) - cached > room:
            self._refuse(f"{len(keys) - cached} blocks are needed, {room} can be had", now)

    def _refuse(self, message: str, now: float) -> None:
        after = min((one.deadline for one in self._open.values()), default=now + 1.0) - now
        raise RequestError("", message, "RESOURCE_EXHAUSTED", max(after, 0.05), "blocks")

    def _read(self, block: int) -> Handle:
        if not self._readers[block]:
            del self._unread[block]
        self._readers[block] += 1
        return Handle(block, self.epoch[block], True)

    def _unread_one(self, block: int) -> None:
        self._readers[block] -= 1
        if not self._readers[block]:
            self._unread[block] = None

    def _take(self) -> Handle:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._unread.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
        self.epoch[block] += 1
        return Handle(block, self.epoch[block], False)

    def _end(self, number: int) -> Transaction:
        transaction = self._open.pop(number, None)
        if transaction is None:
            raise RequestError("transaction", f"{number} is not open", "NOT_FOUND")
        return transaction

    def check(self) -> None:
        """Compares what is kept of the blocks. Errors: AssertionError with what differs."""
        filling = [h.block for one in self._open.values() for h in one.handles if not h.reused]
        readers = [0] * self.blocks
        for one in self._open.values():
            for handle in one.handles:
                readers[handle.block] += handle.reused
        assert readers == self._readers, f"readers {self._readers}, counted {readers}"
        unread = [block for block in self._key_of if not readers[block]]
        assert sorted(unread) == sorted(self._unread), f"unread {list(self._unread)}, are {unread}"
        assert {key: block for block, key in self._key_of.items()} == self._block_of
        places = sorted([*self._free, *filling, *self._key_of])
        assert places == list(range(self.blocks)), f"free, filled and cached are {places}"
