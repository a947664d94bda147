"""Admits waiting prompts as far as there are pages, with a reserve for small prompts.

A prompt is admitted when there are pages for all of it and for what it is expected to put out,
beside those promised to what was admitted before and those that decodes are expected to take
(`decode_reserve`): so no prefill has to preempt another, and no decode is preempted as long as
completions are no longer than expected, with a reserve of 1 never. Where nothing else runs, its
prompt has to fit. Large prompts leave a part of all pages to small ones. A large prompt that is
first in the order and does not fit claims the pages that come free: until it is admitted, small
prompts together hold no more than their part, with what they are expected to put out, even those
that rank before it. So a document that does not fit yet holds up no chat, and no stream of chats
keeps a document out. No large prompt passes another that waits for pages, and no small one another
small one.

The blocks that a prompt finds when it comes are promised to it while it waits: prompts are admitted
beside them. Where one does not fit, promises to prompts that are due later are given up, and where
nothing runs any that are in its way, and leases after them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Sequenced

import numpy as np

from jaxserve.cache import NO_MATCH, CacheManager
from jaxserve.cache.copies import PrefixCopies
from jaxserve.cache.prefix_match import ReachablePrefix
from jaxserve.scheduling.decode_reserve import DecodeReserve
from jaxserve.scheduling.reclaim import Reclaim
from jaxserve.scheduling.sequence import NO_SLOT, Sequence
from jaxserve.scheduling.shares import DEBTORS_STEP
from jaxserve.scheduling.slots import SlotTable

SMALL_PROMPT = 1 / 64  # share of all pages: the most that a small prompt takes, cached or not
SMALL_PROMPT_RESERVE = 1 / 8  # share of all pages that large prompts leave to small ones
# share of slots and pages that tenants which used more than their share of the time leave to others
TENANT_RESERVE = 1 / 16
# (large prompts, small prompts): whether more of them can be admitted in this step
ALL = (True, True)
NONE = (False, False)


class SmallPromptPages:
    """Counts the pages held by sequences that were admitted as small prompts, each page once.

    It watches the cache, so that what these sequences generate counts too. `is_small` [slots] says
    which slots have such a sequence.
    """

    def __init__(self, cache: CacheManager):
        self.is_small = np.zeros(len(cache.layouts), bool)
        self.count = 0
        self._holders = [0] * cache.total  # small sequences that hold a page
        cache.watchers.append(self)

    def among(self, pages: np.ndarray) -> int:
        """Returns how many of these pages are counted already."""
        return sum(self._holders[page] > 0 for page in pages.tolist())

    def taken(self, slot: int, pages: Sequenced[int]) -> None:
        if self.is_small[slot]:
            for page in pages:
                self.count += self._holders[page] == 0
                self._holders[page] += 1

    def released(self, slot: int, pages: Sequenced[int]) -> None:
        if self.is_small[slot]:
            for page in pages:
                self._holders[page] -= 1
                self.count -= self._holders[page] == 0

    def check(self, tables: list[list[int]]) -> None:
        """Compares with the slots' page tables. Errors: AssertionError with what differs."""
        counted = Counter(
            page for table, small in zip(tables, self.is_small) if small for page in table
        )
        counts = {page: holders for page, holders in enumerate(self._holders) if holders}
        assert counts == counted, f"pages of small prompts {counts}, counted {dict(counted)}"
        assert self.count == len(counted), (
            f"{self.count} pages of small prompts, counted {len(counted)}"
        )


