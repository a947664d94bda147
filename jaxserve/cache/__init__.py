"""Which block of KV lies on which page of which lane: integers only, no device memory.

A sequence that starts to run gets a slot. `CacheManager.match` finds cached pages for the blocks
its prompt begins with, `admit` ties them to the slot and picks a home lane, `extend` adds a page
per further block, on the lane the placement names. A block that is full is `publish`ed under its
key, so that later sequences can share its page. `release` gives the slot's pages back: published
ones stay cached until their lane needs the room, least recently used first. Every new page table
entry is noted and travels to the device with the next batch (`take_deltas`).
"""

from jaxserve.cache.manager import CacheManager
from jaxserve.cache.placement import PLACEMENTS

__all__ = ["PLACEMENTS", "CacheManager"]
