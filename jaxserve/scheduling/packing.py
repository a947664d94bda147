"""What goes into a batch: first come, first served.

Decodes go first and every one that can runs; then the prefilling sequences get chunks, oldest first, up to `chunk_tokens` per home
lane; then waiting ones are admitted while there is a slot, a lane with budget, and pages for their first chunk beside one page for
every decode. When a decode finds no page, the youngest prefilling sequence leaves, else the youngest decode after it: nothing more of
it is issued, its tokens in flight still count, and once it is out of flight its pages go back and it waits again, at the place its age
gives it. Its output then is part of what it prefills, so nothing is sent twice and, sampling being a function of the position, nothing
changes. The oldest decode can make all others leave, and no request is accepted that does not fit alone: something always runs.

With P stages a batch takes one P-th of the decodes, those issued longest ago, and none whose last token is still on its way through the
stages, unless there is nothing else to do: so P batches in flight fill the stages, and prefill chunks the gaps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxserve.cache import CacheManager
from jaxserve.config import MeshConfig, SchedulerConfig
from jaxserve.scheduling.batch import Batch
from jaxserve.scheduling.roster import DECODE, LEAVING, Roster
from jaxserve.scheduling.sequence import Sequence


class Chunk(NamedTuple):
    """A prefill chunk that was given pages; `admitted`: the first of its sequence."""

    slot: int
    start: int
    length: int
    admitted: bool

    @property
    def stop(self) -> int:
        return self.start + self.length


class Packer:
    def __init__(self, config: SchedulerConfig, mesh: MeshConfig, cache: CacheManager, roster: Roster):
        self.config, self.mesh, self.cache, self.roster = config, mesh, cache, roster
        self._refused = (-1, 0)                       # the waiting sequence that did not fit, and the pages it was offered

    def pack(self, number: int, now: float) -> tuple[Batch, list[Chunk]] | None:
        """Batch `number` and its prefill chunks, issued as far as the roster goes; None where nothing can run."""
        decodes = self._decodes(number)
        chunks = self._prefills(now)
        if not chunks and not decodes.size and self.mesh.spp > 1:
            decodes = self._decodes(number, hurry=True)
        return (self._batch(number, decodes, chunks), chunks) if chunks or decodes.size else None

    def _batch(self, number: int, decodes: np.ndarray, chunks: list[Chunk]) -> Batch:
        roster, cache, slots, fed = self.roster, self.cache, decodes, decodes.size
        if chunks:
            slots = np.concatenate([decodes, np.array([chunk.slot for chunk in chunks], np.intp)])
        start, length, feed = roster.issued[slots], np.ones(slots.size, np.int32), np.ones(slots.size, bool)
        tokens = np.empty(0, np.int32)
        if chunks:
            start[fed:], length[fed:], feed[fed:] = [chunk.start for chunk in chunks], [chunk.length for chunk in chunks], False
            tokens = np.concatenate([roster.sequence[chunk.slot].history(chunk.start, chunk.stop) for chunk in chunks])
        roster.issued[decodes] += 1
        roster.flying[slots] += 1
        roster.last[slots] = number
        return Batch(
            number=number, seq=roster.number[slots], slot=slots.astype(np.int32), lane=cache.home[slots], start=start, length=length,
            feed=feed, sample=roster.phase[slots] == DECODE, spread=cache.spread[slots], held=cache.held[slots], tokens=tokens,
            deltas=cache.take_deltas(), admitted=tuple(row for row, chunk in enumerate(chunks, fed) if chunk.admitted),
        )

    def _decodes(self, number: int, hurry: bool = False) -> np.ndarray:
        """Slots whose next token is decoded, each with a page for it. In a `hurry` also those whose last token is on its way."""
        roster, stages = self.roster, self.mesh.spp
        ready = np.flatnonzero((roster.phase == DECODE) & (roster.issued < roster.end))
        share = -(-ready.size // stages)
        if stages > 1 and not hurry:
            ready = ready[(roster.last[ready] <= number - stages) | (roster.flying[ready] == 0)]
        short = ready[roster.issued[ready] == self.cache.room[ready]]
        if short.size and short.size <= self.cache.available:
            for slot in short.tolist():
                self.cache.extend(slot, 1)
        elif short.size:
            for slot in short[np.argsort(roster.number[short])].tolist():
                if roster.phase[slot] == DECODE:                  # else it has left for an older one
                    self._claim(slot)
            ready = ready[(roster.phase[ready] == DECODE) & (roster.issued[ready] < self.cache.room[ready])]
        return ready if stages == 1 else np.sort(ready[np.argsort(roster.last[ready], kind="stable")[:share]])

    def _claim(self, slot: int) -> None:
        """A page for a decode, if need be from a sequence that leaves for it; none while pages are on their way back."""
        roster = self.roster
        while not self.cache.available and not roster.draining:
            younger = np.flatnonzero((roster.phase == DECODE) & (roster.number > roster.number[slot]))
            if roster.prefilling:
                roster.withdraw(roster.prefilling[-1], LEAVING)
            elif younger.size:
                roster.withdraw(roster.sequence[younger[np.argmax(roster.number[younger])]], LEAVING)
            else:
                return
        if self.cache.available:
            self.cache.extend(slot, 1)

    def _prefills(self, now: float) -> list[Chunk]:
        """Chunks of prefilling sequences, then of newly admitted ones."""
        roster = self.roster
        if not (roster.prefilling or (roster.queue and roster.free)):
            return []
        chunks: list[Chunk] = []
        budget = [self.config.chunk_tokens] * self.mesh.kvp
        reserve = int(np.count_nonzero(roster.phase == DECODE))
        if not reserve:
            self._clear_way()
        for sequence in tuple(roster.prefilling):
            if left := budget[self.cache.home[sequence.slot]]:
                length = self._fitting(sequence, left, reserve)
                if not length:
                    return chunks
                chunks.append(self._chunk(sequence, length, budget))
        while roster.queue and roster.free and any(budget) and (chunk := self._admit(budget, reserve, now)):
            chunks.append(chunk)
        return chunks

    def _clear_way(self) -> None:
        """Without decodes the oldest prefilling sequence must go on: the youngest leave until there is a page for it."""
        roster, line = self.roster, self.roster.prefilling
        while len(line) > 1 and not self._fitting(line[0], 1, 0) and not roster.draining:
            roster.withdraw(line[-1], LEAVING)

    def _fitting(self, sequence: Sequence, most: int, reserve: int) -> int:
        """Length of the sequence's next chunk, 0 where there are no pages."""
        spare = max(self.cache.available - reserve, 0)
        start, room = int(self.roster.issued[sequence.slot]), int(self.cache.room[sequence.slot])
        return min(sequence.target - start, most, room + spare * self.cache.block_size - start)

    def _admit(self, budget: list[int], reserve: int, now: float) -> Chunk | None:
        """The first chunk of the oldest waiting sequence, if there are pages for it."""
        sequence, cache = self.roster.queue[0], self.cache
        spare = cache.available - reserve
        if spare <= (self._refused[1] if self._refused[0] == sequence.number else 0):
            return None
        pages = cache.match(sequence.chain, (sequence.target - 1) // cache.block_size) if sequence.reads_cache else []
        start = len(pages) * cache.block_size
        need = cache.blocks(min(start + max(budget), sequence.target)) - len(pages)
        if need > spare - cache.evictable(pages):
            self._refused = sequence.number, spare
            return None
        slot = self.roster.enter(sequence, start)
        cache.admit(slot, pages, [lane for lane, left in enumerate(budget) if left], need)
        if sequence.started is None:
            sequence.started, sequence.cached = now, start
        return self._chunk(sequence, min(sequence.target - start, budget[cache.home[slot]]), budget, admitted=True)

    def _chunk(self, sequence: Sequence, length: int, budget: list[int], admitted: bool = False) -> Chunk:
        """Issues the sequence's next tokens. Their share of the budget is in whole tiles, as the device computes them."""
        slot, roster, tile = sequence.slot, self.roster, self.config.tile
        chunk = Chunk(slot, int(roster.issued[slot]), length, admitted)
        self.cache.extend(slot, self.cache.blocks(chunk.stop) - len(self.cache.tables[slot]))
        home = self.cache.home[slot]
        budget[home] = max(0, budget[home] - -(-length // tile) * tile)
        roster.issued[slot] = chunk.stop
        if chunk.stop == sequence.target:
            roster.phase[slot] = DECODE
            roster.prefilling.remove(sequence)
        return chunk
