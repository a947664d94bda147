"""Interface of a plane: one way for blocks from a source's memory into the buffers of a reader.

The reader lends a window of its memory, plain data that travels to the source by gRPC. The source
copies blocks into staging memory and exposes them: it has written them into the window by then, or
names a place where they lie open until the reader has brought them and has said so. Contents are
not checked here: both sides compare checksums.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from jaxserve.transfer.protocol import Window

TCP = "tcp"  # which every replica has
MOONCAKE = "mooncake"
NIXL = "nixl"
TRANSFERS = (TCP, MOONCAKE, NIXL)  # values of --transfer


class Plane(Protocol):
    """Moves blocks between replicas. All methods may be called by any thread.

    name: by which both sides agree on it. writes: whether the source writes into windows, so that
    `write` may be called. memory: the reader's, uint8 [bytes], whose parts it lends. address: at
    which others reach this process by it.
    """

    name: str
    writes: bool
    memory: np.ndarray

    @property
    def address(self) -> str: ...

    # --- the reader

    def lend(self, base: int, size: int, seconds: float) -> Window:
        """Lends memory[base : base + size] for some seconds. Errors: TransferError."""
        ...

    def bring(self, into: np.ndarray, place: str, done: Callable[[], None]) -> Arrival:
        """Begins to bring the bytes that a source exposed at `place` to `into`, uint8 [bytes], a
        part of the memory. Never waits. done: called once when it is over, by any thread. Errors:
        TransferError."""
        ...

    def end(self, window: Window) -> None:
        """Ends a window: a source's write that comes later is refused."""
        ...

    # --- the source

    def stage(self, size: int, seconds: float) -> Staging | None:
        """Gives staging memory for groups of `size` bytes, waiting for it at most so long; None:
        ask again. Errors: TransferError if there is never enough."""
        ...

    def expose(self, data: np.ndarray, window: Window, offset: int, seconds: float) -> str:
        """Makes staged bytes, uint8 [bytes], those at `offset` of a window. Returns "" once they
        are there, else the place from which the reader is to bring them; then `data` stays as it is
        until it has. Errors: TransferError, also where it takes longer than `seconds`."""
        ...

    def write(
        self, pieces: Sequence[tuple[int, np.ndarray]], window: Window, seconds: float
    ) -> None:
        """Writes staged bytes, each uint8 [bytes], at offsets of a window; returns when they are
        there. Errors: as of `expose`."""
        ...

    def close(self) -> None: ...


@dataclass
class Arrival:
    """Bytes on their way to a reader. over: set once they are there, or never will be; after that
    `error` says why not, '' if they are, and `seconds` how long it took."""

    over: threading.Event = field(default_factory=threading.Event)
    error: str = ""
    seconds: float = 0.0


class Staging:
    """Staging memory of one stream. buffers: each uint8 [bytes] of a group."""

    def __init__(self, buffers: Sequence[np.ndarray], release: Callable[[], None] = lambda: None):
        self.buffers = list(buffers)
        self.close = release  # gives it back: nothing in it is exposed any more


def choose_plane(own: Collection[str], offered: Collection[str]) -> str:
    """Returns the first plane of a source's offer that the reader has too; tcp where none is."""
    return next((name for name in offered if name in own), TCP)
