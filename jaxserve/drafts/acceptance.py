"""Learns how likely proposed tokens are right, by the grade of their proposal."""

from __future__ import annotations

import numpy as np

FIRST_RATE = 0.5  # of the lowest of several grades, until proposals were judged
OF_ALL = 0.02  # weight of a token in the rates of all sequences together
OF_ONE = 0.15  # and in those of its own sequence


def rising(grades: int) -> np.ndarray:
    """Returns first rates [grades], from `FIRST_RATE` on ever nearer to 1."""
    return 1 - FIRST_RATE / np.arange(1, grades + 1)


class Acceptance:
    """Shares of proposed tokens that were right, by grade, from 1 on; those above the last count as
    the last. first [grades]: the rates until proposals were judged."""

    def __init__(self, first: np.ndarray):
        self._first = first
        self._rates = first.copy()

    def begun(self, hopeful: bool) -> Acceptance:
        """Returns rates that begin as these. hopeful: half way to the first ones where those are
        higher."""
        one = Acceptance(self._first)
        one._rates = self._rates.copy()
        if hopeful:
            one._rates = np.maximum(self._rates, (self._rates + self._first) / 2)
        return one

    def chain(self, grade: int, count: int) -> np.ndarray:
        """Returns how likely the first tokens of a proposal are all right [count]: the first, the
        first two and so on."""
        places = np.minimum(np.arange(grade - 1, grade - 1 + count), len(self._rates) - 1)
        return np.cumprod(self._rates[places])

    def learn(self, grade: int, right: int, judged: int, weight: float) -> None:
        """Learns that of a proposal's first `judged` tokens `right` were right: all, or all but the
        last."""
        for place in range(judged):
            index = min(grade - 1 + place, len(self._rates) - 1)
            self._rates[index] += weight * ((place < right) - self._rates[index])


class Judged:
    """Judges the proposals for one sequence as its tokens come. of_all: what all sequences teach.
    hopeful: low rates are tried again, where they are learnt only if steps check tokens."""

    def __init__(self, of_all: Acceptance, hopeful: bool = False):
        self._of_all = of_all
        self._own = of_all.begun(hopeful)
        self._tokens: np.ndarray | None = None
        self._grade = 1
        self._first = 0

    def chain(self, grade: int, count: int) -> np.ndarray:
        """See `Acceptance.chain`."""
        return self._own.chain(grade, count)

    def expect(self, tokens: np.ndarray, grade: int, first: int) -> None:
        """Notes a proposal of which the first token is number `first` of the output."""
        self._tokens = tokens
        self._grade = grade
        self._first = first

    def judge(self, output: list[int]) -> None:
        """Compares the last proposal with what was put out since."""
        if self._tokens is None:
            return
        came = output[self._first : self._first + len(self._tokens)]
        right = 0
        while right < len(came) and came[right] == self._tokens[right]:
            right += 1
        judged = min(right + 1, len(came))
        self._own.learn(self._grade, right, judged, OF_ONE)
        self._of_all.learn(self._grade, right, judged, OF_ALL)
        self._tokens = None
