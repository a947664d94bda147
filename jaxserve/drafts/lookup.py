"""Proposes what followed the last tokens of a sequence where they came before (prompt lookup;
Saxena, 2023): for edits, summaries and answers about a text, which repeat parts of it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

GRADES = 8  # tokens that are compared at most
WINDOW = 1 << 16  # last tokens that are searched: 20 microseconds
LEAST_ROOM = 64  # tokens of output for which there is room at first


class Proposal(NamedTuple):
    """Proposed tokens [k], and a grade, at least 1, of how sure they are; each further one is a
    grade surer if those before it were right."""

    tokens: np.ndarray
    grade: int


NOTHING = Proposal(np.empty(0, np.int32), 1)


class Lookup:
    """Searches the latest place with the longest match. The grade of a proposal is how many tokens
    matched. prompt [n] int32; output: list to which what is put out is appended."""

    def __init__(self, prompt: np.ndarray, output: list[int]):
        self._output = output
        self._prompt = len(prompt)
        self._tokens = np.empty(len(prompt) + LEAST_ROOM, np.int32)
        self._tokens[: len(prompt)] = prompt
        self._size = len(prompt)

    def propose(self, count: int) -> Proposal:
        """Returns `count` tokens, which go round what follows the match where that ends before;
        none without a match."""
        self._take_in()
        known = self._tokens[max(0, self._size - WINDOW) : self._size]
        last = len(known) - 1
        places = np.flatnonzero(known[:last] == known[last])
        if not places.size:
            return NOTHING
        grade = 1
        while grade < GRADES:
            before = places[places >= grade]
            longer = before[known[before - grade] == known[last - grade]]
            if not longer.size:
                break
            places = longer
            grade += 1
        follows = known[places[-1] + 1 :]
        return Proposal(follows[np.arange(count) % len(follows)], grade)

    def _take_in(self) -> None:
        """Takes in what was put out since the last proposal."""
        new = self._output[self._size - self._prompt :]
        size = self._size + len(new)
        if size > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty(size, np.int32)])
        self._tokens[self._size : size] = new
        self._size = size
