"""Pages that admission keeps free for what running sequences will still put out, so that no decode
has to be preempted for want of a page (medha.md M8)."""

from __future__ import annotations

import math

import numpy as np

from jaxserve.cache import CacheManager
from jaxserve.scheduling.completion_lengths import CompletionLengths
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.slots import DECODE, PREFILL, SlotTable

UNKNOWN_TOKENS = 256  # that a completion is taken to put out until one has ended


class DecodeReserve:
    """Predicts the pages: each sequence goes on for as long as completions do on average, and no
    longer than it may. share: of all pages, the most that are kept free; with 0 a page for each
    decode. Below 1 decodes may have to be preempted; with 1 each sequence has pages for all that it
    may put out, whatever others did on average, and none is ever preempted."""

    def __init__(
        self, cache: CacheManager, slots: SlotTable, lengths: CompletionLengths, share: float
    ):
        self._cache = cache
        self._slots = slots
        self._lengths = lengths
        self._most = int(share * cache.total)
        self._certain = share == 1.0

    def by_slot(self) -> np.ndarray:
        """Pages [slots] of the sequences that run, beside those of their prompts."""
        running, growth = self.of_running()
        pages = np.zeros(len(self._slots.phase), growth.dtype)
        pages[running] = growth
        return pages

    def of_running(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the slots [n] of the sequences that run, and their pages [n]."""
        slots = self._slots
        runs = ((slots.phase == DECODE) | (slots.phase == PREFILL)).nonzero()[0]
        start = slots.issued.copy()
        for sequence in slots.prefilling:
            start[sequence.slot] = sequence.prefill_len
        return runs, self._growth(start[runs], slots.max_positions[runs])

    def of(self, sequence: Sequence) -> int:
        """Pages of a sequence that waits, beside those of its prompt."""
        start, limit = sequence.prefill_len, sequence.max_positions
        end = limit if self._certain else min(start + self._tokens, limit)
        pages = self._cache.needs.of
        return self.bounded(int(max(pages(end) - pages(start), 0)))

    def bounded(self, pages: int) -> int:
        """Returns the part of these pages that is kept free at most."""
        return min(pages, self._most)

    def _growth(self, start: np.ndarray, limit: np.ndarray) -> np.ndarray:
        """Predicts pages [n] from positions `start` [n] to the ends of sequences, at `limit` [n] at
        last."""
        pages = self._cache.needs.of
        end = limit
        if not self._certain:
            end = np.minimum(start + self._tokens, limit)
        return np.maximum(pages(end) - pages(start), 0)

    @property
    def _tokens(self) -> float:
        """Tokens that a sequence is taken to put out yet."""
        tokens = self._lengths.remaining
        return UNKNOWN_TOKENS if tokens == math.inf else tokens
