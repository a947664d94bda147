"""The declarative face of the pool of KV over a replica's lanes (TokenLake, section 3.2, Fig. 5).

A scheduler asks what is cached (`Pool.get_prefix_tree`) and what share of the lanes the cache takes
(`Pool.get_cache_load`), decides which chunks of prompts make a batch and on how many lanes, and has
`Pool.gen_plans` choose the lanes: it names none itself. On the data plane the plans are the rows
and page tables of a step; there `init_query`, `query`, `init_transfer` and `put` are functions
inside the compiled program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxserve.cache import NO_MATCH, CacheManager
from jaxserve.costs.coefficients import Costs
from jaxserve.lanes.groups import group_around, group_sizes
from jaxserve.lanes.layout import SequenceLayout
from jaxserve.lanes.work import Heads
from jaxserve.scheduling.pool.dispatch import (
    TokenBytes,
    balanced_room,
    gains,
    match,
    match_groups,
)
from jaxserve.scheduling.pool.load import AttentionRates, cache_load
from jaxserve.scheduling.pool.prefix_tree import PrefixTree
from jaxserve.scheduling.sequence import Sequence as PromptSequence
from jaxserve.scheduling.slots import SlotTable

FORBIDDEN = 1e15  # bytes by which a lane seems worse that a chunk must not run on
ONE_HEAD = Heads(1, 1, 1)  # where heads are not known: queries and KV then are equally long


class PoolChunk(NamedTuple):
    """The next `tokens` tokens of a prompt, which is given by the number of its sequence."""

    prompt: int
    tokens: int


PoolBatch = Sequence[PoolChunk]


class PoolPlans(NamedTuple):
    """The lanes of batches, and what moves by that.

    query_plans, transfer_plans [batches, lanes]: tokens whose queries visit a lane, and whose new
    KV a lane is to hold, as far as keys say so. groups: lanes of each batch.
    """

    query_plans: np.ndarray
    transfer_plans: np.ndarray
    groups: list[range]


class PoolStep(NamedTuple):
    """The prompts of one step, of which batches are to be made.

    prompts: the most tokens that each of those that may run can run with, in the order of the
    policy; decodes: numbers of the sequences that decode in any case; seconds: that a batch may
    take beside them; tokens: most that a lane takes.
    """

    prompts: list[PoolChunk]
    decodes: list[int]
    seconds: float
    tokens: int


class PoolDecision(NamedTuple):
    """Batches of a step and their degrees, which together are at most all lanes."""

    batches: list[list[PoolChunk]]
    degrees: list[int]


class PoolScheduler:
    """Decides the batches of one step after another; the base of schedulers over a pool."""

    def decide(self, pool: Pool, step: PoolStep) -> PoolDecision:
        """Returns the batches of a step, which have each prompt once at most."""
        raise NotImplementedError


class _Gain(NamedTuple):
    """Tokens that visit a lane, and that it is to hold; bytes that stay on it. [n, lanes] each."""

    visits: np.ndarray
    puts: np.ndarray
    stay: np.ndarray


class _Holders(NamedTuple):
    """Lanes that hold blocks of a prompt's prefix, and those that have all of it [lanes] bool."""

    some: np.ndarray
    whole: np.ndarray

    @property
    def spared(self) -> np.ndarray:
        """Lanes that queries from a lane need not visit, which they do from others [lanes]."""
        return np.where(self.whole, self.some.sum(), self.some)


