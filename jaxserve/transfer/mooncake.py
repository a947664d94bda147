"""Transfers by the Mooncake Transfer Engine, over TCP or RDMA, where it is installed
(`pip install jaxserve[mooncake]`).

The engine has no authentication, no encryption, no tokens and no deadlines: all who reach its
ports reads and writes all memory that is registered with it, and it listens on all interfaces. So
only staging memory is registered, its network must be private, and a window is fenced by agreement
alone: `end` returns False, and neither side uses the memory again before the ticket is over.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import Queue
from typing import Any

import numpy as np

from jaxserve.transfer.frames import decode_token
from jaxserve.transfer.protocol import (
    MAX_TICKETS,
    Ticket,
    TransferCounts,
    TransferError,
    Window,
    check_memory,
    check_pieces,
    check_range,
    check_seconds,
    join_address,
)
from jaxserve.transfer.windows import Windows

# for the engine, unless the operator has set them
ENVIRONMENT = {
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_TCP_SLICE_SIZE": str(1 << 20),
    "MC_TCP_STATUS_TIMEOUT_SEC": "10",  # after which a write to a peer that is stopped has failed
}
PROTOCOLS = ("tcp", "rdma")
DONE = 1  # of the engine's states; 0 is under way, below 0 failed
FIRST_SLEEP = 5e-5  # seconds between two looks at a ticket, doubled each time
LONGEST_SLEEP = 2e-3
CLOSE_SECONDS = 15.0  # that `close` waits for tickets under way
TOKEN = re.compile(r"([0-9a-f]+)@([0-9a-f]{1,16})")  # ours, and the memory's address
log = logging.getLogger(__name__)


@dataclass
class _Write:
    """deadline: the moment after which it is not begun any more. size: bytes. moving: numbers of
    the engine's transfers that are not over. An engine's number must not be asked after its last
    answer: it is freed memory by then. submitted: nothing more of it will be begun."""

    deadline: float
    size: int
    moving: list[int] = field(default_factory=list)
    error: str = ""
    submitted: bool = False


_Job = tuple[_Write, list[tuple[int, int, int]]]  # source, target and size of each piece


class MooncakeTransfer:
    """A `Transfer`. `write` takes data inside the staging memory only, and its `seconds` bound
    only how late a write begins: from then on the engine gives up when it likes
    (MC_TCP_STATUS_TIMEOUT_SEC for a peer that was there once). One for each process: its threads
    end with the process.

    host: by which peers reach this process. protocol: 'tcp' or 'rdma'. devices: RDMA devices,
    comma-separated; '' for all. Errors: TransferError where the engine is not installed or does not
    start.
    """

    def __init__(
        self, memory: np.ndarray, host: str = "127.0.0.1", protocol: str = "tcp", devices: str = ""
    ):
        check_memory(memory)
        if protocol not in PROTOCOLS:
            raise TransferError("protocol", f"must be one of {', '.join(PROTOCOLS)}")
        self.memory = memory
        self._start: int = memory.ctypes.data
        self._engine = _engine(host, protocol, devices)
        if self._engine.register_memory(self._start, memory.nbytes):
            raise TransferError("memory", "the Mooncake Transfer Engine cannot register it")
        self.address = join_address(host, self._engine.get_rpc_port())
        self._windows = Windows()
        self._lock = threading.Lock()  # of all below, and of the engine's numbers
        self._writes: dict[int, _Write] = {}
        self._queues: dict[str, Queue[_Job | None]] = {}
        self._threads: list[threading.Thread] = []
        self._last = 0
        self._sent_bytes = 0
        self._closed = False

    def lend(self, base: int, size: int, seconds: float) -> Window:
        check_range("base", base, size, self.memory.size)
        check_seconds(seconds)
        if self._closed:
            raise TransferError("transfer", "it was closed")
        token, epoch = self._windows.lend(base, size, time.monotonic() + seconds)
        return Window(self.address, f"{token.hex()}@{self._start + base:x}", size, epoch)

    def end(self, window: Window) -> bool:
        token, _ = _parts_of(window)
        self._windows.end(token, window.epoch)
        return False

    def write(self, window: Window, offset: int, data: np.ndarray, seconds: float) -> Ticket:
        return self.write_many(window, [(offset, data)], seconds)

    def write_many(
        self, window: Window, pieces: Sequence[tuple[int, np.ndarray]], seconds: float
    ) -> Ticket:
        checked = check_pieces(window, pieces)
        check_seconds(seconds)
        _, address = _parts_of(window)
        for _, data in pieces:
            check_range("data", data.ctypes.data - self._start, data.nbytes, self.memory.size)
        size = sum(len(data) for _, data in checked)
        write = _Write(time.monotonic() + seconds, size)
        parts = [(data.ctypes.data, address + offset, data.nbytes) for offset, data in pieces]
        with self._lock:
            if self._closed:
                raise TransferError("transfer", "it was closed")
            if len(self._writes) >= MAX_TICKETS:
                raise TransferError("tickets", f"{MAX_TICKETS} are not released: the limit")
            self._last += 1
            self._writes[self._last] = write
            self._queue_of(window.peer).put((write, parts))
            return Ticket(self._last, size)

    def _queue_of(self, peer: str) -> Queue[_Job | None]:
        """The jobs of the thread that submits to a peer: the first time the engine asks the peer
        for its memory, and waits for the answer without a bound."""
        if peer not in self._queues:
            jobs: Queue[_Job | None] = Queue()
            thread = threading.Thread(
                target=self._submit_all, args=(peer, jobs), name="transfer-submit", daemon=True
            )
            self._queues[peer] = jobs
            self._threads.append(thread)
            thread.start()
        return self._queues[peer]

    def _submit_all(self, peer: str, jobs: Queue[_Job | None]) -> None:
        """The thread of one peer."""
        while (job := jobs.get()) is not None:
            write, parts = job
            for part in parts:
                if not self._submit(peer, write, *part):
                    break
            with self._lock:
                write.submitted = True

    def _submit(self, peer: str, write: _Write, source: int, target: int, size: int) -> bool:
        """Begins one piece. False where the write has failed."""
        if self._closed or time.monotonic() >= write.deadline:
            with self._lock:
                write.error = "seconds: its time was over before it could be submitted"
            return False
        number = self._engine.transfer_submit_write(peer, source, target, size)
        with self._lock:
            if number:
                write.moving.append(number)
            else:
                write.error = write.error or "peer: the write could not be submitted"
        return bool(number)

    def status(self, ticket: Ticket) -> str | None:
        with self._lock:
            write = self._writes.get(ticket.number)
            if write is None:
                raise TransferError("ticket", f"number {ticket.number} was released or never given")
            if write.moving:
                self._look(write)
            return write.error if write.submitted and not write.moving else None

    def _look(self, write: _Write) -> None:
        """Asks the engine what is still under way."""
        moving = []
        for number in write.moving:
            state = self._engine.transfer_check_status(number)
            if state == 0:
                moving.append(number)
            elif state != DONE:
                write.error = write.error or f"the Mooncake Transfer Engine failed with {state}"
        write.moving = moving
        if not moving and not write.error:
            self._sent_bytes += write.size

    def wait(self, ticket: Ticket, seconds: float) -> str | None:
        until = time.monotonic() + seconds
        sleep = FIRST_SLEEP
        while (status := self.status(ticket)) is None:
            seconds_left = until - time.monotonic()
            if seconds_left <= 0:
                break
            time.sleep(min(sleep, seconds_left))
            sleep = min(2 * sleep, LONGEST_SLEEP)
        return status

    def release(self, ticket: Ticket) -> None:
        if self.status(ticket) is None:
            raise TransferError("ticket", "is under way")
        with self._lock:
            self._writes.pop(ticket.number, None)

    def counts(self) -> TransferCounts:
        """The engine counts neither its connections nor what it receives."""
        return TransferCounts(len(self._windows), len(self._writes), 0, self._sent_bytes, 0, 0, 0)

    def close(self) -> None:
        """Waits for tickets under way, CLOSE_SECONDS at most; where some are left, the memory stays
        registered as long as the process lives."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            tickets = [Ticket(number, write.size) for number, write in self._writes.items()]
            for jobs in self._queues.values():
                jobs.put(None)
        until = time.monotonic() + CLOSE_SECONDS
        seconds_left = lambda: max(0.0, until - time.monotonic())
        for thread in self._threads:
            thread.join(seconds_left())
        moving = [ticket for ticket in tickets if self.wait(ticket, seconds_left()) is None]
        self._windows.end_all()
        if moving:
            log.warning("transfer: %d tickets were under way at the end", len(moving))
        else:
            self._engine.unregister_memory(self._start)
        _KEPT.append(self)


# An engine whose object is destroyed while others of the process run can hang; and one with tickets
# under way may still read and write its memory.
_KEPT: list[MooncakeTransfer] = []


def _engine(host: str, protocol: str, devices: str) -> Any:
    """A started Transfer Engine. Errors: TransferError."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise TransferError("mooncake", f"needs pip install jaxserve[mooncake]: {error}") from None
    engine = TransferEngine()
    if engine.initialize(host, "P2PHANDSHAKE", protocol, devices):
        raise TransferError("mooncake", f"the Transfer Engine does not start on {host}, {protocol}")
    return engine


def _parts_of(window: Window) -> tuple[bytes, int]:
    """Token and address of a window of this transport. Errors: TransferError."""
    match = TOKEN.fullmatch(window.token)
    if match is None:
        raise TransferError("token", "is none of a Mooncake window")
    return decode_token(match[1]), int(match[2], 16)
