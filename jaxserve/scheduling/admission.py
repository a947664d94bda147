"""Whether there are pages for a prompt that waits.

A prompt is admitted when there are pages for all of it, beside what was promised to those admitted before and one for every decode: so no
prefill has to evict another. Large prompts leave a part of the pages to small ones, and small ones pass a large one that waits for pages
as long as together they hold no more than that part: a document that does not fit yet holds up no chat, and no stream of chats keeps a
document out. Among the large, and among the small, nobody passes one that waits.
"""

from __future__ import annotations

from jaxserve.cache import CacheManager
from jaxserve.scheduling.roster import Roster
from jaxserve.scheduling.sequence import Sequence

LARGE = 1 / 64                                        # of all pages: prompts that take more are large
KEPT = 1 / 8                                          # of all pages, which large prompts leave to small ones


class Admission:
    """`open` tells whether anybody can still be admitted in this step; see `begin`."""

    def __init__(self, cache: CacheManager, roster: Roster):
        self.cache, self.roster = cache, roster
        self.open = True
        self._refused: dict[int, tuple[bool, int]] = {}       # who did not fit, by number: if it is large, the pages it was offered

    def begin(self, reserve: int) -> None:
        """A step in which decodes need `reserve` pages."""
        self._before, self._refused = self._refused, {}
        self._reserve, self._waits = reserve, self.cache.total        # `_waits`: pages for small ones while a large one waits
        roster, cache, large = self.roster, self.cache, self.roster.large
        promised = [(cache.blocks(s.target) - len(cache.tables[s.slot]), bool(large[s.slot])) for s in roster.prefilling]
        self._spare = cache.available - self._reserve - sum(pages for pages, _ in promised)
        self._small = int(cache.held[~large].sum()) + sum(pages for pages, big in promised if not big)
        self.open = bool(roster.free)

    def entered(self, sequence: Sequence, large: bool, held: int) -> None:
        """A sequence has got its slot, and with its first blocks so many pages that were nobody's: there are fewer for others."""
        blocks = self.cache.blocks(sequence.target)
        self._spare -= held + blocks - len(self.cache.tables[sequence.slot])
        self._small += 0 if large else blocks
        self.open = bool(self.roster.free)

    def may(self, sequence: Sequence) -> bool:
        """Whether it is worth asking for a waiting sequence: a long one is passed over while a large one waits, cached or not."""
        return self.open and (self._waits == self.cache.total or sequence.target <= LARGE * self.cache.total * self.cache.block_size)

    def large(self, sequence: Sequence, cached: int) -> bool:
        """Whether its prompt is, apart from the first `cached` blocks."""
        return self.cache.blocks(sequence.target) - cached > LARGE * self.cache.total

    def match(self, sequence: Sequence) -> list[int] | None:
        """Pages that hold a waiting sequence's first blocks; None where it has to wait on."""
        cache, need = self.cache, self.cache.blocks(sequence.target)
        large, offered = self._before.get(sequence.number, (False, -2))
        if self._offer(need, large) <= offered:                                    # no more than when it did not fit
            self._refuse(sequence, need, large, offered)
            return None
        pages = cache.match(sequence.chain, (sequence.target - 1) // cache.block_size) if sequence.reads_cache else []
        large = self.large(sequence, len(pages))
        offer = self._offer(need, large)
        if need - len(pages) > offer - cache.evictable(pages):
            self._refuse(sequence, need, large, offer)
            return None
        return pages

    def _kept(self, need: int) -> int:
        """Pages that small prompts may hold while a large one waits; fewer than KEPT where it could not run beside them."""
        return max(0, min(int(KEPT * self.cache.total), self.cache.total - need - self._reserve))

    def _offer(self, need: int, large: bool) -> int:
        """Pages for a prompt; -1 where another one comes first."""
        if not large:
            return min(self._spare, self._waits - self._small)
        return self._spare - max(0, self._kept(need) - self._small) if self._waits == self.cache.total else -1

    def _refuse(self, sequence: Sequence, need: int, large: bool, offer: int) -> None:
        self._refused[sequence.number] = large, offer
        if large:
            self._waits = min(self._waits, self._kept(need))
        else:
            self.open = False
