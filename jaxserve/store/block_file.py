"""A file of records of one size, read and written beside the page cache (O_DIRECT): blocks are
large and read once, and what the page cache took would be missing as memory for blocks.

Nothing is flushed (no fsync): a record that a power failure tears is noticed by its checksums.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
from pathlib import Path

import numpy as np

from jaxserve.store.record import SECTOR, record_bytes

GROW_BYTES = 64 << 20  # that the file is extended by at a time
log = logging.getLogger(__name__)


class BlockFile:
    """Records of a sector and `block_bytes` each, numbered from 0. `records` is how many there is
    room for now, `most` how many there may be. All methods may be called by several threads, but
    `grow` by one at a time; all raise OSError."""

    def __init__(self, path: Path, block_bytes: int, capacity_bytes: int):
        """Opens or creates the file, readable by its owner alone. What is beyond the capacity is
        cut off."""
        self._block_bytes = block_bytes
        self.record_bytes = record_bytes(block_bytes)
        self._padded = self.record_bytes - SECTOR
        self.most = capacity_bytes // self.record_bytes
        self._scratch = threading.local()
        self._file, self.direct = _open(path)
        try:
            self.records = self._cut()
        except OSError:
            os.close(self._file)
            raise

    def grow(self) -> int:
        """Extends the file, and has the file system reserve the room, as much of it as there is.
        Returns the number of records added, 0 where there are as many as there may be."""
        added = min(self.most - self.records, max(1, GROW_BYTES // self.record_bytes))
        while added:
            try:
                self._reserve(added)
                break
            except OSError:
                added //= 2
                if not added:
                    raise
        self.records += added
        return added

    def _reserve(self, records: int) -> None:
        begin = self.records * self.record_bytes
        try:
            os.posix_fallocate(self._file, begin, records * self.record_bytes)
        except OSError:
            os.ftruncate(self._file, begin)  # gives back what was reserved of it
            raise

    def write(self, record: int, sector: bytes, payload: np.ndarray) -> None:
        """Writes a whole record. payload: uint8 [block_bytes]; where it lies on pages and fills
        sectors, it is written from where it is."""
        head = self._sector()
        head[:] = np.frombuffer(sector, np.uint8)
        source = payload
        if not self._suits(payload):
            source = self._payload()
            source[: self._block_bytes] = payload
        done = os.pwritev(self._file, [head.data, source.data], record * self.record_bytes)
        if done != self.record_bytes:
            raise OSError(errno.EIO, f"{done} of {self.record_bytes} bytes were written")

    def read(self, record: int, into: np.ndarray) -> np.ndarray:
        """Reads a record: its bytes to `into` uint8 [block_bytes], and its sector as the return
        value, which the next call on this thread overwrites."""
        head = self._sector()
        target = into if self._suits(into) else self._payload()
        done = os.preadv(self._file, [head.data, target.data], record * self.record_bytes)
        if done != self.record_bytes:
            raise OSError(errno.EIO, f"{done} of {self.record_bytes} bytes were read")
        if target is not into:
            into[:] = target[: self._block_bytes]
        return head

    def read_sector(self, record: int) -> np.ndarray:
        """Reads the first sector of a record; the next call on this thread overwrites it."""
        head = self._sector()
        if os.preadv(self._file, [head.data], record * self.record_bytes) != SECTOR:
            raise OSError(errno.EIO, "the file is shorter than it was")
        return head

    def erase(self, record: int) -> None:
        """Overwrites the first sector of a record, so that it is none any more."""
        head = self._sector()
        head[:] = 0
        if os.pwritev(self._file, [head.data], record * self.record_bytes) != SECTOR:
            raise OSError(errno.EIO, "a sector was written in part")

    def close(self) -> None:
        """Closes the file; nothing may be reading or writing."""
        os.close(self._file)

    def _cut(self) -> int:
        """Cuts off what is no whole record or beyond the capacity; returns how many are left."""
        size = os.fstat(self._file).st_size
        records = min(size // self.record_bytes, self.most)
        if size != records * self.record_bytes:
            os.ftruncate(self._file, records * self.record_bytes)
        return records

    def _suits(self, payload: np.ndarray) -> bool:
        """Returns whether direct I/O can be from or to where these bytes are."""
        aligned = payload.__array_interface__["data"][0] % SECTOR == 0
        return aligned and self._block_bytes == self._padded

    def _sector(self) -> np.ndarray:
        """This thread's aligned memory for a sector."""
        if not hasattr(self._scratch, "sector"):
            self._scratch.sector = _aligned(SECTOR)
        return self._scratch.sector

    def _payload(self) -> np.ndarray:
        """This thread's aligned memory for a block that does not suit."""
        if not hasattr(self._scratch, "payload"):
            self._scratch.payload = _aligned(self._padded)
        return self._scratch.payload


def _aligned(size: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


def _open(path: Path) -> tuple[int, bool]:
    """Returns the file, and whether it is read and written beside the page cache."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    try:
        return _tried(path, flags | os.O_DIRECT), True
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    log.warning(
        "%s: the file system refuses direct I/O; blocks also take room in the page cache", path
    )
    return _tried(path, flags), False


def _tried(path: Path, flags: int) -> int:
    """Opens the file and reads once, for some file systems refuse only that."""
    file = os.open(path, flags, 0o600)
    try:
        os.fchmod(file, 0o600)
        os.preadv(file, [_aligned(SECTOR).data], 0)
    except OSError:
        os.close(file)
        raise
    return file