class PageAdmission:
    """Admits waiting sequences one by one, in the order of the policy.

    Each step begins with `begin`; then `match` answers for one sequence whether it fits, and
    `admit` gives it its slot and pages. `small_tokens` is the length of the longest small prompt.
    `max_running`, if given, is the number of sequences that may have a slot, by the tightest
    objective per output token in seconds. copies: chooses among pages that have the same block, and
    copies prefixes; None: no block is copied. reclaim: takes slots and pages from tenants that have
    more than their part. allows: says which waiting sequences may have a slot just now; None: all.
    """

    def __init__(
        self,
        cache: CacheManager,
        slots: SlotTable,
        decode_reserve: DecodeReserve,
        reclaim: Reclaim,
        max_running: Callable[[float], int] | None = None,
        copies: PrefixCopies | None = None,
    ):
        self.cache = cache
        self.copies = copies
        self.slots = slots
        self.decode_reserve = decode_reserve
        self.reclaim = reclaim
        self.max_running = max_running
        self._small_pages = int(SMALL_PROMPT * cache.total)  # the most that a small prompt takes
        self.small_tokens = self._small_pages // cache.needs.per_block * cache.block_size
        self._held_by_small = SmallPromptPages(cache)
        self.allows: Callable[[Sequence], bool] | None = None
        self._open = ALL
        self._tpot = math.inf  # the tightest objective per token, where `max_running` asks for it
        self._room = 0  # pages beyond those that the sequence matched last takes
        self._claimant: Sequence | None = None  # the large prompt that claims pages

    def make_way(self) -> None:
        """Takes slots and pages from tenants that have more than their part of them, for waiting
        prompts. To be called before a step is packed."""
        if len(self.slots.shares) < 2 or self.allows is not None:
            return
        limit = len(self.slots.phase)
        if self.max_running is not None:
            limit = min(limit, self.max_running(self.slots.tightest()))
        self.reclaim.make_way(limit)

    def begin(self, reserve: int) -> None:
        """Begins a step in which decodes need `reserve` pages."""
        cache = self.cache
        promised = 0
        promised_to_small = 0
        for sequence in self.slots.prefilling:
            pages = cache.needs.left(cache.layouts[sequence.slot], sequence.prefill_len)
            promised += pages
            if self._held_by_small.is_small[sequence.slot]:
                promised_to_small += pages
        self._reserve = reserve
        running, growth = self.decode_reserve.of_running()
        kept = self.decode_reserve.bounded(int(np.add.reduce(growth)))
        apart = cache.total - cache.usable  # on lanes with too few for a block of all page groups
        self._spare = cache.available_unlocked - apart - max(reserve, kept) - promised
        # pages held, promised or expected
        self._of_small = self._held_by_small.count + promised_to_small
        self._of_small += int(np.add.reduce(growth[self._held_by_small.is_small[running]]))
        if self.max_running is not None:
            self._tpot = self.slots.tightest()
        self._open = ALL if self._has_slot() else NONE
        claimant = self._claimant
        if claimant is not None and not (self._waits(claimant) and self._allows(claimant)):
            self._claimant = None

    def _waits(self, sequence: Sequence) -> bool:
        return sequence.slot == NO_SLOT and sequence.number in self.slots.by_number

    def _allows(self, sequence: Sequence) -> bool:
        return self.allows is None or self.allows(sequence)

    def _is_behind(self, sequence: Sequence) -> bool:
        """Returns whether a sequence's tenant leaves some slots and pages to others, as it has used
        more than its share."""
        shares = self.slots.shares
        return len(shares) > 1 and bool(shares.turns[sequence.tenant])

    def _has_slot(self, reserve: float = 0.0, step: float = 1.0) -> bool:
        """Returns whether one more sequence may have a slot, beside a share of all slots that is
        kept free. step: share of the tightest objective per token that steps may take."""
        free = len(self.slots.free)
        if not free:
            return False
        limit = len(self.slots.phase)
        running = limit - free
        if self.max_running is not None:
            limit = min(limit, self.max_running(step * self._tpot))
        return running < limit - int(reserve * limit)

    @property
    def open(self) -> bool:
        """True if any prompt can still be admitted in this step."""
        return any(self._open)

    def is_small(self, sequence: Sequence) -> bool:
        return sequence.prefill_len <= self.small_tokens

    def may(self, sequence: Sequence) -> bool:
        """Returns whether prompts of the waiting sequence's size, and with its adapter, can still
        be admitted in this step."""
        if not (self._open[self.is_small(sequence)] and self._allows(sequence)):
            return False
        return self.slots.adapters.may(sequence.request.adapter)

    def match(self, sequence: Sequence) -> np.ndarray | None:
        """Returns pages that hold a waiting sequence's first blocks already; None if it must wait,
        and with it others of its size in this step."""
        behind = self._is_behind(sequence)
        if behind and not self._has_slot(TENANT_RESERVE, DEBTORS_STEP):
            self._open = NONE  # those after it are not of an earlier turn
            return None
        small = self.is_small(sequence)
        pages = self._cached_pages(sequence)
        need, matched = self._needed(sequence, pages)
        reserve = self._kept_for_small(sequence, need)
        left_to_small = max(0, reserve - self._of_small)
        growth = self._growth(sequence)
        if behind and not self._nothing_runs:
            growth += int(TENANT_RESERVE * self.cache.usable)
        claimed = small and self._claimant is not None
        if claimed and need + growth - self._held_by_small.among(matched) > left_to_small:
            self._open = (self._open[0], False)
            return None
        if small:  # also one that needs more pages for the states that it goes on from
            left_to_small = 0
        room = self._room_beside(matched, need, growth, left_to_small)
        while room < 0 and self._take_promised(sequence, -room):
            room = self._room_beside(matched, need, growth, left_to_small)
        if room < 0 and len(pages) and self._nothing_runs:
            # what it would go on from is in its way: pages of the checkpoint beside its own
            sequence.prefix_match = NO_MATCH
            pages = NO_MATCH.pages
            need, matched = self._needed(sequence, pages)
            room = self._room_beside(matched, need, growth, left_to_small)
        if room >= 0:
            self._room = room
            return pages
        self.reclaim.lacks(sequence, -room)
        if small:
            self._open = NONE
        else:
            self._claimant = sequence
            self._open = (False, self._open[1])
        return None

    def _room_beside(self, pages: np.ndarray, need: int, growth: int, left_to_small: int) -> int:
        """Returns how many pages are to spare beside a prompt that needs `need`, the matched ones
        among them; less than 0 where it does not fit."""
        takes = self._taken(need, pages)
        spare = self._spare - growth
        if takes > self._small_pages:
            spare -= left_to_small
        return spare - takes

    def _take_promised(self, sequence: Sequence, missing: int) -> bool:
        """Has the promise given up that is due last, if that is later than a sequence which lacks
        `missing` pages. Returns whether there was one."""
        cache = self.cache
        before = cache.available_unlocked
        if missing > cache.available - before:
            return False
        due = -math.inf if self._nothing_runs else sequence.ttft_deadline
        given_up = cache.sessions.give_up_later(-math.inf)
        if not given_up:
            given_up = cache.promises.give_up_later(due, but=sequence.number)
        if not given_up and self._nothing_runs:
            given_up = cache.leases.give_up_later(due)
        if not given_up and self._nothing_runs:
            # its own is in its way where windows see other pages than when it came
            cache.promises.release(sequence.number)
            given_up = cache.available_unlocked > before
        self._spare += cache.available_unlocked - before
        return given_up

    def promise(self, sequence: Sequence) -> None:
        """Promises a sequence that has just come to wait the blocks that are known of it."""
        if sequence.reads_cache:
            blocks = (sequence.prefill_len - 1) // self.cache.block_size
            sequence.prefix_match = self.cache.promise(
                sequence.number, sequence.ttft_deadline, sequence.block_hashes, blocks
            )

    def nearest(self, sequence: Sequence, pages: np.ndarray, home: int) -> np.ndarray:
        """Returns, for the pages that were matched last, the copies that their sequence should read
        with this home lane; the pages themselves where it does not fit with these."""
        if self.copies is None:
            return pages
        near = self.copies.nearest(pages, home)
        more = self._taken(*self._needed(sequence, near))
        more -= self._taken(*self._needed(sequence, pages))
        return near if more <= self._room else pages

    def _growth(self, sequence: Sequence) -> int:
        """Pages for what a waiting sequence will put out; none where nothing runs beside it."""
        return 0 if self._nothing_runs else self.decode_reserve.of(sequence)

    @property
    def _nothing_runs(self) -> bool:
        return len(self.slots.free) == len(self.slots.phase)

    def _cached_pages(self, sequence: Sequence) -> np.ndarray:
        """Pages of the sequence's first blocks; its last token is always computed."""
        if not sequence.reads_cache:
            return NO_MATCH.pages
        blocks = (sequence.prefill_len - 1) // self.cache.block_size
        sequence.prefix_match = self.cache.match(
            sequence.block_hashes, blocks, sequence.prefix_match
        )
        return sequence.prefix_match.pages

    def _needed(
        self, sequence: Sequence, pages: np.ndarray, prefix: ReachablePrefix | None = None
    ) -> tuple[int, np.ndarray]:
        """Returns how many pages a sequence takes with these matched ones, or those of a prefix,
        and those of them that are there: of all page groups, and of the checkpoint of states that
        it goes on from."""
        cache = self.cache
        prefix = prefix or cache.published.matched(pages, sequence.block_hashes)
        return cache.needs.of(sequence.prefill_len) + prefix.checkpoint_pages, prefix.on_pages

    def _taken(self, need: int, there: np.ndarray) -> int:
        """Returns how many pages are no more to be had once a sequence has the `need` that it
        takes, of which those that are `there` may be held already."""
        return need - len(there) + self.cache.pages.evictable(there)

    def fits(
        self, sequence: Sequence, pages: np.ndarray, prefix: ReachablePrefix, home: int
    ) -> bool:
        """Returns whether a sequence that was matched last, with these pages, also fits where it
        takes those of a prefix instead, with this home lane."""
        more = self._taken(*self._needed(sequence, pages, prefix))
        more -= self._taken(*self._needed(sequence, pages))
        return more <= self._room and self._has_pages_beside(prefix, home)

    def _has_pages_beside(self, prefix: ReachablePrefix, home: int) -> bool:
        """Returns whether the lanes that have pages of a prefix also have some for what is missing
        beside these, and the home lane for the checkpoint of states behind it."""
        pages = self.cache.pages
        if pages.lanes == 1:
            return True
        beside = [
            part.block
            for part in prefix.missing
            if part.block < len(prefix.pages) and not part.of_states
        ]
        need = pages.count_by_lane(prefix.pages[beside])
        need[home] += prefix.checkpoint_pages - len(prefix.states)
        if not need.any():
            return True
        taken = prefix.on_pages[pages.refs[prefix.on_pages] == 0]
        left = pages.available() - pages.count_by_lane(taken)
        return bool((left >= need).all())

    def admit(
        self,
        sequence: Sequence,
        pages: np.ndarray,
        home: int,
        prefix: ReachablePrefix | None = None,
    ) -> None:
        """Gives a waiting sequence a slot, the home lane and the matched pages. prefix: that has
        these, where more of it is to be fetched."""
        cache = self.cache
        small = self.is_small(sequence)
        blocks = cache.blocks(sequence.prefill_len)
        need, matched = self._needed(sequence, pages, prefix)
        growth = self.decode_reserve.of(sequence)  # also where nothing ran beside it so far
        self._spare -= self._taken(need, matched) + growth
        if small:
            self._of_small += need - self._held_by_small.among(matched) + growth
        slot = self.slots.admit(sequence, max(len(pages) * cache.block_size, sequence.received))
        self._held_by_small.is_small[slot] = small
        if prefix is None and sequence.received:
            received = sequence.received // cache.block_size
            prefix = cache.published.matched(pages, sequence.block_hashes, received)
        retention = sequence.request.cache_retention
        cache.admit(slot, pages, home, blocks, retention, sequence.block_hashes, prefix)
        if self.copies is not None:
            self.copies.admitted(slot, pages)
        cache.extend(slot, max(cache.blocks(sequence.received) - len(pages), 0))
        self._tpot = min(self._tpot, sequence.tpot)
        if not self._has_slot():
            self._open = NONE
        if self._claimant is sequence:
            self._claimant = None

    def _kept_for_small(self, sequence: Sequence, need: int) -> int:
        """Pages that small prompts may hold while a large one waits, which is the sequence that
        `need`s these pages, or the claimant: all without one, and fewer than SMALL_PROMPT_RESERVE
        if it could not run beside them."""
        total = self.cache.usable
        if self.is_small(sequence):
            if self._claimant is None:
                return total
            need = self.cache.needs.of(self._claimant.prefill_len)
        beside = total - need - self._reserve
        return max(0, min(int(SMALL_PROMPT_RESERVE * total), beside))

    def check(self) -> None:
        """Checks the counts of pages. Errors: AssertionError with what differs."""
        self._held_by_small.check([layout.held() for layout in self.cache.layouts])
