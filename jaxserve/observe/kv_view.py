"""The part of the live page about KV beyond the devices, as plain data for JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxserve.cache.tiers import LowerTiers


def kv_view(tiers: LowerTiers | None, hit_tokens: int, block_tokens: int) -> dict[str, Any]:
    """Returns what is in the tiers, in bytes, and what came from each. hit_tokens: of prompts,
    whose KV was reused; block_tokens: of a block.

    host_bytes, disk_bytes: in use now. from_host, from_disk, from_store, from_peers: tokens whose
    KV was read from there. fetched: for each other replica its address, blocks that came and
    that did not, bytes, and the seconds for which requests waited for them.
    """
    if tiers is None:
        return {"hit_tokens": hit_tokens, "fetched": []}
    counts = tiers.counts()
    fetched = [dataclasses.asdict(each) for each in tiers.fetched()]
    return {
        "hit_tokens": hit_tokens,
        "host_bytes": counts.host_blocks * tiers.block_bytes,
        "disk_bytes": counts.disk_blocks * tiers.block_bytes,
        "from_host": counts.host_reads * block_tokens,
        "from_disk": counts.disk_reads * block_tokens,
        "from_store": counts.shared_reads * block_tokens,
        "from_peers": counts.peer_reads * block_tokens,
        "fetched": [{**each, "bytes": each["blocks"] * tiers.block_bytes} for each in fetched],
    }
