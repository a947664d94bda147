"""Index of the records of a file: which block is in which record, and which record is written next.

Records are written one after the other, from the first to the last and from the first again: the
oldest are overwritten in the order in which they were written. A block that was read since it was
written, or that is to be kept, has a second chance: it stays where it is when its turn comes (FIFO
with reinsertion, as in CacheLib's Navy; as all records have one size, reinsertion copies nothing).
At most half of the records are passed over in this way, so that new blocks always find room.
Locked blocks stay, as long as there are records for others.

No I/O, no lock and no clock: callers hold a lock and say what time it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MAX_PASSES = 64  # records that may be passed over in a row


@dataclass(eq=False, slots=True)
class Entry:
    """A block on disk; see `RecordHeader`. read: whether it was, since its last turn."""

    key: bytes
    record: int
    sequence: int
    expires: float
    keep: bool
    read: bool = False

    def expired(self, now: float) -> bool:
        return 0 < self.expires <= now


class Ring:
    """The blocks in records numbered from 0. A record is *busy* while it is written or erased, and
    then no other caller's; `settle` or `release` ends that. `changed` is called for blocks that
    come and go."""

    def __init__(self, records: int):
        self.changed: Callable[[bytes, bool], None] = lambda key, came: None
        self.locks: set[bytes] = set()  # keys, also of blocks that are not here
        self.evicted = 0
        self.passed_over = 0
        self._entries: dict[bytes, Entry] = {}
        self._records: list[Entry | None] = [None] * records
        self._busy: set[int] = set()
        self._hand = 0
        self._passes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def records(self) -> int:
        return len(self._records)

    def keys(self, now: float) -> list[bytes]:
        """The keys of all blocks that are not expired."""
        return [key for key, entry in self._entries.items() if not entry.expired(now)]

    def find(self, key: bytes, now: float) -> Entry | None:
        """The block with this key; one that is expired is forgotten."""
        entry = self._entries.get(key)
        if entry is not None and entry.expired(now) and key not in self.locks:
            self._forget(entry)
            return None
        return entry

    def restore(self, entry: Entry) -> None:
        """Adds a block that was found on disk; of two with one key the later one counts."""
        other = self._entries.get(entry.key)
        if other is not None:
            if other.sequence > entry.sequence:
                return
            self._forget(other)
        self._add(entry)

    def resume(self) -> int:
        """Continues behind the record that was written last. Returns its sequence number, 0 if
        there is no record."""
        newest = max(self._entries.values(), key=lambda entry: entry.sequence, default=None)
        if newest is None:
            return 0
        self._hand = newest.record + 1
        return newest.sequence

    def take(self, now: float, grow: Callable[[], int]) -> int | None:
        """Chooses the record to write next, evicts what is in it, and marks it busy. None where
        every record is busy. grow: adds records at the end, returns how many."""
        while True:
            if self._hand >= len(self._records):
                self._records += [None] * grow()
            if len(self._busy) >= len(self._records):
                return None
            if self._hand >= len(self._records):
                self._hand = 0
            record = self._hand
            self._hand += 1
            if record in self._busy:
                continue
            entry = self._records[record]
            if entry is not None and self._stays(entry):
                continue
            if entry is not None and self._passes_over(entry, now):
                continue
            if entry is not None:
                self._forget(entry)
                self.evicted += 1
            self._passes = min(self._most_passes, self._passes + 1)
            self._busy.add(record)
            return record

    def settle(self, entry: Entry) -> Entry | None:
        """Adds a block whose record was written, and ends its being busy. Returns the older block
        with the same key, if there was one; its record is busy now, to be erased."""
        older = self._entries.get(entry.key)
        if older is not None:
            self.drop(older)
        self._busy.discard(entry.record)
        self._add(entry)
        return older

    def drop(self, entry: Entry) -> bool:
        """Forgets a block and marks its record busy, to be erased. Returns False where it is gone
        already."""
        if self._entries.get(entry.key) is not entry:
            return False
        self._forget(entry)
        self._busy.add(entry.record)
        return True

    def release(self, record: int) -> None:
        """Ends a record's being busy; it holds no block."""
        self._busy.discard(record)

    def _stays(self, entry: Entry) -> bool:
        """Returns whether a block is locked, and others have records besides."""
        locked = entry.key in self.locks
        return locked and len(self.locks) + len(self._busy) < len(self._records)

    @property
    def _most_passes(self) -> int:
        return max(1, min(MAX_PASSES, len(self._records) // 2))

    def _passes_over(self, entry: Entry, now: float) -> bool:
        """Returns whether a block has a second chance. Half of the passes are for blocks to be
        kept, so that many reads of others do not take these."""
        least = 0 if entry.keep else self._most_passes // 2
        wanted = (entry.keep or entry.read) and not entry.expired(now)
        if not wanted or self._passes <= least:
            return False
        self._passes -= 1
        self.passed_over += 1
        entry.read = False
        return True

    def _add(self, entry: Entry) -> None:
        self._entries[entry.key] = entry
        self._records[entry.record] = entry
        self.changed(entry.key, True)

    def _forget(self, entry: Entry) -> None:
        del self._entries[entry.key]
        self._records[entry.record] = None
        self.changed(entry.key, False)