class Pool:
    """The cache of a replica as one pool. costs: of a lane's steps; heads: of one rank."""

    def __init__(
        self, cache: CacheManager, slots: SlotTable, costs: Costs, heads: Heads | None = None
    ):
        self.lanes = cache.pages.lanes
        self._cache = cache
        self._slots = slots
        self._costs = costs
        self._sizes = TokenBytes.of(heads or ONE_HEAD)
        self._rates = AttentionRates(
            costs.layers * max(costs.read, costs.decode_kv), costs.layers * costs.pair
        )
        self._tree: PrefixTree | None = None

    @property
    def degrees(self) -> tuple[int, ...]:
        """Numbers of lanes that a batch may run on, ascending: sizes of groups in which blocks
        lie."""
        pool = self._cache.placement.pool
        return group_sizes(pool if pool > 1 else self.lanes)

    # --- the control plane

    def get_prefix_tree(self) -> PrefixTree:
        """Returns the tree of all blocks that can be found, which follows the cache from the first
        call on."""
        if self._tree is None:
            self._tree = PrefixTree(self._cache.published)
        return self._tree

    def get_cache_load(self, requests: Sequence[PoolChunk], tree: PrefixTree) -> float:
        """Returns the share of all lanes that attention over cached prefixes takes, while what the
        requests need besides is dealt over all lanes. tree: what is cached."""
        new = np.array([chunk.tokens for chunk in requests], float)
        prefix = np.array([self.cached(chunk.prompt) for chunk in requests], float)
        costs = self._costs
        pairs = float((new * new).sum()) / 2 / self.lanes
        seconds = costs.launch + costs.layers * costs.linear(float(new.sum()) / self.lanes)
        return cache_load(prefix, new, self.lanes, seconds + self._rates.pair * pairs, self._rates)

    def gen_plans(
        self, batches: Sequence[PoolBatch], degrees: Sequence[int], tree: PrefixTree
    ) -> PoolPlans:
        """Chooses the lanes of each batch, disjoint groups, such that the fewest bytes move. tree:
        what is cached. Errors: ValueError where there are too few lanes."""
        gain = self._gain(batches)
        groups = match_groups(gain.stay, degrees, np.ones(self.lanes, bool))
        return PoolPlans(gain.visits, gain.puts, groups)

    # --- what it knows of prompts

    def cached(self, prompt: int) -> int:
        """Returns how many tokens of a prompt, from its first one on, have KV."""
        sequence = self._slots.by_number[prompt]
        if sequence.slot >= 0:
            return int(self._slots.issued[sequence.slot])
        return max(len(self._pages(sequence)) * self._cache.block_size, sequence.received)

    def homes(self, prompts: Sequence[int], usable: Sequence[int]) -> list[int]:
        """Chooses the homes of prompts that wait such that the fewest queries of their decodes
        move, and each of the `usable` lanes has about as many sequences as the others. Chunks are
        dealt over lanes wherever home is: what these send is the same for all homes."""
        lanes = np.array(usable)
        running = np.bincount(self._cache.home[list(self._slots.by_slot)], minlength=self.lanes)
        running = running[lanes]
        sequences = map(self._slots.by_number.__getitem__, prompts)
        spared = np.stack([self._holders(sequence).spared for sequence in sequences])
        stay = self._sizes.query * spared[:, lanes] - running
        return lanes[match(stay, balanced_room(running, len(prompts)))].tolist()

    def _gain(self, batches: Sequence[PoolBatch]) -> _Gain:
        visits = np.zeros((len(batches), self.lanes))
        puts, spared, beyond = (np.zeros_like(visits) for _ in range(3))
        for number, batch in enumerate(batches):
            for chunk in batch:
                sequence = self._slots.by_number[chunk.prompt]
                holders = self._holders(sequence)
                visits[number] += chunk.tokens * holders.some
                spared[number] += chunk.tokens * holders.spared
                puts[number] += self._puts(sequence, chunk.tokens)
                beyond[number] += self._beyond(sequence)
        return _Gain(visits, puts, gains(spared, puts, self._sizes) - FORBIDDEN * beyond)

    def _pages(self, sequence: PromptSequence) -> np.ndarray:
        """Returns the pages that a waiting prompt would find."""
        if not sequence.reads_cache:
            return NO_MATCH.pages
        blocks = (sequence.prefill_len - 1) // self._cache.block_size
        match = self._cache.match(sequence.block_hashes, blocks, sequence.prefix_match)
        sequence.prefix_match = match
        return match.pages

    def _holders(self, sequence: PromptSequence) -> _Holders:
        pages = self._cache.pages
        if sequence.slot >= 0:
            held = readable = self._cache.blocks_per_lane[sequence.slot]
        else:
            found = self._pages(sequence)
            held = pages.count_by_lane(found)
            readable = pages.readable_by_lane(found)
        return _Holders(held > 0, (readable == held.sum()) & (readable > 0))

    def _puts(self, sequence: PromptSequence, tokens: int) -> np.ndarray:
        """Returns how many of a prompt's next tokens each lane is to hold [lanes]; none where that
        depends on its home."""
        cache = self._cache
        placement = cache.placement
        puts = np.zeros(self.lanes)
        blocks = cache.blocks(sequence.prefill_len)
        if placement.pool < self.lanes or not placement.pools or blocks <= placement.stripe:
            return puts
        key_of = sequence.block_hashes.__getitem__
        layout = SequenceLayout(0, self.lanes, cache.pages.per_lane, 0, blocks, key_of)
        layout.group = placement.dealt_over(0, blocks)
        start = self.cached(sequence.number)
        ends = start + tokens
        stripe = placement.stripe * cache.block_size
        while start < ends:
            stop = min((start // stripe + 1) * stripe, ends)
            layout.pages = [0] * (start // cache.block_size)
            puts[placement.next_lane(layout, [1] * self.lanes)] += stop - start
            start = stop
        return puts

    def _beyond(self, sequence: PromptSequence) -> np.ndarray:
        """Returns the lanes out of reach of a prompt with a slot [lanes] bool: those outside of the
        group in which its blocks lie."""
        beyond = np.zeros(self.lanes, bool)
        if sequence.slot >= 0:
            size = max(self.degrees[-1], int(self._cache.group_size[sequence.slot]))
            group = group_around(int(self._cache.home[sequence.slot]), size)
            beyond[: group.start] = beyond[group.stop :] = True
        return beyond
