"""The queue of sequences that wait for a slot, oldest first, with what policies look at as arrays:
ranking a thousand sequences costs a few numpy calls."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from operator import attrgetter

import numpy as np

from jaxserve.scheduling.sequence import Sequence

age = attrgetter("number")  # sequences are numbered as they come
ARRIVAL, DUE, WORK, TOKENS = range(4)  # rows of `WaitingQueue.fields`


class WaitingQueue:
    """Waiting sequences, oldest first.

    `fields` [4, n] float64 are, of each: clock seconds of its arrival, clock seconds at which its
    first token is due, predicted seconds of its prefill, and tokens of its prompt.
    """

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._fields = np.empty((4, 64))  # has room for more sequences than there are

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __getitem__(self, place: int) -> Sequence:
        return self._sequences[place]

    def copy(self) -> list[Sequence]:
        """The sequences, oldest first."""
        return self._sequences.copy()

    @property
    def fields(self) -> np.ndarray:
        return self._fields[:, : len(self._sequences)]

    def add(self, sequence: Sequence) -> None:
        """Adds a sequence at the place of its age."""
        count = len(self)
        at = bisect_left(self._sequences, sequence.number, key=age)
        if count == self._fields.shape[1]:
            self._fields = np.concatenate([self._fields, np.empty_like(self._fields)], 1)
        self._fields[:, at + 1 : count + 1] = self._fields[:, at:count]
        self._fields[:, at] = fields_of(sequence)
        self._sequences.insert(at, sequence)

    def remove(self, sequence: Sequence) -> None:
        count = len(self._sequences)
        at = bisect_left(self._sequences, sequence.number, key=age)
        assert self._sequences.pop(at) is sequence
        self._fields[:, at : count - 1] = self._fields[:, at + 1 : count]


def fields_of(sequence: Sequence) -> tuple[float, float, float, int]:
    """What policies look at, as in `WaitingQueue.fields`."""
    return (
        sequence.request.arrival,
        sequence.ttft_deadline,
        sequence.prefill_seconds_left,
        sequence.prefill_len,
    )


def smallest_first(key: np.ndarray, few: int = 16) -> Iterator[int]:
    """Indices of `key` [n], smallest first, of equal ones the lower index. Usually only the first
    few are asked for: the rest is sorted when it is needed."""
    if len(key) > 2 * few:
        last = np.partition(key, few)[few]
        front = np.flatnonzero(key <= last)
        yield from front[np.argsort(key[front], kind="stable")].tolist()
        rest = np.flatnonzero(~(key <= last))
    else:
        rest = np.arange(len(key))
    yield from rest[np.argsort(key[rest], kind="stable")].tolist()
