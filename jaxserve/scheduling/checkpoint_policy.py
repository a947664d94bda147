"""Decides where the states of sequences are kept (`cache.state_checkpoints`), by what that costs
and saves.

A checkpoint costs pages, which hold other prefixes as well, and where a chunk has to end for it, a
step more. It saves computing the tokens before it, once another sequence begins alike. So states
are kept

- where other sequences have left this one: behind the last block that it found published without a
  checkpoint, and behind a prompt whose further completions wait for it. That they will be used is
  known; a chunk ends there where one step costs less than the tokens do.
- behind the prompt of a job: it is computed for another replica.
- of long prompts, and of what follows them, at a distance in tokens, where a chunk ends or a block
  is full anyway: a document that is asked again, a conversation that goes on.

Marconi (Pan et al., MLSys 2025) keeps states at the same places.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jaxserve.cache import CacheManager
from jaxserve.cache.state_checkpoints import StateCheckpoints, StateCopies
from jaxserve.costs.predictor import Predictor
from jaxserve.scheduling.prefill_step import PrefillChunk
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.slots import SlotTable


class CheckpointPolicy:
    """Chooses the checkpoints of one cache with states. chunk: tokens of a step, of one prompt."""

    def __init__(
        self,
        cache: CacheManager,
        states: StateCheckpoints,
        slots: SlotTable,
        predictor: Predictor,
        chunk: int,
    ):
        self._cache = cache
        self._states = states
        self._spacing = states.spacing
        self._slots = slots
        self._predictor = predictor
        self._chunk = chunk
        self._wanted: dict[int, list[int]] = {}  # by slot: tokens behind which, ascending

    def admitted(self, sequence: Sequence) -> None:
        """Notes where a sequence that has just got its slot should leave checkpoints."""
        size = self._cache.block_size
        start = len(sequence.prefix_match.pages) * size
        met = len(sequence.prefix_match.published) * size
        end = (sequence.prefill_len - 1) // size * size
        wanted = {met, end} if len(sequence.request.completions) > 1 else {met}
        wanted = {stop for stop in wanted if self._is_worth_a_step(start, stop)}
        if sequence.request.job:
            wanted.add(end)
        self._wanted[sequence.slot] = sorted(wanted)

    def _is_worth_a_step(self, start: int, stop: int) -> bool:
        """Returns whether computing tokens `start` to before `stop` beside others takes longer than
        a step of one token."""
        if stop <= start:
            return False
        prefill = self._predictor.prefill
        return prefill(start, stop, self._chunk) > 2 * prefill(0, 1, self._chunk)

    def end(self, sequence: Sequence, start: int, stop: int) -> int:
        """Returns where a chunk of tokens `start` to before `stop` should end: there, or earlier
        for a checkpoint."""
        for wanted in self._wanted[sequence.slot]:
            if start < wanted < stop:
                return wanted
        if stop == sequence.prefill_len:
            return stop
        size = self._cache.block_size
        full = stop // size * size
        return full if full > start and self._is_due(sequence.slot, full) else stop

    def copies(self, decodes: np.ndarray, chunks: Iterable[PrefillChunk]) -> StateCopies:
        """Returns the copies of states of the batch with these decodes, by slot, and chunks: it
        restores what admitted sequences found, and saves what is wanted, as far as there is
        room."""
        size = self._cache.block_size
        for chunk in chunks:
            slot, stop = chunk.slot, chunk.stop
            wanted = stop in self._wanted[slot]
            if stop % size == 0 and (wanted or self._is_due(slot, stop)):
                self._save(slot, stop)
        stops = self._slots.issued[decodes]
        full = stops % size == 0
        for slot, stop in zip(decodes[full].tolist(), stops[full].tolist()):
            if self._is_due(slot, stop):
                self._save(slot, stop)
        return self._states.take()

    def _is_due(self, slot: int, tokens: int) -> bool:
        """Returns whether these first tokens of a slot are far from its newest checkpoint."""
        return tokens - self._states.reached(slot) * self._cache.block_size >= self._spacing

    def _save(self, slot: int, tokens: int) -> None:
        home = self._cache.layouts[slot].home
        self._states.save(slot, home, tokens // self._cache.block_size)
