"""The page and the lane of each block of KV: integers only, no device memory.

A page's life: `CacheManager.match` finds published pages for the blocks that a waiting sequence
begins with; `admit` gives these to a slot, with a home lane; `extend` allocates a page per further
block, on the lane that the placement names. A full block is `publish`ed under its key, so that
later sequences can share its page. `release` gives the slot's pages back: published ones stay
cached until their lane needs the room: those that no prefix reaches leave first, then the least
recently used. A published block can be on several pages: `copy` has the next batch copy it to
another lane, `repoint` has a slot read it there. What the device's page tables do not have yet
travels with the next batch (`table_updates`, `moves`). Where the blocks of a sequence lie, and how
they move: see `jaxserve.lanes`.

    pages          PageAllocator: free, held and cached pages of each lane, pages of each key
    hashes         BlockHashes: keys of a sequence's blocks
    chains         PrefixChains: blocks that no prefix reaches any more
    prefix_match   finds the pages of a sequence's first blocks
    published      PublishedBlocks: what later sequences find, listeners see and lower tiers keep
    state_checkpoints  StateCheckpoints: states of recurrent layers, kept for later sequences
    lower_blocks   LowerBlocks: between the pages and the tiers below
    table_updates  TableUpdates: page table entries for the device
    block_events   BlockEvents: tells listeners which blocks can be found and which no more
    manager        CacheManager: the pages of every slot, by all of these
    heavy_hitters  finds the most read pages
    copies         PrefixCopies: has what many read copied, and chooses which copy is read
"""

from jaxserve.cache.hashes import CacheIdentity
from jaxserve.cache.manager import CacheManager, LaneRules, PageWatcher
from jaxserve.cache.pages import PageCounts
from jaxserve.cache.prefix_match import NO_MATCH, PrefixMatch

__all__ = [
    "NO_MATCH",
    "CacheIdentity",
    "CacheManager",
    "LaneRules",
    "PageCounts",
    "PageWatcher",
    "PrefixMatch",
]
