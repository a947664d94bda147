"""The queue of sequences that wait for a slot, oldest first, with what policies look at as arrays:
ranking a thousand sequences costs a few numpy calls."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from collections.abc import Sequence as Sequenced
from operator import attrgetter

import numpy as np

from jaxserve.policies import PromptView
from jaxserve.scheduling.prefill_line import PrefillLine
from jaxserve.scheduling.sequence import Sequence

age = attrgetter("number")  # sequences are numbered as they come
# of a PromptView; came: see `Sequence`
COLUMNS = ("arrival", "deadline", "work", "tokens", "priority", "class_index", "tenant", "came")
WORK = COLUMNS.index("work")
TOKENS = COLUMNS.index("tokens")
TENANT = COLUMNS.index("tenant")


class WaitingQueue:
    """Waiting sequences, oldest first, and what policies look at. `line` says how long they have
    been standing in line, in seconds of prefill."""

    def __init__(self) -> None:
        self.line = PrefillLine()
        self._sequences: list[Sequence] = []
        # a row per array of PromptView; has room for more sequences than there are
        self._rows = np.empty((len(COLUMNS), 64))
        self._class_index: dict[str | None, int] = {}  # of every class that a request has named

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __getitem__(self, place: int) -> Sequence:
        return self._sequences[place]

    def copy(self) -> list[Sequence]:
        """Returns the sequences, oldest first."""
        return self._sequences.copy()

    @property
    def work(self) -> np.ndarray:
        """Predicted seconds of each prefill [n]."""
        return self._rows[WORK, : len(self)]

    @property
    def tokens(self) -> np.ndarray:
        """Tokens of each prefill [n]."""
        return self._rows[TOKENS, : len(self)]

    @property
    def tenants(self) -> np.ndarray:
        """Number of the tenant of each [n]."""
        return self._rows[TENANT, : len(self)].astype(np.intp)

    def view_among(
        self, now: float, first: Sequenced[Sequence], last: Sequenced[Sequence] = ()
    ) -> PromptView:
        """Returns the waiting prompts at clock second `now`, with others at the front and at the
        end."""
        count = len(first) + len(self)
        rows = np.empty((len(COLUMNS), count + len(last)))
        rows[:, len(first) : count] = self._rows[:, : len(self)]
        for place, sequence in enumerate(first):
            rows[:, place] = self._column(sequence)
        for place, sequence in enumerate(last, count):
            rows[:, place] = self._column(sequence)
        arrival, deadline, work, tokens, priority, class_index, tenant, came = rows
        names = tuple(self._class_index)
        classes = class_index.astype(np.intp)
        tenants = tenant.astype(np.intp)
        return PromptView(
            now,
            arrival,
            deadline,
            work,
            tokens,
            priority,
            classes,
            names,
            tenants,
            passed=self.line.done - came,
            longest=self.line.longest(tenants),
        )

    def add(self, sequence: Sequence) -> None:
        """Adds a sequence at the place of its age."""
        count = len(self)
        at = bisect_left(self._sequences, sequence.number, key=age)
        if count == self._rows.shape[1]:
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)], 1)
        self._rows[:, at + 1 : count + 1] = self._rows[:, at:count]
        self._rows[:, at] = self._column(sequence)
        self._sequences.insert(at, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence that is in the queue."""
        count = len(self)
        at = bisect_left(self._sequences, sequence.number, key=age)
        assert self._sequences.pop(at) is sequence
        self._rows[:, at : count - 1] = self._rows[:, at + 1 : count]

    def _column(self, sequence: Sequence) -> tuple[float, ...]:
        request = sequence.request
        name = request.slo.class_name
        return (
            request.arrival,
            sequence.ttft_deadline,
            sequence.prefill_seconds_left,
            sequence.prefill_len,
            request.priority,
            self._class_index.setdefault(name, len(self._class_index)),
            sequence.tenant,
            sequence.came,
        )


def smallest_first(key: np.ndarray, few: int = 16) -> Iterator[int]:
    """Yields indices of `key` [n], smallest first, of equal ones the lower index. Callers usually
    take only the first few: others are sorted when they are needed."""
    if len(key) <= 2 * few:
        yield from key.argsort(kind="stable").tolist()
        return
    last = np.partition(key, few)[few]
    front = np.flatnonzero(key <= last)
    yield from front[np.argsort(key[front], kind="stable")].tolist()
    others = np.flatnonzero(~(key <= last))
    yield from others[np.argsort(key[others], kind="stable")].tolist()
