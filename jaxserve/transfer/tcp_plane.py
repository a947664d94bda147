"""The plane that every replica has: the source writes into the reader's window over TCP."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jaxserve.transfer.plane import TCP, Arrival, Staging
from jaxserve.transfer.protocol import Ticket, TransferError, Window
from jaxserve.transfer.tcp import TcpTransfer

RELEASE_SECONDS = 1.0  # for a write to end, once its time is over


class TcpPlane:
    """A `Plane` over a `TcpTransfer`, which is closed with it."""

    name = TCP
    writes = True

    def __init__(self, transfer: TcpTransfer):
        self.transfer = transfer
        self.memory = transfer.memory

    @property
    def address(self) -> str:
        return self.transfer.address

    def lend(self, base: int, size: int, seconds: float) -> Window:
        return self.transfer.lend(base, size, seconds)

    def bring(self, into: np.ndarray, place: str, done: Callable[[], None]) -> Arrival:
        raise TransferError("place", "blocks that come over TCP lie in the reader's window")

    def end(self, window: Window) -> None:
        self.transfer.end(window)

    def stage(self, size: int, seconds: float) -> Staging:
        return Staging([np.empty(size, np.uint8)])

    def expose(self, data: np.ndarray, window: Window, offset: int, seconds: float) -> str:
        self._finish(self.transfer.write(window, offset, data, seconds), seconds)
        return ""

    def write(
        self, pieces: Sequence[tuple[int, np.ndarray]], window: Window, seconds: float
    ) -> None:
        self._finish(self.transfer.write_many(window, pieces, seconds), seconds)

    def _finish(self, ticket: Ticket, seconds: float) -> None:
        """Waits until a write is over. Errors: TransferError."""
        fault = self.transfer.wait(ticket, seconds + RELEASE_SECONDS)
        if fault is None:
            raise TransferError("write", "is not over in time")
        self.transfer.release(ticket)
        if fault:
            raise TransferError("write", fault)

    def close(self) -> None:
        self.transfer.close()
