"""Whether there are pages for a prompt that waits.

A prompt is admitted when there are pages for all of it, beside what was promised to those admitted
before and one for every decode: so no prefill has to evict another. Those that take many leave a
part of them to small prompts. A large prompt whose turn has come and that does not fit claims the
pages that come free: from then on, until it has come in, small ones hold no more than that part,
whoever's turn it is. So a document that does not fit yet holds up no chat, and no stream of chats
keeps a document out. Among the large, and among the small, nobody passes one that waits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxserve.cache import CacheManager
from jaxserve.scheduling.sequence import NO_SLOT, Sequence
from jaxserve.scheduling.slots import SlotTable

LARGE = 1 / 64  # of all pages: prompts that take more, cached or not, are large
KEPT = 1 / 8  # of all pages, which large prompts leave to small ones
# whether any more large prompts, and any small ones, can come in in this step
ALL = (True, True)
NOBODY = (False, False)


class PageAdmission:
    """Asked for one prompt after the other, in the order of the policy. `small_tokens` is how long
    a small prompt is at most."""

    def __init__(self, cache: CacheManager, roster: SlotTable):
        self.cache = cache
        self.roster = roster
        self._few = int(LARGE * cache.total)
        self.small_tokens = self._few * cache.block_size
        # sequences that may have a slot beside one with such an objective per token
        self.most: Callable[[float], int] | None = None
        self._open = ALL
        self._claim: Sequence | None = None  # a large one that waits for pages

    def begin(self, reserve: int) -> None:
        """A step in which decodes need `reserve` pages."""
        roster = self.roster
        cache = self.cache
        promised = [
            (cache.blocks(s.prefill_len) - len(cache.tables[s.slot]), bool(cache.small[s.slot]))
            for s in roster.prefilling
        ]
        self._reserve = reserve
        self._spare = cache.available - reserve - sum(pages for pages, _ in promised)
        self._small = cache.small_pages + sum(pages for pages, small in promised if small)
        self._tpot = roster.tightest()
        self._open = ALL if self._slots else NOBODY
        if self._claim is not None and (
            self._claim.slot != NO_SLOT or self._claim.number not in roster.by_number
        ):
            self._claim = None

    @property
    def _slots(self) -> bool:
        """Whether there is a slot for one more."""
        free = len(self.roster.free)
        slots = len(self.roster.phase)
        return free > 0 and (self.most is None or slots - free < self.most(self._tpot))

    @property
    def open(self) -> bool:
        """Whether anybody can still be admitted in this step."""
        return any(self._open)

    def is_small(self, sequence: Sequence) -> bool:
        return sequence.prefill_len <= self.small_tokens

    def may(self, sequence: Sequence) -> bool:
        """Whether it is worth asking for a waiting sequence."""
        return self._open[self.is_small(sequence)]

    def match(self, sequence: Sequence) -> np.ndarray | None:
        """Pages that hold a waiting sequence's first blocks; None where it has to wait on."""
        cache = self.cache
        small = self.is_small(sequence)
        need = self.cache.blocks(sequence.prefill_len)
        pages = cache.match(
            sequence.block_hashes,
            (sequence.prefill_len - 1) // cache.block_size if sequence.reads_cache else 0,
        )
        # for small ones
        left = max(0, self._kept(sequence if not small else self._claim) - self._small)
        takes = need - len(pages) + cache.evictable(pages)
        spare = self._spare - (left if takes > self._few else 0)
        if small and self._claim is not None and need - cache.in_small(pages) > left:
            self._open = self._open[0], False
        elif takes <= spare:
            return pages
        elif small:
            self._open = NOBODY
        else:
            self._claim = sequence
            self._open = (False, self._open[1])
        return None

    def admit(self, sequence: Sequence, pages: np.ndarray, home: int) -> None:
        """Gives a waiting sequence its slot, its home lane and the matched pages."""
        cache = self.cache
        small = self.is_small(sequence)
        blocks = self.cache.blocks(sequence.prefill_len)
        self._spare -= blocks - len(pages) + cache.evictable(pages)
        self._small += blocks - cache.in_small(pages) if small else 0
        slot = self.roster.admit(sequence, len(pages) * cache.block_size)
        cache.admit(slot, pages, home, small, blocks)
        self._tpot = min(self._tpot, sequence.tpot)
        self._open = self._open if self._slots else NOBODY
        self._claim = None if self._claim is sequence else self._claim

    def _kept(self, large: Sequence | None) -> int:
        """Pages that small prompts may hold while a large one waits; fewer than KEPT where it could
        not run beside them."""
        if large is None:
            return self.cache.total
        return max(
            0,
            min(
                int(KEPT * self.cache.total),
                self.cache.total - self.cache.blocks(large.prefill_len) - self._reserve,
            ),
        )
