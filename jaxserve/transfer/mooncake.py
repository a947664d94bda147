"""The plane of the Mooncake Transfer Engine, over RDMA or TCP, where it is installed
(`pip install 'jaxserve[mooncake]'`): the reader brings blocks from the source's staging memory.

The engine has no authentication, no encryption and no deadlines: all who reach its ports read and
write all memory that is registered with it, and it listens on all interfaces. So only staging
memory is registered, and its network must be private. It is the reader who brings bytes, since he
knows when they have come; bytes that come after an error find their block's checksum.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.transfer.plane import MOONCAKE, Arrival, Staging
from jaxserve.transfer.protocol import (
    MAX_TEXT,
    TransferError,
    Window,
    check_memory,
    check_range,
    join_address,
    split_address,
)
from jaxserve.transfer.staging_pool import StagingPool

# for the engine, unless the operator has set them
ENVIRONMENT = {
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_TCP_SLICE_SIZE": str(1 << 20),
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",  # after which a read from a peer that is stopped has failed
}
PACKAGE = "mooncake-transfer-engine-non-cuda"
SEND_BYTES = 256 << 20  # of the source's staging memory
MAX_BRINGS = 64  # at once, each on a thread
DONE = 1  # of the engine's states; 0 is under way, below 0 failed
FIRST_SLEEP = 5e-5  # seconds between two looks at a read, doubled each time
LONGEST_SLEEP = 1e-3
CLOSE_SECONDS = 10.0  # that `close` waits for reads under way
RDMA_DEVICES = Path("/sys/class/infiniband")
PLACE = re.compile(r"(\S+)@([0-9a-f]{1,16})")  # the engine's address, and the memory's
log = logging.getLogger(__name__)


class MooncakePlane:
    """A `Plane`. One for each process: the engine's threads end with it.

    memory: the reader's. host: by which others reach this process. protocol: the engine's, 'rdma'
    or 'tcp'. send_bytes: of the source's staging memory. Errors: TransferError where the engine is
    not installed or does not start.
    """

    writes = False

    def __init__(
        self,
        memory: np.ndarray,
        host: str = "127.0.0.1",
        protocol: str = "tcp",
        send_bytes: int = SEND_BYTES,
    ):
        check_memory(memory)
        self.name = f"{MOONCAKE}-{protocol}"
        self.memory = memory
        self._staged = np.empty(send_bytes, np.uint8)
        self._engine = _engine(host, protocol)
        for part in (memory, self._staged):
            if self._engine.register_memory(part.ctypes.data, part.nbytes):
                raise TransferError("memory", "the Mooncake Transfer Engine cannot register it")
        self._address = join_address(host, self._engine.get_rpc_port())
        self.pool = StagingPool(self._staged)
        self._places = threading.Semaphore(MAX_BRINGS)
        self._lock = threading.Lock()
        self._moving: set[threading.Thread] = set()
        self._epoch = 0
        self._closed = False

    @property
    def address(self) -> str:
        return self._address

    # --- the reader

    def lend(self, base: int, size: int, seconds: float) -> Window:
        """Names a window. Sources do not write to it."""
        check_range("base", base, size, self.memory.size)
        with self._lock:
            self._epoch += 1
            return Window(self._address, "", size, self._epoch)

    def bring(self, into: np.ndarray, place: str, done: Callable[[], None]) -> Arrival:
        """Begins to read. The engine gives up a source that is stopped after
        MC_TCP_STATUS_TIMEOUT_SEC, but for the first contact, which has no bound."""
        match = PLACE.fullmatch(place[: 2 * MAX_TEXT])
        if match is None:
            raise TransferError("place", "is none of the Mooncake Transfer Engine")
        split_address(match[1])
        start = into.ctypes.data - self.memory.ctypes.data
        check_range("into", start, into.nbytes, self.memory.size)
        if not self._places.acquire(blocking=False):
            raise TransferError("reads", f"{MAX_BRINGS} are under way, the limit")
        arrival = Arrival()
        thread = threading.Thread(
            target=self._bring,
            args=(arrival, match[1], into, int(match[2], 16), done),
            name="transfer-bring",
            daemon=True,
        )
        with self._lock:
            if self._closed:
                self._places.release()
                raise TransferError("plane", "it was closed")
            self._moving.add(thread)
            thread.start()
        return arrival

    def _bring(
        self,
        arrival: Arrival,
        peer: str,
        into: np.ndarray,
        address: int,
        done: Callable[[], None],
    ) -> None:
        """The thread of one read."""
        began = time.monotonic()
        try:
            arrival.error = self._read(peer, into, address)
        except Exception as error:
            arrival.error = f"the Mooncake Transfer Engine failed: {error}"
        finally:
            arrival.seconds = time.monotonic() - began
            arrival.over.set()
            self._places.release()
            done()
            with self._lock:
                self._moving.discard(threading.current_thread())

    def _read(self, peer: str, into: np.ndarray, address: int) -> str:
        """Reads bytes; returns why they did not come, '' if they did. The number of a read must not
        be asked for after its last answer: it is freed memory by then."""
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

    def end(self, window: Window) -> None:
        """Does nothing: sources do not write."""

    # --- the source

    def stage(self, size: int, seconds: float) -> Staging | None:
        return self.pool.take(size, seconds)

    def expose(self, data: np.ndarray, window: Window, offset: int, seconds: float) -> str:
        start = data.ctypes.data - self._staged.ctypes.data
        check_range("data", start, data.nbytes, self._staged.size)
        return f"{self._address}@{data.ctypes.data:x}"

    def write(
        self, pieces: Sequence[tuple[int, np.ndarray]], window: Window, seconds: float
    ) -> None:
        raise TransferError("pieces", "readers of this plane bring what is exposed")

    def close(self) -> None:
        """Waits for reads under way, CLOSE_SECONDS at most. Memory stays registered as long as the
        process lives."""
        with self._lock:
            self._closed = True
            moving = list(self._moving)
        until = time.monotonic() + CLOSE_SECONDS
        for thread in moving:
            thread.join(max(0.0, until - time.monotonic()))
        _KEPT.append(self)


# An engine whose object is destroyed while others of the process run can hang; and one with reads
# under way may still write to its memory.
_KEPT: list[MooncakePlane] = []


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
