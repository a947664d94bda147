"""Settings of the KV cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from jaxserve.api.errors import ConfigError
from jaxserve.lanes.placement import PLACEMENTS, default_pool
from jaxserve.settings.fields import Settings, option

# of a GPU's memory, beside JAX's share: buffers of NCCL
COLLECTIVES_SHARE = 0.02


def memory_share(utilization: float, devices: int) -> float:
    """Returns the share of a GPU's memory for weights, programs and KV, of what is taken in all,
    where a mesh has a number of devices."""
    return utilization - COLLECTIVES_SHARE * (devices > 1)


@dataclass(frozen=True)
class CacheConfig(Settings):
    """The KV cache of one replica. Pages are counted per lane."""

    block_size: int = option(16, "tokens per KV block (and per page)", low=1, high=1024)
    pages: int | None = option(
        None,
        "KV pages per lane, each of a page group of layers; default: from kv_memory_gib",
        low=2,
    )
    kv_memory_gib: float | None = option(
        None,
        "memory for KV pages and states per device (GiB), where pages is not given; default: what "
        "gpu_memory_utilization leaves, 1 on CPUs",
        low=0.001,
    )
    gpu_memory_utilization: float = option(
        0.92,
        "share of a GPU's memory taken at the start for weights, programs and KV; 0.02 less "
        "where a mesh has several, for their collectives; XLA_CLIENT_MEM_FRACTION overrides it",
        low=0.05,
        high=1.0,
    )
    lane_tokens: int | None = option(
        None,
        "tokens of a request that a lane holds before the next lane joins; default: as many as fit",
        low=1,
    )
    placement: str = option(
        "grow",
        "lanes that the blocks of a long prompt go to: "
        + "; ".join(f"{placement.help} ({name})" for name, placement in PLACEMENTS.items()),
        choices=PLACEMENTS.keys(),
    )
    pool_lanes: int | None = option(
        None,
        "lanes of the group over which a placement of hashed spreads a prompt; default: all, at "
        "most the 8 of a node",
        low=2,
    )
    segment_tokens: int | None = option(
        None,
        "tokens that a placement of hashed puts on a lane as one; default: as many as hide the "
        "messages of reading them from another lane, by the measured costs, at least a tile",
        low=1,
    )
    prefix_caching: bool = option(True, "reuse the KV of equal prefixes")
    checkpoint_tokens: int | None = option(
        None,
        "tokens between copies of a sequence's recurrent states that are kept for equal prefixes, "
        "for models with states (hybrids); default: those whose KV takes twice the bytes of a copy",
        low=1,
    )
    prefix_copies: bool = option(
        False,
        "copy prefixes that many requests read to lanes that are read less, where those are then "
        "read without other lanes",
    )
    kv_cache_dtype: str = option(
        "auto",
        "type of KV: that of the weights (auto), or e4m3 with a scale for each vector (fp8), half "
        "the bytes of bfloat16 and 4 significant bits",
        choices=("auto", "fp8"),
    )
    host_cache_gib: float = option(
        0.0,
        "host memory (GiB) for KV blocks that leave the devices; they come back from there where "
        "that is faster than computing them; 0: none",
        low=0.0,
    )
    disk_cache: str | None = option(
        None,
        "FOLDER:GIB, a folder on a local disk and how much of it, for KV blocks that leave host "
        "memory (host_cache_gib); they outlast a restart",
    )
    kv_store: str | None = option(
        None,
        "mooncake://HOST:PORT, the master of a Mooncake Store that replicas share, for KV blocks "
        "that leave host memory (host_cache_gib); needs the extra mooncake",
    )

    @property
    def copies(self) -> bool:
        """True if published blocks are copied to other lanes."""
        return self.prefix_caching and self.prefix_copies

    def pool(self, lanes: int) -> int:
        """Returns the lanes of the groups over which every prompt is dealt out, of a replica of
        `lanes` lanes; 1 where prompts lie on as few lanes as hold them."""
        placement = PLACEMENTS[self.placement]
        if placement.pools:
            return self.pool_lanes or default_pool(lanes)
        return lanes if placement.scatters else 1

    @property
    def disk_folder(self) -> tuple[Path, float] | None:
        """Folder and GiB of `disk_cache`. Errors: ConfigError."""
        if self.disk_cache is None:
            return None
        folder, _, size = self.disk_cache.rpartition(":")
        try:
            gib = float(size)
        except ValueError:
            gib = 0.0
        if not folder or not 0 < gib < math.inf:
            raise ConfigError("disk_cache", f"{self.disk_cache!r} is not FOLDER:GIB")
        return Path(folder), gib

    @property
    def kv_store_master(self) -> str | None:
        """HOST:PORT of `kv_store`. Errors: ConfigError."""
        if self.kv_store is None:
            return None
        scheme, _, master = self.kv_store.partition("://")
        host, _, port = master.rpartition(":")
        if scheme != "mooncake" or not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ConfigError("kv_store", f"{self.kv_store!r} is not mooncake://HOST:PORT")
        return master

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_store_master is not None and not self.host_cache_gib:
            raise ConfigError("kv_store", "needs host_cache_gib: blocks pass through host memory")
        if self.disk_folder is not None and not self.host_cache_gib:
            raise ConfigError("disk_cache", "needs host_cache_gib: blocks pass through host memory")
        if self.host_cache_gib and not self.prefix_caching:
            raise ConfigError("host_cache_gib", "has no effect without prefix_caching")
