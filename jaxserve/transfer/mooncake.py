"""The plane of the Mooncake Transfer Engine, over RDMA or TCP, where it is installed
(`pip install 'jaxserve[mooncake]'`).

The engine has no authentication, no encryption and no deadlines: all who reach its ports read and
write all memory that is registered with it, and it listens on all interfaces. So its network must
be private.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.transfer.plane import MOONCAKE
from jaxserve.transfer.protocol import TransferError, join_address, split_address
from jaxserve.transfer.reading_plane import SEND_BYTES, ReadingPlane

# for the engine, unless the operator has set them
ENVIRONMENT = {
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_TCP_SLICE_SIZE": str(1 << 20),
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",  # after which a read from a peer that is stopped has failed
}
PACKAGE = "mooncake-transfer-engine-non-cuda"
DONE = 1  # of the engine's states; 0 is under way, below 0 failed
FIRST_SLEEP = 5e-5  # seconds between two looks at a read, doubled each time
LONGEST_SLEEP = 1e-3
RDMA_DEVICES = Path("/sys/class/infiniband")


class MooncakePlane(ReadingPlane):
    """A `Plane`. One for each process: the engine's threads end with it.

    memory: the reader's. host: by which others reach this process. protocol: the engine's, 'rdma'
    or 'tcp'. send_bytes: of the source's staging memory. Errors: TransferError where the engine is
    not installed or does not start.
    """

    def __init__(
        self,
        memory: np.ndarray,
        host: str = "127.0.0.1",
        protocol: str = "tcp",
        send_bytes: int = SEND_BYTES,
    ):
        super().__init__(f"{MOONCAKE}-{protocol}", memory, send_bytes)
        self._engine = _engine(host, protocol)
        for part in (memory, self.staged):
            if self._engine.register_memory(part.ctypes.data, part.nbytes):
                raise TransferError("memory", "the Mooncake Transfer Engine cannot register it")
        self._address = join_address(host, self._engine.get_rpc_port())

    @property
    def address(self) -> str:
        return self._address

    @property
    def peer(self) -> str:
        return self._address

    def read_from(self, peer: str, address: int, into: np.ndarray) -> str:
        """Reads bytes; see `ReadingPlane`. The engine gives up a source that is stopped after
        MC_TCP_STATUS_TIMEOUT_SEC, but for the first contact, which has no bound. The number of a
        read must not be asked for after its last answer: it is freed memory by then."""
        split_address(peer)
        engine = self._engine
        number = engine.batch_transfer_async_read(
            peer, [into.ctypes.data], [address], [into.nbytes]
        )
        if not number:
            return f"{peer} cannot be reached by the Mooncake Transfer Engine"
        sleep = FIRST_SLEEP
        while (state := engine.transfer_check_status(number)) == 0:
            time.sleep(sleep)
            sleep = min(2 * sleep, LONGEST_SLEEP)
        return "" if state == DONE else f"the Mooncake Transfer Engine failed with {state}"


def own_protocol() -> str:
    """Returns the engine's protocol for this machine: 'rdma' where it has devices for it."""
    has_devices = RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir())
    return "rdma" if has_devices else "tcp"


def _engine(host: str, protocol: str) -> Any:
    """A started Transfer Engine. Errors: TransferError."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise TransferError(
            "mooncake",
            f"needs pip install {PACKAGE} (jaxserve[mooncake]), and the system's libibverbs1 and "
            f"libnuma1: {error}",
        ) from None
    engine = TransferEngine()
    if engine.initialize(host, "P2PHANDSHAKE", protocol, ""):
        raise TransferError("mooncake", f"the Transfer Engine does not start on {host}, {protocol}")
    return engine
