"""Blocks in a file on a local disk.

The file is a ring of records of one size (`ring`), each a header sector and a block (`record`).
There is no index on disk: at start it is made of the headers. Nothing is flushed, so a block may
be lost or torn when the machine fails; its checksums tell. A process that is killed loses what it
was writing and nothing else.

A disk that fails makes the cache useless, never the replica: it is logged once, and from then on
blocks are not taken and not found. Calls last as long as the device takes, so they belong on
threads that may wait.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxserve.folders import private_folder
from jaxserve.settings.schema import ConfigError
from jaxserve.store.block_file import BlockFile
from jaxserve.store.checksum import Buffer, block_checksum, flat_bytes
from jaxserve.store.record import MAX_KEY_BYTES, RecordFormat, RecordHeader, record_bytes
from jaxserve.store.ring import Entry, Ring

FIELD = "disk_cache"  # the setting that errors name
SCAN_THREADS = 8  # that read headers at start
SCAN_RECORDS = 1024  # headers that a thread reads at a time
CLOSE_SECONDS = 10.0  # that `close` waits for calls on other threads
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DiskCounts:
    """Counts of a store since it was opened. blocks: on disk now, in `records`. put: blocks
    written. refused: not written, for want of room or by an error. damaged: blocks found to be torn
    or wrong. passed_over: blocks that had a second chance."""

    blocks: int = 0
    records: int = 0
    put: int = 0
    refused: int = 0
    hits: int = 0
    misses: int = 0
    damaged: int = 0
    evicted: int = 0
    passed_over: int = 0


class DiskBlocks:
    """Blocks of `block_bytes` under keys, in a file of at most `capacity_bytes` in a folder.

    All methods may be called by any thread. No error of the disk is raised but by the constructor,
    and there only where the settings are at fault."""

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int,
        block_bytes: int,
        identity: bytes = b"",
        now: Callable[[], float] = time.time,
    ):
        """Opens the folder, creates it if needed, and finds the blocks that are there already.

        identity: what the bytes' meaning depends on, such as a hash of model and layout; blocks
        of another identity or size are misses, and overwritten. now: unix seconds.
        Errors: ConfigError where the folder is not this user's alone, another process uses it, or
        there is not room for one block; ValueError where a block has no byte.
        """
        if block_bytes < 1:
            raise ValueError(f"block_bytes is {block_bytes}; it must be at least 1")
        least = record_bytes(block_bytes)
        if capacity_bytes < least:
            raise ConfigError(
                FIELD, f"{capacity_bytes} bytes have no room for a block; it needs {least}"
            )
        self.block_bytes = block_bytes
        self._format = RecordFormat(block_bytes, identity)
        self._now = now
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)  # no call is under way
        self._calls = 0
        self._told: set[tuple[str, int | None]] = set()
        self._counts: Counter[str] = Counter()  # by the names of DiskCounts
        self._sequence = 0
        self._ring = Ring(0)
        self._folder = private_folder(Path(folder), FIELD)
        self._locked: int | None = None
        self._file: BlockFile | None = None  # None: it cannot be used, or is closed
        try:
            self._locked = _lock_folder(self._folder)
            self._file = BlockFile(self._folder / "blocks", block_bytes, capacity_bytes)
            self._recover(self._file)
        except OSError as error:
            self._tell("opened", error)

    def put(self, key: bytes, data: Buffer, expires: float = 0.0, keep: bool = False) -> bool:
        """Writes a block unless it is there already with the same `expires` and `keep`. Returns
        whether it is there now.

        expires: unix seconds from which on it is a miss, 0 for never. keep: evicted only where
        others cannot be. data: `block_bytes` contiguous bytes, not to be changed meanwhile.
        Errors: ValueError for other sizes, and for keys beyond MAX_KEY_BYTES."""
        payload = self._checked(key, data)
        with self._using() as file:
            return file is not None and self._put(file, key, payload, expires, keep)

    def get(self, key: bytes, into: Buffer) -> bool:
        """Reads a block. Returns False where it is not there, expired, torn, wrong, or evicted
        meanwhile; what `into` holds then is no block.

        into: `block_bytes` contiguous writable bytes. On pages of the system, as slots of
        `HostBlocks` are, they are read without a copy. Errors: ValueError for other sizes."""
        target = self._checked(key, into)
        if not target.flags.writeable:
            raise ValueError("the memory to read a block into is read-only")
        with self._using() as file:
            return file is not None and self._get(file, key, target)

    def discard(self, key: bytes) -> None:
        """Removes a block, for good: it does not come back after a restart."""
        with self._using() as file:
            if file is None:
                return
            with self._lock:
                entry = self._ring.find(key, self._now())
                dropped = entry is not None and self._ring.drop(entry)
            if dropped and entry is not None:
                self._erase(file, entry)

    def lock(self, key: bytes) -> None:
        """Has a block stay until `unlock`, beyond the second at which it expires."""
        with self._lock:
            self._ring.locks.add(key)

    def unlock(self, key: bytes) -> None:
        """Ends the lock of a block."""
        with self._lock:
            self._ring.locks.discard(key)

    def __contains__(self, key: bytes) -> bool:
        """Returns whether a block is believed to be on disk; only `get` checks that it is whole."""
        with self._lock:
            return self._file is not None and self._ring.find(key, self._now()) is not None

    def expires(self, key: bytes) -> float | None:
        """Unix seconds from which on a block is not there, 0 for never; None where it is not there
        now."""
        with self._lock:
            entry = self._ring.find(key, self._now()) if self._file is not None else None
            return None if entry is None else entry.expires

    def listen(self, changed: Callable[[bytes, bool], None]) -> None:
        """Tells `changed` from now on whether a block came, or went, as that happens. It must be
        short, and must not call anything here."""
        with self._lock:
            self._ring.changed = changed

    def keys(self) -> list[bytes]:
        """The keys of the blocks that are there now."""
        with self._lock:
            return self._ring.keys(self._now()) if self._file is not None else []

    def counts(self) -> DiskCounts:
        with self._lock:
            ring = self._ring
            return DiskCounts(
                blocks=len(ring),
                records=ring.records,
                evicted=ring.evicted,
                passed_over=ring.passed_over,
                **self._counts,
            )

    def close(self) -> None:
        """Lets calls that are under way end, then gives the folder free. Afterwards nothing is
        taken and nothing found. Where the disk hangs, the files are left open."""
        with self._lock:
            file, locked = self._file, self._locked
            self._file = self._locked = None
            idle = self._idle.wait_for(lambda: self._calls == 0, CLOSE_SECONDS)
        if not idle:
            log.warning("%s: the disk does not answer; its file is left open", self._folder)
            return
        if file is not None:
            file.close()
        if locked is not None:
            os.close(locked)

    def _checked(self, key: bytes, data: Buffer) -> np.ndarray:
        if len(key) > MAX_KEY_BYTES:
            raise ValueError(f"a key of {len(key)} bytes; the limit is {MAX_KEY_BYTES}")
        flat = flat_bytes(data)
        if flat.size != self.block_bytes:
            raise ValueError(f"{flat.size} bytes; a block has {self.block_bytes}")
        return flat

    @contextmanager
    def _using(self) -> Iterator[BlockFile | None]:
        """Lends the file, which is not closed meanwhile; None if it cannot be used."""
        with self._lock:
            file = self._file
            self._calls += 1
        try:
            yield file
        finally:
            with self._lock:
                self._calls -= 1
                if not self._calls:
                    self._idle.notify_all()

    def _put(
        self, file: BlockFile, key: bytes, payload: np.ndarray, expires: float, keep: bool
    ) -> bool:
        with self._lock:
            now = self._now()
            entry = self._ring.find(key, now)
            if entry is not None and (entry.expires, entry.keep) == (expires, keep):
                return True
            record = self._ring.take(now, lambda: self._grow(file))
            if record is None:
                self._counts["refused"] += 1
                return False
            self._sequence += 1
            entry = Entry(key, record, self._sequence, expires, keep)
        written = self._write(file, entry, payload)
        with self._lock:
            older = None
            if written:
                older = self._ring.settle(entry)
                self._counts["put"] += 1
            else:
                self._ring.release(record)
                self._counts["refused"] += 1
        if older is not None:
            self._erase(file, older)
        return written

    def _write(self, file: BlockFile, entry: Entry, payload: np.ndarray) -> bool:
        header = RecordHeader(
            entry.key,
            entry.record,
            entry.sequence,
            entry.expires,
            entry.keep,
            block_checksum(entry.key, payload),
        )
        try:
            file.write(entry.record, self._format.pack(header), payload)
        except OSError as error:
            self._tell("written to", error)
            return False
        return True

    def _get(self, file: BlockFile, key: bytes, target: np.ndarray) -> bool:
        with self._lock:
            entry = self._ring.find(key, self._now())
            if entry is None:
                self._counts["misses"] += 1
                return False
        whole = self._read(file, entry, target)
        with self._lock:
            if whole:
                entry.read = True
                self._counts["hits"] += 1
                return True
            damaged = self._ring.drop(entry)  # otherwise it was evicted meanwhile
            self._counts["misses"] += 1
            self._counts["damaged"] += damaged
        if damaged:
            self._erase(file, entry)
        return False

    def _read(self, file: BlockFile, entry: Entry, target: np.ndarray) -> bool:
        """Reads a block; whether it is the whole block that the entry names."""
        try:
            header = self._format.parse(file.read(entry.record, target), entry.record)
        except OSError as error:
            self._tell("read", error)
            return False
        if header is None or (header.key, header.sequence) != (entry.key, entry.sequence):
            return False
        return header.checksum == block_checksum(entry.key, target)

    def _erase(self, file: BlockFile, entry: Entry) -> None:
        """Erases the record of a block that was dropped, so that no later start finds it."""
        try:
            file.erase(entry.record)
        except OSError as error:
            self._tell("written to", error)
        with self._lock:
            self._ring.release(entry.record)

    def _grow(self, file: BlockFile) -> int:
        try:
            return file.grow()
        except OSError as error:
            self._tell("extended", error)
            return 0

    def _recover(self, file: BlockFile) -> None:
        """Makes the index of the headers in the file."""
        self._ring = Ring(file.records)
        starts = range(0, file.records, SCAN_RECORDS)
        with ThreadPoolExecutor(SCAN_THREADS, "disk-scan") as pool:
            for entries in pool.map(lambda start: self._scan(file, start), starts):
                for entry in entries:
                    self._ring.restore(entry)
        self._sequence = self._ring.resume()

    def _scan(self, file: BlockFile, start: int) -> list[Entry]:
        entries = []
        for record in range(start, min(start + SCAN_RECORDS, file.records)):
            try:
                header = self._format.parse(file.read_sector(record), record)
            except OSError as error:
                self._tell("read", error)
                continue
            if header is not None:
                entries.append(
                    Entry(header.key, record, header.sequence, header.expires, header.keep)
                )
        return entries

    def _tell(self, what: str, error: OSError) -> None:
        """Logs an error of the disk, the first of its kind only."""
        kind = (what, error.errno)
        if kind not in self._told:
            self._told.add(kind)
            log.warning(
                "%s: cannot be %s (%s); blocks are missed there, requests go on. Further errors of "
                "this kind are not logged",
                self._folder,
                what,
                error.strerror or error,
            )


def _lock_folder(folder: Path) -> int:
    """Takes the folder for this process, until the file returned is closed, or the process ends in
    whatever way. Errors: ConfigError where another one has it; OSError."""
    file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(file, 0)
        os.pwrite(file, str(os.getpid()).encode(), 0)
    except OSError as error:
        other = os.pread(file, 20, 0).decode(errors="replace")
        os.close(file)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise ConfigError(
                FIELD, f"{folder} is in use by process {other}; each process needs its own"
            ) from None
        raise
    return file
