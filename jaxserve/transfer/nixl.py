"""The plane of NIXL, NVIDIA's transfer library, over UCX, where it is installed (`pip install
--no-deps nixl nixl-cu12`, or with its dependencies, which are CUDA and PyTorch).

A reader needs the metadata of a source's agent, which its places carry. UCX chooses the transport
(UCX_TLS): RDMA, TCP, memory of the same host. It has no authentication and no encryption here, and
listens on all interfaces: its network must be private.
"""

from __future__ import annotations

import base64
import threading
import time
import uuid
from typing import Any

import numpy as np

from jaxserve.transfer.plane import NIXL
from jaxserve.transfer.protocol import TransferError, join_address
from jaxserve.transfer.reading_plane import SEND_BYTES, ReadingPlane

PACKAGE = "nixl"
BACKEND = "UCX"
DRAM = "DRAM"
UNDER_WAY = "PROC"
DONE = "DONE"
READ_SECONDS = 8.0  # after which a read is given up
FIRST_SLEEP = 5e-5  # seconds between two looks at a read, doubled each time
LONGEST_SLEEP = 1e-3
MAX_REMOTES = 1024  # agents whose metadata is kept


class NixlPlane(ReadingPlane):
    """A `Plane`. memory: the reader's. host: by which others reach this process. send_bytes: of the
    source's staging memory. Errors: TransferError where NIXL is not installed or does not start."""

    def __init__(self, memory: np.ndarray, host: str = "127.0.0.1", send_bytes: int = SEND_BYTES):
        super().__init__(NIXL, memory, send_bytes)
        self._agent = _agent()
        parts = [(part.ctypes.data, part.nbytes, 0, "") for part in (memory, self.staged)]
        self._registered = self._agent.register_memory(parts, DRAM)
        self._host = host
        self._metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        self._calls = threading.Lock()  # of the agent, which does not lock
        self._remotes: dict[str, Any] = {}  # names of agents, by their metadata

    @property
    def address(self) -> str:
        return join_address(self._host, 1)  # UCX's ports are in the metadata

    @property
    def peer(self) -> str:
        return self._metadata

    def read_from(self, peer: str, address: int, into: np.ndarray) -> str:
        """Reads bytes; see `ReadingPlane`."""
        agent = self._agent
        until = time.monotonic() + READ_SECONDS
        try:
            with self._calls:
                here = agent.get_xfer_descs([(into.ctypes.data, into.nbytes, 0)], DRAM)
                there = agent.get_xfer_descs([(address, into.nbytes, 0)], DRAM)
                handle = agent.initialize_xfer("READ", here, there, self._remote(peer))
                state = agent.transfer(handle)
            sleep = FIRST_SLEEP
            while state == UNDER_WAY and time.monotonic() < until:
                time.sleep(sleep)
                sleep = min(2 * sleep, LONGEST_SLEEP)
                with self._calls:
                    state = agent.check_xfer_state(handle)
            with self._calls:
                agent.release_xfer_handle(handle)
        except Exception:
            self._forget(peer)
            raise
        if state == DONE:
            return ""
        self._forget(peer)
        return f"NIXL ended a read with {state}"

    def _remote(self, peer: str) -> Any:
        """Returns the name of a source's agent. `_calls` is held."""
        if peer not in self._remotes:
            if len(self._remotes) >= MAX_REMOTES:
                self._agent.remove_remote_agent(self._remotes.pop(next(iter(self._remotes))))
            self._remotes[peer] = self._agent.add_remote_agent(base64.b64decode(peer))
        return self._remotes[peer]

    def _forget(self, peer: str) -> None:
        """Drops the connection to a source after a failure: the next read makes a new one."""
        with self._calls:
            name = self._remotes.pop(peer, None)
            if name is not None:
                self._agent.remove_remote_agent(name)


def _agent() -> Any:
    """A started agent of NIXL. Errors: TransferError."""
    try:
        from nixl._api import nixl_agent, nixl_agent_config
    except ImportError as error:
        raise TransferError("nixl", f"needs pip install {PACKAGE}: {error}") from None
    try:
        config = nixl_agent_config(enable_prog_thread=True, backends=[BACKEND])
        return nixl_agent(f"jaxserve-{uuid.uuid4().hex}", config)
    except Exception as error:
        raise TransferError("nixl", f"does not start: {error}") from None
