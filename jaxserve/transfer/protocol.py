"""Interface of transfers, and the plain data that they give out.

A transfer owns one staging memory, an array of bytes that lives as long as it does. As receiver it
lends windows of that memory; as sender it writes into windows that others lent (Mooncake 3.2.3).
Contents are not checked: the caller compares a checksum of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

MAX_WINDOW_BYTES = 1 << 40
MAX_WINDOWS = 4096  # lent at a time
MAX_TICKETS = 1 << 16  # not released
MAX_TEXT = 256  # characters of an address or a token
ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:/\s]+)):([0-9]{1,5})")


class TransferError(ValueError):
    """A call that is refused: the text names the field and its limit."""

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}")
        self.field = field


@dataclass(frozen=True)
class Window:
    """Leave to write into `size` bytes of a receiver's staging memory, until its lease is over.

    peer: the receiver's addresses, host:port, apart by commas. token: names the window to the
    receiver; all who have it and may connect can write. epoch: counts the receiver's windows, so
    that no two are the same.
    """

    peer: str
    token: str
    size: int
    epoch: int

    def __post_init__(self) -> None:
        """Checks the fields. Errors: TransferError."""
        for name in ("peer", "token"):
            text = getattr(self, name)
            if not isinstance(text, str) or len(text) > MAX_TEXT:
                raise TransferError(name, f"must be a text of at most {MAX_TEXT} characters")
        for name in ("size", "epoch"):
            number = getattr(self, name)
            if type(number) is not int or not 0 <= number <= MAX_WINDOW_BYTES:
                raise TransferError(name, f"must be an integer from 0 to {MAX_WINDOW_BYTES}")
        for address in addresses_of(self.peer):
            split_address(address)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Window:
        """The inverse of `to_json`, of what came from elsewhere. Errors: TransferError."""
        if not isinstance(value, Mapping) or set(value) != {"peer", "token", "size", "epoch"}:
            raise TransferError("window", "must have peer, token, size and epoch, and no more")
        return cls(**value)


@dataclass(frozen=True)
class Ticket:
    """One or several writes under way. number: unique in its transfer. size: bytes in all."""

    number: int
    size: int


@dataclass(frozen=True)
class TransferCounts:
    """Counts of a transfer: what it holds now, and what it has done since it was made.

    windows: lent and not ended. tickets: not released. connections: open, in both directions.
    retries: slices that were sent again over another connection. refused: connections of strangers.
    """

    windows: int
    tickets: int
    connections: int
    sent_bytes: int
    received_bytes: int
    retries: int
    refused: int


class Transfer(Protocol):
    """Moves bytes from this process's memory into windows of others, and back. All methods may be
    called by any thread."""

    @property
    def memory(self) -> np.ndarray:
        """The staging memory, uint8 [bytes]: windows are parts of it, and so is what is sent."""
        ...

    @property
    def address(self) -> str:
        """Addresses at which others reach this transfer, host:port, apart by commas."""
        ...

    def lend(self, base: int, size: int, seconds: float) -> Window:
        """Lends memory[base : base + size] for some seconds. Errors: TransferError for a range
        outside the memory or one that overlaps a window that is lent."""
        ...

    def end(self, window: Window) -> None:
        """Ends a window, also one whose lease is over, within milliseconds: no byte is written
        there from now on, and the memory is the caller's."""
        ...

    def write(self, window: Window, offset: int, data: np.ndarray, seconds: float) -> Ticket:
        """Begins to write `data`, uint8 [bytes] of the staging memory, at `offset` of a window.

        `data` must not change before the ticket is over. Each byte of a window is to be written by
        one ticket: after an error it is unknown which bytes arrived, and late ones may still
        arrive, until the receiver has ended the window. Errors: TransferError.
        """
        ...

    def write_many(
        self, window: Window, pieces: Sequence[tuple[int, np.ndarray]], seconds: float
    ) -> Ticket:
        """Writes several pieces (offset, data) under one ticket, see `write`."""
        ...

    def status(self, ticket: Ticket) -> str | None:
        """None: under way. '': all bytes are in the receiver's memory. Else why they are not; then
        too nothing reads `data` any more. Errors: TransferError for a released ticket."""
        ...

    def wait(self, ticket: Ticket, seconds: float) -> str | None:
        """Waits until a ticket is over, at most for some seconds; returns its status."""
        ...

    def release(self, ticket: Ticket) -> None:
        """Forgets a ticket that is over. Errors: TransferError for one that is under way."""
        ...

    def counts(self) -> TransferCounts: ...

    def close(self) -> None:
        """Ends all windows, tickets, connections and threads, within seconds."""
        ...


def split_address(address: str) -> tuple[str, int]:
    """Host and port of 'host:port' or '[IPv6]:port'. Errors: TransferError."""
    match = ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match[3]) < 1 << 16:
        raise TransferError("peer", f"must be host:port, not {address[:MAX_TEXT]!r}")
    return match[1] or match[2], int(match[3])


def addresses_of(peer: str) -> tuple[str, ...]:
    """The addresses of a peer, which are apart by commas."""
    return tuple(peer.split(","))


def join_address(host: str, port: int) -> str:
    """The inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_memory(memory: np.ndarray) -> None:
    """Checks memory. Errors: TransferError for what cannot be staging memory."""
    if memory.dtype != np.uint8 or memory.ndim != 1 or not memory.flags.c_contiguous:
        raise TransferError("memory", "must be a contiguous array of uint8 of one dimension")
    if not memory.flags.writeable:
        raise TransferError("memory", "must be writeable")


def check_range(name: str, start: int, size: int, limit: int) -> None:
    """Checks a range. Errors: TransferError where [start, start + size) is not inside [0, limit) or
    is empty."""
    if size < 1 or start < 0 or start + size > limit:
        raise TransferError(
            name, f"bytes {start} to {start + size} are not inside the {limit} bytes there are"
        )


def check_seconds(seconds: float) -> None:
    """Checks a time. Errors: TransferError for what is no finite positive time."""
    if not 0 < seconds < 1e6:
        raise TransferError("seconds", f"must be between 0 and 1000000, not {seconds}")


def check_pieces(
    window: Window, pieces: Sequence[tuple[int, np.ndarray]]
) -> list[tuple[int, memoryview]]:
    """Pieces as bytes, each inside the window. Errors: TransferError."""
    if not pieces:
        raise TransferError("pieces", "there must be at least one")
    checked = []
    for offset, data in pieces:
        if data.dtype != np.uint8 or not data.flags.c_contiguous:
            raise TransferError("data", "must be a contiguous array of uint8")
        view = data.data.cast("B")
        check_range("offset", offset, view.nbytes, window.size)
        checked.append((offset, view))
    return checked
