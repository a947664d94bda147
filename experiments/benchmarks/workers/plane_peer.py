"""One side of the benchmark of planes, as a process that is asked and answers by lines of JSON: a
source of KV blocks behind a replica's port, or a reader of them. Arguments: the plane, `tcp` or
`mooncake`; blocks; bytes of each; `send` or `receive`.

    {"do": "address"}                  -> HOST:PORT of a source
    {"do": "cpu"}                      -> CPU seconds of this process so far
    {"do": "fetch", "address": A}      -> seconds in which a reader had all blocks, checked
    {"do": "plane"}                    -> name of the plane by which the last ones came
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxserve.api.request import KvSource
from jaxserve.cache.hashes import KEY_BYTES
from jaxserve.server.block_service import BlockService
from jaxserve.server.peer_blocks import PeerReplicas
from jaxserve.server.replica_service import ReplicaService
from jaxserve.store.block_part import BlockPart, PartBytes
from jaxserve.transfer.mooncake import MooncakePlane
from jaxserve.transfer.plane import MOONCAKE

SECRET = b"of the benchmark of planes"


def layout_of(size: int) -> PartBytes:
    """Makes the layout of blocks of `size` bytes."""
    return PartBytes(BlockPart(range(1), range(1)), size)


class Blocks:
    """A `BlockExporter` with all blocks in memory, [blocks, bytes] uint8."""

    def __init__(self, blocks: np.ndarray):
        self._blocks = blocks
        self.layout = layout_of(blocks.shape[1])

    def want(self, keys: Sequence[bytes]) -> None:
        pass

    def unwant(self, keys: Sequence[bytes]) -> None:
        pass

    def coming(self, request_id: str) -> bool:
        return False

    def read(self, key: bytes, into: np.ndarray, seconds: float) -> bool:
        np.copyto(into, self._blocks[int.from_bytes(key, "little")])
        return True


class Side:
    """A source, or a reader, of `blocks` blocks of `size` bytes."""

    def __init__(self, plane: str, blocks: int, size: int, sends: bool):
        self._keys = [number.to_bytes(KEY_BYTES, "little") for number in range(blocks)]
        self._into = np.empty(size, np.uint8)
        self._peers = PeerReplicas(SECRET, faster=MooncakePlane if plane == MOONCAKE else None)
        self._plane = ""
        if sends:
            noise = np.random.default_rng(1).integers(0, 256, (blocks, size), dtype=np.uint8)
            service = BlockService(self._peers.planes)
            service.open(Blocks(noise))
            self._port = ReplicaService(SECRET, blocks=service).start("127.0.0.1:0")

    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def cpu(self) -> float:
        return time.process_time()

    def plane(self) -> str:
        return self._plane

    def fetch(self, address: str) -> float:
        began = time.perf_counter()
        source = KvSource(address, len(self._keys))
        layout = layout_of(self._into.size)
        with contextlib.closing(self._peers.open(source, self._keys, math.inf, layout)) as stream:
            for key in self._keys:
                assert stream.read(key, self._into), "a block did not come"
            self._plane = stream.route.plane
        return time.perf_counter() - began


def main(plane: str, blocks: int, size: int, sends: bool) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    side = Side(plane, blocks, size, sends)
    for line in sys.stdin:
        told: dict[str, Any] = json.loads(line)
        said = getattr(side, told.pop("do"))(**told)
        print(json.dumps(said), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "send")
