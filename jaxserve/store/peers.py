"""Blocks of KV that other replicas have: what a replica offers to others, and asks of them.

A replica that is named as the source of a prompt's first blocks (`KvSource`) reads them from its
pages to its host memory, as soon as they are computed, and sends them from there, in order. What
does not come is computed by the one who asked, so nothing here fails: blocks come or they do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from jaxserve.api.request import KvSource
from jaxserve.cache.hashes import BlockHashes
from jaxserve.cache.tiers import Fetched
from jaxserve.store.block_part import PartBytes, PartPlace


class OfferedBlocks(Protocol):
    """Blocks that a source offers. All methods may be called from any thread."""

    @property
    def layout(self) -> PartBytes:
        """The part of each block that is offered, and its bytes."""

    def want(self, keys: Sequence[bytes]) -> None:
        """Has these blocks read to host memory: at once where they are on the devices, else when
        they are computed. Each call must be followed by one of `unwant` with the same keys. May
        wait for the replica's thread, for seconds."""

    def unwant(self, keys: Sequence[bytes]) -> None:
        """Ends the wish of a call of `want` for these blocks."""

    def keys_of(self, hashes: BlockHashes, blocks: int) -> list[bytes]:
        """Returns the keys of all that another replica may ask for a prompt of that many full
        blocks: theirs, and of what windows see behind them, or behind one less. Never waits."""

    def coming(self, request_id: str) -> bool:
        """Returns whether the request that computes blocks is still here: then what is not there
        yet may come. False for "" and for a request that has ended. Never waits."""


class BlockExporter(OfferedBlocks, Protocol):
    """Blocks that are in this process."""

    @property
    def layer_groups(self) -> Sequence[range]:
        """Layers of a block in the groups in which they come, one after the other; none where
        blocks only come whole."""

    def read_layers(self, key: bytes, group: int, into: np.ndarray, seconds: float) -> bool:
        """Copies what a group of layers has of a block that is on its way to its place in `into`
        [layout.bytes] uint8, waiting for it at most so long; False where it did not come, and where
        the block is whole. It is not checked, as `read` checks the whole block."""

    def read(self, key: bytes, into: np.ndarray, seconds: float) -> bool:
        """Copies a block to `into` [layout.bytes] uint8, waiting for it at most so long, longer
        only where it is on its way from the devices (not with 0); False where it did not come."""


@runtime_checkable
class PartedExporter(OfferedBlocks, Protocol):
    """Blocks of which other processes of this replica have the parts."""

    @property
    def places(self) -> Sequence[PartPlace]:
        """Processes that have the parts; none while they restart, or where they offer nothing."""

    def settle(self, keys: Sequence[bytes]) -> None:
        """Waits until those of these blocks that are on their way from the devices are there, for
        some seconds at most."""


class Route(NamedTuple):
    """A way by which blocks come. bytes_per_s: as learnt of the source by this plane; 0: nothing
    was."""

    plane: str
    bytes_per_s: float = 0.0


class BlockStream(Protocol):
    """Blocks on their way here, in the order in which they were asked for."""

    @property
    def route(self) -> Route:
        """The way by which the last one came."""

    def read(self, key: bytes, into: np.ndarray) -> bool:
        """Copies the next block, which has this key, to `into` uint8, as the layout says in which
        it was asked for. Waits for it, as long as its source makes progress; False: it and those
        behind it do not come."""

    def close(self) -> None:
        """Wants no more. It may be called while another thread reads, whose wait then ends."""


class PeerBlocks(Protocol):
    """Asks other replicas for blocks. All methods may be called from any thread."""

    def open(
        self, source: KvSource, keys: Sequence[bytes], time_left: float, layout: PartBytes
    ) -> BlockStream:
        """Asks a replica for the blocks with these keys. time_left: seconds until the first token
        of the request is due, infinite if it is not. layout: what is wanted of each block. Streams
        get memory in the order of opening. Never raises, never waits."""

    def close(self) -> None:
        """Ends all streams."""


@runtime_checkable
class OffersBlocks(Protocol):
    """A replica whose blocks others may have."""

    @property
    def block_exporter(self) -> BlockExporter | PartedExporter | None:
        """Exporter of the blocks; None where the replica has no host memory for them."""


class WorkerPort(Protocol):
    """The port at which a process of a replica offers its parts of blocks to other replicas, and
    asks them for theirs."""

    peers: PeerBlocks
    address: str  # HOST:PORT for others

    def open(self, exporter: BlockExporter) -> None:
        """Begins to offer."""

    def close(self) -> None:
        """Closes the port."""


@runtime_checkable
class FetchesBlocks(Protocol):
    """A replica that has blocks from others."""

    def kv_fetched(self) -> list[Fetched]:
        """Counts of what came from each, the way used last at the end. Never waits."""
