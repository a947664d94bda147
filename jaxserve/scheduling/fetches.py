"""Fetches of a prompt's blocks from lower tiers, or from another replica, instead of computing
them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxserve.api.request import KvSource
from jaxserve.cache import CacheManager
from jaxserve.cache.prefix_match import BlockPage, ReachablePrefix
from jaxserve.costs.predictor import Predictor
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.slots import SlotTable

FETCH_SECONDS = 10.0  # until the next piece of a fetch must have come
SOURCE_SECONDS = 630.0  # until one from another replica must, which reports failures sooner
MOST_FAILED = 3  # fetches of a sequence; then it computes what has no pages


class Fetch(NamedTuple):
    """The prefix of a prompt of which what is missing is to be brought. source: the replica that is
    asked for what is not on this one."""

    prefix: ReachablePrefix
    source: KvSource | None


class Fetches:
    """Chooses what is fetched, and follows it until it is on its pages.

    Where a prefix is its blocks alone, a sequence goes on behind those that have come, whatever
    becomes of the others. Where groups of layers see only its last blocks, or know it by a state,
    less than all of a fetch is of no use: the sequence is admitted again, with what is known then.
    """

    def __init__(self, cache: CacheManager, slots: SlotTable, predictor: Predictor):
        self.cache = cache
        self.slots = slots
        self.predictor = predictor

    def choose(self, sequence: Sequence, pages: np.ndarray, home: int) -> Fetch | None:
        """Returns the fetch for a waiting sequence with these matched pages and this home lane;
        None if computing what they lack is faster, or if nothing has it.

        A source that has more blocks than this replica is always asked: the one who named it has
        compared.
        """
        cache = self.cache
        if cache.lower is None or not sequence.reads_cache:
            return None
        if sequence.failed_fetches >= MOST_FAILED or (self._whole and sequence.received):
            return None
        last = (sequence.prefill_len - 1) // cache.block_size
        hashes = sequence.block_hashes
        prefix = cache.published.reachable(hashes, last, pages, 0, home)
        source = sequence.request.kv_source
        if source is not None and not sequence.failed_fetches:
            far = min(self._blocks_at(source, sequence), last)
            if prefix.blocks < far:
                return Fetch(cache.published.reachable(hashes, last, pages, far, home), source)
        if self._worth_it(sequence, prefix, len(pages)):
            return Fetch(prefix, None)
        return None

    @property
    def _whole(self) -> bool:
        """Returns whether less than all of a fetch is of no use."""
        return bool(self.cache.published.seen)

    def _blocks_at(self, source: KvSource, sequence: Sequence) -> int:
        """Returns how many first blocks a source has; none where its blocks are of another size,
        and windows see pages of them that it may not have."""
        block_size = self.cache.block_size
        size = source.block_size or block_size
        if self._whole and size != block_size:
            return 0
        return min(source.blocks, sequence.prefill_len // size) * size // block_size

    def _worth_it(self, sequence: Sequence, prefix: ReachablePrefix, first: int) -> bool:
        """Returns whether bringing what is missing takes less time than computing blocks from
        number `first` on (Mooncake, Eq. 2), or it is unknown what computing takes."""
        cache = self.cache
        if not prefix.missing or cache.lower is None or not self.predictor.calibrated:
            return bool(prefix.missing)
        size = cache.block_size
        computing = self.slots.work(first * size, prefix.blocks * size)
        return cache.lower.seconds(prefix.keys(sequence.block_hashes)) < computing

    def begin(self, sequence: Sequence, fetch: Fetch, now: float) -> None:
        """Begins the fetch of a sequence, which waits for it in its slot."""
        cache = self.cache
        prefix, source = fetch
        hashes = sequence.block_hashes
        there = None
        missing = prefix.missing
        if source is not None:
            first = len(prefix.pages)
            there = cache.below.source_blocks(hashes, first, prefix.blocks, source.block_size)
            if not source.request_id:  # what may not be there is asked for first
                missing = sorted(missing, key=lambda part: not part.group)
        time_left = sequence.ttft_deadline - now
        sequence.fetched = missing
        sequence.fetched_pages = 0
        sequence.ticket = cache.fetch(sequence.slot, missing, hashes, source, there, time_left)
        sequence.fetch_seconds = SOURCE_SECONDS if source else FETCH_SECONDS
        sequence.fetch_deadline = now + sequence.fetch_seconds
        if sequence.ticket is None and self._whole:
            self._give_up(sequence)

    def waits(self, sequence: Sequence, now: float) -> bool:
        """Returns whether a sequence waits for its fetch at clock second `now`; blocks that have
        not come by the fetch's deadline are computed."""
        if sequence.ticket is None:
            return False
        if now < sequence.fetch_deadline:
            return True
        sequence.ticket = None
        if self._whole:
            self._give_up(sequence)
        return self._whole

    def awaited(self, ticket: int) -> bool:
        """Returns whether a sequence waits for this fetch."""
        return self._waiting_for(ticket) is not None

    def arrived(self, ticket: int, pages: int, last: bool, now: float) -> bool:
        """Counts the next pages of a fetch, which an issued command has filled. After the last ones
        the sequence goes on, and computes what was not found. Returns whether a sequence waits for
        this fetch."""
        sequence = self._waiting_for(ticket)
        if sequence is None:
            return False
        came = sequence.fetched[sequence.fetched_pages :][:pages]
        sequence.fetched_pages += len(came)
        sequence.fetch_deadline = now + sequence.fetch_seconds
        if self._whole:
            came = sequence.fetched
        if sequence.fetched_pages == len(sequence.fetched) or not self._whole:
            self._publish(sequence, came)
        elif last:
            self._give_up(sequence)
        if last:
            sequence.ticket = None
        return True

    def _publish(self, sequence: Sequence, came: list[BlockPage]) -> None:
        """Publishes pages that a fetch has filled; the sequence goes on behind their blocks."""
        cache = self.cache
        slot = sequence.slot
        retention = sequence.request.cache_retention
        hashes = sequence.block_hashes
        cache.published.publish_fetched(cache.layouts[slot], came, hashes, retention)
        if cache.states is not None:
            cache.states.fetched(slot, hashes, retention)
        start = int(self.slots.issued[slot])
        tokens = sum(not part.group for part in came) * cache.block_size
        self.slots.issued[slot] = start + tokens
        if sequence.cached_tokens == start:  # else it was preempted: the first time counts
            sequence.cached_tokens += tokens
        sequence.prefill_seconds_left = self.slots.work(start + tokens, sequence.prefill_len)

    def _give_up(self, sequence: Sequence) -> None:
        """Has a sequence admitted again whose fetch has failed."""
        sequence.failed_fetches += 1
        self.slots.admit_again(sequence)

    def _waiting_for(self, ticket: int) -> Sequence | None:
        return next((s for s in self.slots.prefilling if s.ticket == ticket), None)
