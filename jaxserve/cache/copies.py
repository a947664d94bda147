"""Copies blocks that many sequences read to other lanes, and chooses which copy a sequence reads.

Attention over blocks on other lanes needs an exchange in every layer, so a lane for the sequence
comes first: where one lane has all of its prefix, it is local there. A prefix that several
sequences read is copied whole to the home of one that reads it elsewhere, or, where its lanes are
read more than others, to the lane that is read least. Blocks of prompts that are dealt out over a
group are copied from lanes that are read more than their share to the least read one of the group,
the most read blocks first (TokenLake, 4.3). What is read from other lanes in any case is read from
the less read of two lanes that have it, segment by segment (TokenLake, 4.4).

Where layers have page tables of their own by window, a prefix is copied with those pages through
which its end is seen; a match reads a copy near its own end only where all that it sees is there.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxserve.cache.hashes import is_block
from jaxserve.cache.heavy_hitters import enough_for, most_read
from jaxserve.cache.manager import CacheManager
from jaxserve.lanes.groups import group_around

HOT = 3  # sequences that read a prefix which is copied
OVERLOADED = 1.1  # times the mean of what lanes are read
SPARE = 1 / 4  # share of a lane's pages that a copied prefix leaves to others
PATIENCE = 64  # batches without room for any page of a prefix, after which it is given up
LEVEL_EVERY = 256  # batches


class _Job(NamedTuple):
    """A prefix on its way to a lane. waits: batches that have copied none of it, one item each."""

    keys: list[bytes]  # of its blocks, in order, and behind them of the further pages
    waits: list[int]


class PrefixCopies:
    """Chooses copies for the sequences of one cache, and has prefixes copied."""

    def __init__(self, cache: CacheManager):
        self.cache = cache
        self._pages = cache.pages
        self._seen = cache.published.seen
        self._jobs: dict[int, _Job] = {}  # by the lane to which the prefix is copied
        # slots whose own blocks follow a prefix home, with the blocks of each that could when it
        # was looked at last: those that are full
        self._settling: dict[int, int] = {}
        self._random = random.Random(0)
        self._batches = 0

    # --- what a sequence reads

    def nearest(self, pages: np.ndarray, home: int) -> np.ndarray:
        """Returns for the matched `pages` [n] of a sequence's first blocks the copies [n] that it
        should read from this home lane: those at home; else, of the lanes of home's group before
        others, the less read of two, the same for all blocks of a segment. Where all but the last
        few, of a stripe at most, are at home, it returns those alone: to compute the others again
        takes less than to read them from another lane ever after."""
        if not self._pages.copied or not len(pages):
            return pages
        group = group_around(home, self.cache.placement.pool)
        reads = self.cache.reads.tolist()
        stripe = self.cache.placement.stripe
        lane = home
        nearest: list[int] = []
        for block, page in enumerate(pages.tolist()):
            copies: Sequence[int] = self._pages.copies(page)
            if len(copies) > 1:
                copies = self._seen.complete(copies, len(pages) - block) or (page,)
                by_lane = {copy // self._pages.per_lane: copy for copy in copies}
                if home in by_lane:
                    lane = home
                elif lane not in by_lane or not block % stripe:
                    lanes = [lane for lane in by_lane if lane in group] or list(by_lane)
                    lane = self._less_read(lanes, reads)
                page = by_lane[lane]
                reads[lane] += 1
            nearest.append(page)
        near = np.array(nearest, np.intp)
        far = np.flatnonzero(near // self._pages.per_lane != home)
        if len(far) and far[0] and far[0] >= len(near) - stripe and self._ends(nearest[: far[0]]):
            near = near[: far[0]]
        return near

    def _ends(self, pages: list[int]) -> bool:
        """Returns whether a match may end behind these pages: each group sees pages of its own."""
        return all(
            self._seen.complete([page], len(pages) - block) for block, page in enumerate(pages)
        )

    def _less_read(self, lanes: Sequence[int], reads: list[int]) -> int:
        two = self._random.sample(lanes, min(2, len(lanes)))
        return min(two, key=reads.__getitem__)

    # --- what is copied where

    def admitted(self, slot: int, pages: np.ndarray) -> None:
        """Notes that a slot reads these matched pages [n]: if they are a prefix that several read,
        it is copied, by the next batches, to where that lets sequences be local. A prompt that is
        dealt out is not local with its prefix: a copy of all of it would only make lanes uneven."""
        layout = self.cache.layouts[slot]
        hot = pages[self._pages.refs[pages] >= HOT]
        if not len(hot) or layout.group:
            return
        lane: int | None = layout.home
        if len(hot) == len(pages) == layout.by_lane[layout.home]:
            lane = self._relief(layout.home, len(hot))
        if lane is not None:
            self._begin(hot, lane)

    def _relief(self, lane: int, blocks: int) -> int | None:
        """Returns the least read lane, where it should read a prefix of `blocks` blocks in place of
        a lane that has all of it and is overloaded."""
        reads = self.cache.reads
        least = int(reads.argmin())
        if reads[lane] > OVERLOADED * reads.mean() and reads[lane] - reads[least] >= 2 * blocks:
            return least
        return None

    def _has_room(self, lane: int, blocks: int) -> bool:
        return self._pages.available_unlocked()[lane] - blocks >= SPARE * self._pages.per_lane

    def _begin(self, hot: np.ndarray, lane: int) -> None:
        keys = [self._pages.key_of.get(page) for page in hot.tolist()]
        known = [key for key in keys if key is not None]
        known += filter(self._pages.with_key.__contains__, self._seen.keys(len(known), known))
        lacks = any(self._pages.on_lane(key, lane) is None for key in known)
        if lacks and lane not in self._jobs and self._has_room(lane, len(known)):
            self._jobs[lane] = _Job(known, [])

    # --- with each batch

    def advance(self, issued: np.ndarray) -> None:
        """Copies what the next batch has room for; slots whose prefix is at their home lane by that
        are local from then on. To be called before the batch is packed. issued [slots]: tokens of
        each that are part of an issued batch."""
        self._batches += 1
        before = issued // self.cache.block_size
        for lane, job in list(self._jobs.items()):
            self._copy(lane, job)
            if all(self._pages.on_lane(key, lane) is not None for key in job.keys):
                del self._jobs[lane]
                self._settle(lane, job.keys, before)
            elif len(job.waits) > PATIENCE or not self._pages.with_key.keys() >= set(job.keys):
                del self._jobs[lane]
        for slot, full in list(self._settling.items()):
            self._follow(slot, full, int(before[slot]))
        if self.cache.placement.deals and self._batches % LEVEL_EVERY == 0:
            self._level(before)

    def _copy(self, lane: int, job: _Job) -> None:
        copied = 0
        for key in job.keys:
            if self._pages.on_lane(key, lane) is not None:
                continue
            copies = self._pages.with_key.get(key, ())
            if not any(self.cache.copy(page, lane) is not None for page in copies):
                break
            copied += 1
        if not copied:
            job.waits.append(self._batches)

    def _settle(self, lane: int, keys: list[bytes], before: np.ndarray) -> None:
        """Lets the slots at home on a lane, which are spread for the sake of a prefix alone, read
        it there; their own blocks on other lanes follow."""
        pages = [self._pages.on_lane(key, lane) for key in filter(is_block, keys)]
        for slot in np.flatnonzero(
            (self.cache.home == lane) & (self.cache.group_size > 1)
        ).tolist():
            layout = self.cache.layouts[slot]
            if layout.group or len(layout.pages) > self.cache.placement.limit:
                continue
            home = layout.by_lane[lane]
            for block, page in enumerate(pages[: int(before[slot])]):
                if page is not None and self._is_copy(layout.pages[block], page):
                    self.cache.repoint(slot, block, page, int(before[slot]))
            far = self.cache.needs.per_block * (len(layout.pages) - layout.by_lane[lane])
            if layout.by_lane[lane] > home and self._has_room(lane, far):
                self.cache.regroup(slot, (lane,))
                self._settling[slot] = 0

    def _follow(self, slot: int, full: int, before: int) -> None:
        """Moves blocks of a settling slot home, as far as they are full and the next batch has
        room; the others once they are."""
        layout = self.cache.layouts[slot]
        if layout.group != (layout.home,) or layout.group_size == 1:
            del self._settling[slot]  # another sequence has the slot, or all is at home
            return
        if not layout.target and before != full:
            self.cache.regroup(slot, layout.group)
        self.cache.rebalance(slot, before)
        self._settling[slot] = before

    def _is_copy(self, page: int, other: int) -> bool:
        """Returns whether two pages have the same published block."""
        return page != other and self._pages.key_of.get(page) == self._pages.key_of[other]

    def _level(self, before: np.ndarray) -> None:
        """Copies the most read blocks of prompts that are dealt out from lanes that are read more
        than their share, and has half of their readers read the copies."""
        reads = self.cache.reads.astype(float)
        most = enough_for(self._pages.lanes) * self.cache.placement.stripe
        for page in most_read(self._pages.refs, most).tolist():
            lane = page // self._pages.per_lane
            group = group_around(lane, self.cache.placement.pool)
            to_lane = min(group, key=reads.__getitem__)
            key = self._pages.key_of.get(page)
            mean = reads[group.start : group.stop].mean()
            if key is None or not is_block(key):
                continue
            if reads[lane] <= OVERLOADED * mean or reads[to_lane] >= mean:
                continue
            copy = self._copied(page, key, to_lane)
            if copy is not None:
                moved = self._share(page, copy, before)
                reads[lane] -= moved
                reads[to_lane] += moved

    def _copied(self, page: int, key: bytes, to_lane: int) -> int | None:
        """Returns the page of a lane with a block, and copies it there where it has none: with the
        pages beside it, as far as sequences read these."""
        copy = self._pages.on_lane(key, to_lane)
        if copy is not None or self.cache.copy(page, to_lane) is None:
            return copy
        for each in self._seen.beside([page]):
            if self._is_read_beside(each, page):
                self.cache.copy(each, to_lane)
        return self._pages.on_lane(key, to_lane)  # none where the others took its page

    def _is_read_beside(self, page: int, other: int) -> bool:
        """Returns whether a page on the lane of another one is held."""
        per_lane = self._pages.per_lane
        return page // per_lane == other // per_lane and self._pages.refs[page] > 0

    def _share(self, page: int, copy: int, before: np.ndarray) -> int:
        """Has half of those readers of a page whose prompts are dealt out read the copy, if they
        can; returns how many do. A block of a prefix has the same number in all its readers."""
        dealt = [layout for layout in self.cache.layouts if layout.group]
        block = next((each.pages.index(page) for each in dealt if page in each.pages), None)
        if block is None:
            return 0
        readers = [
            layout.slot
            for layout in dealt
            if block < before[layout.slot] and layout.pages[block] == page
        ]
        half = readers[: len(readers) // 2]
        return sum(self.cache.repoint(slot, block, copy, int(before[slot])) for slot in half)
