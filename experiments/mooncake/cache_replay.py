"""Replays the prompts of a trace through the engine's cache of pages, without time: which blocks
are hit depends on the order of the requests alone, as in the paper's section 7.3.1.

A trace's hash ids stand for whole blocks, the last and partial one of a prompt included, so that
hits are comparable with those of simulators that count hash ids.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from experiments.mooncake.figure import WORKLOADS, MooncakeSettings
from jaxserve.cache.hashes import BlockHashes, CacheIdentity, root_key
from jaxserve.cache.pages import PageAllocator
from jaxserve.cache.prefix_match import NO_MATCH, find_prefix
from jaxserve.lab.simulate.arrival import BLOCK, Arrival

ALL = "all"  # the three workloads together
NODE_TOKENS = 3_000_000  # what the memory of one node holds (7.3.1)

PromptBlocks = tuple[BlockHashes, int]  # keys of a prompt's blocks, and how many there are


class BlockCache:
    """Cache of a number of blocks, by the pages of one lane: the longest known prefix of a prompt
    is hit, all its blocks are kept, and the least recently used block is evicted."""

    def __init__(self, blocks: int):
        self.pages = PageAllocator(1, blocks)

    def match(self, prompt: PromptBlocks) -> int:
        """Counts the prompt's blocks, from the first on, that are cached."""
        return len(find_prefix(self.pages, *prompt, NO_MATCH).pages)

    def serve(self, prompt: PromptBlocks) -> int:
        """Looks up a prompt and caches as many of its blocks as there is room for; returns how many
        were hit."""
        hashes, blocks = prompt
        found = find_prefix(self.pages, hashes, blocks, NO_MATCH).pages
        self.pages.ref(found)
        held = found.tolist()
        for block in range(len(found), min(blocks, self.pages.per_lane)):
            page = self.pages.allocate(0)
            self.pages.publish(page, hashes[block])
            held.append(page)
        self.pages.unref(held)
        return len(found)


def hit_ratio(prompts: Sequence[PromptBlocks], capacity: int) -> float:
    """Share of the prompts' blocks that a cache of `capacity` tokens hits."""
    cache = BlockCache(max(capacity // BLOCK, 1))
    hits = sum(cache.serve(prompt) for prompt in prompts)
    return hits / max(sum(blocks for _, blocks in prompts), 1)


def unbounded(prompts: Sequence[PromptBlocks]) -> int:
    """Tokens of a cache that never evicts any of these prompts' blocks."""
    return BLOCK * sum(blocks for _, blocks in prompts)


@functools.cache
def prompts_of(workload: str, settings: MooncakeSettings) -> list[PromptBlocks]:
    """The prompts of a workload in order of time; of all workloads, begun at once, where it is
    ALL."""
    chosen = list(WORKLOADS) if workload == ALL else [workload]
    found = [
        (arrival.time, place, block_hashes(arrival, name))
        for place, name in enumerate(chosen)
        for arrival in settings.arrivals(name)
    ]
    return [prompt for *_, prompt in sorted(found, key=lambda entry: entry[:2])]


def block_hashes(arrival: Arrival, salt: str) -> PromptBlocks:
    """The keys of an arrival's blocks; a block's only token is its hash id."""
    assert arrival.blocks is not None
    ids = np.asarray(arrival.blocks, np.int32)
    root = root_key(CacheIdentity(), 1, salt)
    return BlockHashes(root, 1, lambda first, last: ids[first:last]), len(ids)
