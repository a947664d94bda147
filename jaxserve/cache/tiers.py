"""The tiers below the devices' pages, as a replica sees them: their interface, and what it asks of
them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from jaxserve.api.request import KvSource
from jaxserve.cache.tier_events import TierEvents


@dataclass(frozen=True, slots=True)
class TierCounts:
    """Blocks that came and went since the start. prefetched: brought from disk to host memory for
    prompts that waited; shared_reads: from the shared tier. to_shared: put there; shared_dropped:
    not put there. wrong: whose bytes were not what was put. Pages of further page groups (see
    `checkpoint.page_groups`) count as blocks, but where they are read: these are `further_reads`,
    from anywhere."""

    stored: int = 0
    to_disk: int = 0
    host_reads: int = 0
    disk_reads: int = 0
    peer_reads: int = 0
    further_reads: int = 0
    to_shared: int = 0
    shared_reads: int = 0
    shared_dropped: int = 0
    prefetched: int = 0
    missed: int = 0
    wrong: int = 0
    host_blocks: int = 0
    disk_blocks: int = 0


@dataclass(slots=True)
class Fetched:
    """Blocks, or pages of further page groups, that came from one other replica by one plane since
    the start. source: its first address. missed: those that were asked for and did not come.
    seconds: for which requests waited for it, all together. bytes_per_s: at which they came, as
    learnt; 0: nothing was."""

    source: str
    plane: str = "tcp"
    blocks: int = 0
    missed: int = 0
    seconds: float = 0.0
    bytes_per_s: float = 0.0


@dataclass(slots=True)
class Lookup:
    """A question to a tier that answers later. answered: what it has counts as there now."""

    answered: bool = False


class LowerTiers(Protocol):
    """Tiers below the devices of a replica. block_bytes: of each block. events: tells what they
    hold. most_locked: blocks that may be locked at a time."""

    block_bytes: int
    most_locked: int
    events: TierEvents

    def holds(self, key: bytes) -> bool:
        """Returns whether the block with this key is believed to be there."""

    def seconds(self, keys: Sequence[bytes]) -> float:
        """Estimates how long it takes to bring these blocks to the devices."""

    def keep(self, keys: Sequence[bytes], retention: int) -> None:
        """Has blocks kept for this retention (see `Request`), if not for longer. Never waits."""

    def lock(self, key: bytes) -> None:
        """Has a block stay in whichever of this replica's tiers it is, until `unlock`. To be called
        for most_locked blocks at a time, at most."""

    def unlock(self, key: bytes) -> None:
        """Has a locked block count as used just now, and leave like others."""

    @property
    def shared(self) -> bool:
        """Returns whether one of the tiers has blocks of other replicas: only `prefetch` finds
        them."""

    def prefetch(self, keys: Sequence[bytes]) -> Lookup:
        """Has these blocks, consecutive ones of a prompt, brought to the fastest of the tiers, as
        far as it has room for them beside others. Never waits."""

    @property
    def prefetch_room(self) -> int:
        """Blocks for which there may be room."""

    def wait(self, key: bytes, seconds: float) -> bool:
        """Waits until a block is there, at most so long; whether it is."""

    def read(self, key: bytes, into: np.ndarray, use: bool = True) -> bool:
        """Copies a block to `into` [block_bytes] uint8; False where it is not there. use: it counts
        as used, and is kept longer than others."""

    def counts(self) -> TierCounts:
        """Counts what came and went."""

    def fetched(self) -> list[Fetched]:
        """Counts what came from each of the other replicas, by plane; what was asked last is at the
        end."""

    @property
    def outlasts(self) -> bool:
        """Returns whether blocks are still there after a restart."""


class SourceBlocks(NamedTuple):
    """Blocks of a source of another block size that cover those of a fetch. keys: theirs. size:
    tokens of each. skip: tokens of the first one that come before the fetch's."""

    keys: list[bytes]
    size: int
    skip: int


class Fetch(NamedTuple):
    """Blocks to be brought from lower tiers to pages that a slot holds already.

    ticket: tells this fetch from all others. keys [n]: of the blocks, in the order in which they
    are to come; pages of further page groups count as blocks. places [n, 2] int32: lane and page of
    each. source: another replica, which is asked for what lower tiers do not hold; there: its
    blocks, where they are of another size. time_left: seconds until the first token of the request
    is due.
    """

    ticket: int
    keys: list[bytes]
    places: np.ndarray
    source: KvSource | None = None
    there: SourceBlocks | None = None
    time_left: float = math.inf
