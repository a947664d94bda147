"""Files as arrays of bytes that the system reads when they are used."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np


class MappedFile:
    """A file in memory; bytes: its content, read-only."""

    def __init__(self, path: Path):
        with open(path, "rb") as file:
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.bytes = np.frombuffer(self._memory, np.uint8)

    def release(self) -> None:
        """Gives back the memory of what was read so far. Views stay valid: what is used again is
        taken from the page cache, or read again."""
        self._memory.madvise(mmap.MADV_DONTNEED)
