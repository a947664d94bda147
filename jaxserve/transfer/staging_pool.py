"""Registered staging memory of a source, shared by the streams to which it sends."""

from __future__ import annotations

import threading

import numpy as np

from jaxserve.transfer.plane import Staging
from jaxserve.transfer.protocol import TransferError

GROUPS = 2  # of a stream: one is filled while the reader brings the other


class StagingPool:
    """Parts of `memory`, uint8 [bytes], GROUPS to a stream. All groups have the size of the first
    one that is asked for, or less: blocks of a replica have one size. Any thread may call."""

    def __init__(self, memory: np.ndarray):
        self._memory = memory
        self._size = 0  # bytes of a part
        self._free: list[int] = []  # where parts begin
        self._given = threading.Condition()

    @property
    def used(self) -> int:
        """Parts that streams have."""
        with self._given:
            return self._memory.size // self._size - len(self._free) if self._size else 0

    def take(self, size: int, seconds: float) -> Staging | None:
        """Waits for the parts of a stream; None where there are none in time. Errors: TransferError
        where they do not fit."""
        with self._given:
            if not self._size and 0 < size <= self._memory.size // GROUPS:
                self._size = size
                last = self._memory.size - size
                self._free = list(range(0, last + 1, size))
            if not 0 < size <= self._size:
                raise TransferError(
                    "staging", f"{GROUPS} groups of {size} bytes; it has {self._memory.size}"
                )
            if not self._given.wait_for(lambda: len(self._free) >= GROUPS, seconds):
                return None
            bases = [self._free.pop() for _ in range(GROUPS)]
        buffers = [self._memory[base : base + size] for base in bases]
        return Staging(buffers, lambda: self._give_back(bases))

    def _give_back(self, bases: list[int]) -> None:
        with self._given:
            self._free += bases
            bases.clear()
            self._given.notify_all()
