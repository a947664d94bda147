"""Who waits, by age, with what a policy looks at as arrays: ranking a thousand sequences costs a
few numpy calls."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from operator import attrgetter

import numpy as np

from jaxserve.scheduling.sequence import Sequence

age = attrgetter("number")
ARRIVAL, DUE, WORK, TOKENS = range(4)


class WaitingQueue:
    """Waiting sequences, oldest first. `fields` [4, n] f64: clock seconds of arrival and of the
    first token's deadline, seconds of prefill that are left, and the prompt's tokens."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._fields = np.empty((4, 64))

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __getitem__(self, place: int) -> Sequence:
        return self._sequences[place]

    def copy(self) -> list[Sequence]:
        return self._sequences.copy()

    @property
    def fields(self) -> np.ndarray:
        return self._fields[:, : len(self._sequences)]

    def add(self, sequence: Sequence) -> None:
        count = len(self)
        at = bisect_left(self._sequences, sequence.number, key=age)
        if count == self._fields.shape[1]:
            self._fields = np.concatenate([self._fields, np.empty_like(self._fields)], 1)
        self._fields[:, at + 1 : count + 1] = self._fields[:, at:count]
        self._fields[:, at] = (
            sequence.request.arrival,
            sequence.ttft_deadline,
            sequence.prefill_seconds_left,
            sequence.prefill_len,
        )
        self._sequences.insert(at, sequence)

    def remove(self, sequence: Sequence) -> None:
        count = len(self._sequences)
        at = bisect_left(self._sequences, sequence.number, key=age)
        assert self._sequences.pop(at) is sequence
        self._fields[:, at : count - 1] = self._fields[:, at + 1 : count]


def ranked(key: np.ndarray, few: int = 16) -> Iterator[int]:
    """Indices of `key` [n], smallest first, ties by index. Usually only the first few are asked
    for, and the rest is never sorted."""
    if len(key) > 2 * few:
        last = np.partition(key, few)[few]
        front = np.flatnonzero(key <= last)
        yield from front[np.argsort(key[front], kind="stable")].tolist()
        rest = np.flatnonzero(~(key <= last))
    else:
        rest = np.arange(len(key))
    yield from rest[np.argsort(key[rest], kind="stable")].tolist()
