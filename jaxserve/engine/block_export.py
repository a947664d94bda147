"""Offers the blocks of a replica to other replicas: see `store.peers`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from jaxserve.cache import CacheManager
from jaxserve.cache.hashes import BlockHashes
from jaxserve.cache.tiers import LowerTiers
from jaxserve.replica.registry import Registry
from jaxserve.store.block_part import PartBytes, PartPlace
from jaxserve.store.tiered import TieredBlocks

WANT_SECONDS = 10.0  # for the engine's thread to take in what is wanted
WAY_SECONDS = 10.0  # from a page to host memory


class BlockWishes:
    """Passes to an engine which of its blocks others want. tiers: below its devices. post: runs a
    command on the engine's thread. The rest: see `OfferedBlocks`."""

    def __init__(
        self,
        cache: CacheManager,
        tiers: LowerTiers,
        registry: Registry,
        post: Callable[[Callable[[], object]], None],
    ):
        self._stores = cache.stores
        self._seen = cache.published.seen
        self._tiers = tiers
        self._registry = registry
        self._post = post

    def want(self, keys: Sequence[bytes]) -> None:
        noted = threading.Event()

        def want() -> None:
            self._stores.want(keys, self._tiers.holds)
            noted.set()

        self._post(want)
        noted.wait(WANT_SECONDS)

    def unwant(self, keys: Sequence[bytes]) -> None:
        self._post(lambda: self._stores.unwant(keys))

    def keys_of(self, hashes: BlockHashes, blocks: int) -> list[bytes]:
        seen = [key for end in (blocks - 1, blocks) for key in self._seen.keys(end, hashes)]
        return [*hashes.keys(0, blocks), *dict.fromkeys(seen)]

    def coming(self, request_id: str) -> bool:
        return request_id in self._registry

    def on_its_way(self, key: bytes) -> bool:
        """Returns whether a wanted block was on the devices, and is or will be in host memory."""
        return key in self._stores.promised


class TierExporter:
    """Blocks of an engine in this process, by way of its host memory; implements `BlockExporter`.
    layout: of blocks in the tiers. layer_groups: layers that come one group after the other."""

    def __init__(
        self,
        wishes: BlockWishes,
        tiers: TieredBlocks,
        layout: PartBytes,
        layer_groups: Sequence[range] = (),
    ):
        self.layout = layout
        self.want = wishes.want
        self.unwant = wishes.unwant
        self.coming = wishes.coming
        self.keys_of = wishes.keys_of
        self.layer_groups = layer_groups if len(layer_groups) > 1 else ()
        self._wishes = wishes
        self._tiers = tiers

    def read_layers(self, key: bytes, group: int, into: np.ndarray, seconds: float) -> bool:
        part = self.layout.of_layers(self.layer_groups[group])
        return self._tiers.read_part(key, group, part, into, seconds)

    def read(self, key: bytes, into: np.ndarray, seconds: float) -> bool:
        arrived = self._tiers.wait(key, seconds)
        if not arrived and seconds and self._wishes.on_its_way(key):
            arrived = self._tiers.wait(key, WAY_SECONDS)
        return _read(self._tiers, key, into, arrived)


class WorkerExporter:
    """The parts of blocks that a worker of a group has; implements `BlockExporter`. Its leader has
    blocks stored, and lets askers know when no more will come."""

    layer_groups: Sequence[range] = ()

    def __init__(self, tiers: LowerTiers, layout: PartBytes):
        self.layout = layout
        self._tiers = tiers

    def want(self, keys: Sequence[bytes]) -> None:
        """Does nothing: the leader has the blocks stored."""

    def unwant(self, keys: Sequence[bytes]) -> None:
        """Does nothing."""

    def keys_of(self, hashes: BlockHashes, blocks: int) -> list[bytes]:
        """Returns none: the leader says what a prompt's keys are."""
        return []

    def coming(self, request_id: str) -> bool:
        return True

    def read_layers(self, key: bytes, group: int, into: np.ndarray, seconds: float) -> bool:
        return False

    def read(self, key: bytes, into: np.ndarray, seconds: float) -> bool:
        return _read(self._tiers, key, into, self._tiers.wait(key, seconds))


def _read(tiers: LowerTiers, key: bytes, into: np.ndarray, arrived: bool) -> bool:
    if not (arrived or tiers.holds(key)):  # one on its way is worth the wait of `read`
        return False
    # what was sent is used there: kept longest here, it would drive out what is to be sent
    return tiers.read(key, into, use=False)


class GroupExporter:
    """Blocks of an engine whose workers have the parts; implements `PartedExporter`. layout: of
    whole blocks. places: returns the workers that offer parts; none unless all do."""

    def __init__(
        self,
        wishes: BlockWishes,
        tiers: LowerTiers,
        layout: PartBytes,
        places: Callable[[], Sequence[PartPlace]],
    ):
        self.layout = layout
        self.want = wishes.want
        self.unwant = wishes.unwant
        self.coming = wishes.coming
        self.keys_of = wishes.keys_of
        self._wishes = wishes
        self._tiers = tiers
        self._places = places

    @property
    def places(self) -> Sequence[PartPlace]:
        return self._places()

    def settle(self, keys: Sequence[bytes]) -> None:
        deadline = time.monotonic() + WAY_SECONDS
        for key in keys:
            left = deadline - time.monotonic()
            if left > 0 and self._wishes.on_its_way(key):
                self._tiers.wait(key, left)
