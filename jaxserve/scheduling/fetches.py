"""Fetches of a prompt's blocks from lower tiers, or from another replica, instead of computing
them."""

from __future__ import annotations

from typing import NamedTuple

from jaxserve.api.request import KvSource
from jaxserve.cache import CacheManager
from jaxserve.costs.predictor import Predictor
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.slots import SlotTable

FETCH_SECONDS = 10.0  # until the next piece of a fetch must have come
SOURCE_SECONDS = 630.0  # until one from another replica must, which reports failures sooner


class Fetch(NamedTuple):
    """Blocks of a prompt that are to be brought."""

    first: int  # the first block
    keys: list[bytes]  # of that block and those after it
    source: KvSource | None  # the replica that is asked for those that are not on this one


class Fetches:
    """Chooses what is fetched, and follows it until it is on its pages."""

    def __init__(self, cache: CacheManager, slots: SlotTable, predictor: Predictor):
        self.cache = cache
        self.slots = slots
        self.predictor = predictor

    def choose(self, sequence: Sequence, first: int) -> Fetch | None:
        """Returns the fetch of a waiting sequence's blocks from `first` on; None if computing them
        is faster, or if nothing has them.

        A source that has more blocks than this replica is always asked: the one who named it has
        compared.
        """
        cache = self.cache
        if cache.lower is None or not sequence.reads_cache:
            return None
        last = (sequence.prefill_len - 1) // cache.block_size
        hashes = sequence.block_hashes
        keys = cache.below.fetchable(hashes, first, last)
        source = sequence.request.kv_source
        if source is not None:
            size = source.block_size or cache.block_size
            blocks = min(source.blocks, sequence.prefill_len // size)
            far = min(blocks * size // cache.block_size, last)
            if first + len(keys) < far:
                return Fetch(first, [hashes[block] for block in range(first, far)], source)
        if self._worth_it(keys, first):
            return Fetch(first, keys, None)
        return None

    def _worth_it(self, keys: list[bytes], first: int) -> bool:
        """Returns whether bringing blocks takes less time than computing them (Mooncake, Eq. 2), or
        it is unknown what computing takes."""
        cache = self.cache
        if not keys or cache.lower is None or not self.predictor.calibrated:
            return bool(keys)
        start = first * cache.block_size
        computing = self.slots.work(start, start + len(keys) * cache.block_size)
        return cache.lower.seconds(keys) < computing

    def begin(self, sequence: Sequence, fetch: Fetch, now: float) -> None:
        """Begins the fetch of a sequence, which waits for it in its slot."""
        cache = self.cache
        first, keys, source = fetch
        blocks = None
        if source is not None:
            hashes = sequence.block_hashes
            blocks = cache.below.source_blocks(hashes, first, first + len(keys), source.block_size)
        time_left = sequence.ttft_deadline - now
        sequence.ticket = cache.fetch(sequence.slot, keys, source, blocks, time_left)
        sequence.fetch_seconds = SOURCE_SECONDS if source else FETCH_SECONDS
        sequence.fetch_deadline = now + sequence.fetch_seconds

    def waits(self, sequence: Sequence, now: float) -> bool:
        """Returns whether a sequence waits for its fetch at clock second `now`; blocks that have
        not come by the fetch's deadline are computed."""
        if sequence.ticket is not None and now >= sequence.fetch_deadline:
            sequence.ticket = None
        return sequence.ticket is not None

    def awaited(self, ticket: int) -> bool:
        """Returns whether a sequence waits for this fetch."""
        return self._waiting_for(ticket) is not None

    def arrived(self, ticket: int, blocks: int, last: bool, now: float) -> bool:
        """Counts the next blocks of a fetch, which an issued command puts on their pages. After the
        last ones the sequence goes on, and computes what was not found. Returns whether a sequence
        waits for this fetch."""
        sequence = self._waiting_for(ticket)
        if sequence is None:
            return False
        cache = self.cache
        slot = sequence.slot
        start = int(self.slots.issued[slot])
        first = start // cache.block_size
        cache.publish(slot, first, first + blocks, sequence.block_hashes)
        tokens = blocks * cache.block_size
        self.slots.issued[slot] = start + tokens
        if sequence.cached_tokens == start:  # else it was preempted: the first time counts
            sequence.cached_tokens += tokens
        sequence.prefill_seconds_left = self.slots.work(start + tokens, sequence.prefill_len)
        sequence.fetch_deadline = now + sequence.fetch_seconds
        if last:
            sequence.ticket = None
        return True

    def _waiting_for(self, ticket: int) -> Sequence | None:
        return next((s for s in self.slots.prefilling if s.ticket == ticket), None)
