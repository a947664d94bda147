"""Planes by which the reader brings blocks with the one-sided reads of an engine, from a source's
registered staging memory into its own.

It is the reader that brings bytes, since it knows when they have come; bytes that come after an
error find their block's checksum.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from jaxserve.transfer.plane import Arrival, Staging
from jaxserve.transfer.protocol import TransferError, Window, check_memory, check_range
from jaxserve.transfer.staging_pool import StagingPool

SEND_BYTES = 256 << 20  # of the source's staging memory
MAX_BRINGS = 64  # at once, each on a thread
MAX_PLACE = 1 << 16  # characters of a place
CLOSE_SECONDS = 10.0  # that `close` waits for reads under way
PLACE = re.compile(r"(\S+)@([0-9a-f]{1,16})")  # how the engine reaches the source; where it reads


class ReadingPlane:
    """A `Plane` but for its engine, which a subclass has. Only staging memory is to be registered.

    name: see `Plane`. memory: the reader's. send_bytes: of the source's staging memory, `staged`.
    Errors: TransferError.
    """

    writes = False

    def __init__(self, name: str, memory: np.ndarray, send_bytes: int):
        check_memory(memory)
        self.name = name
        self.memory = memory
        self.staged = np.empty(send_bytes, np.uint8)
        self.pool = StagingPool(self.staged)
        self._places = threading.Semaphore(MAX_BRINGS)
        self._lock = threading.Lock()
        self._moving: set[threading.Thread] = set()
        self._epoch = 0
        self._closed = False

    # --- the engine

    @property
    def peer(self) -> str:
        """Text by which the engines of others reach this one, without white space."""
        raise NotImplementedError

    @property
    def address(self) -> str:
        """Address at which others reach this process, as host:port."""
        raise NotImplementedError

    def read_from(self, peer: str, address: int, into: np.ndarray) -> str:
        """Reads bytes at an address of a peer's staging memory, on a thread of the read's own.
        Returns why they did not come, '' if they did. May raise whatever the engine does."""
        raise NotImplementedError

    # --- the reader

    def lend(self, base: int, size: int, seconds: float) -> Window:
        """Names a window. Sources do not write to it."""
        check_range("base", base, size, self.memory.size)
        with self._lock:
            self._epoch += 1
            return Window(self.address, "", size, self._epoch)

    def bring(self, into: np.ndarray, place: str, done: Callable[[], None]) -> Arrival:
        match = PLACE.fullmatch(place) if len(place) <= MAX_PLACE else None
        if match is None:
            raise TransferError("place", f"is none of the plane {self.name}")
        check_range("into", _offset(into, self.memory), into.nbytes, self.memory.size)
        if not self._places.acquire(blocking=False):
            raise TransferError("reads", f"{MAX_BRINGS} are under way, the limit")
        arrival = Arrival()
        thread = threading.Thread(
            target=self._bring,
            args=(arrival, match[1], int(match[2], 16), into, done),
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
        address: int,
        into: np.ndarray,
        done: Callable[[], None],
    ) -> None:
        """The thread of one read."""
        began = time.monotonic()
        try:
            arrival.error = self.read_from(peer, address, into)
        except Exception as error:
            arrival.error = f"the engine of {self.name} failed: {error}"
        finally:
            arrival.seconds = time.monotonic() - began
            arrival.over.set()
            self._places.release()
            done()
            with self._lock:
                self._moving.discard(threading.current_thread())

    def end(self, window: Window) -> None:
        """Does nothing: sources do not write."""

    # --- the source

    def stage(self, size: int, seconds: float) -> Staging | None:
        return self.pool.take(size, seconds)

    def expose(self, data: np.ndarray, window: Window, offset: int, seconds: float) -> str:
        check_range("data", _offset(data, self.staged), data.nbytes, self.staged.size)
        return f"{self.peer}@{data.ctypes.data:x}"

    def write(
        self, pieces: Sequence[tuple[int, np.ndarray]], window: Window, seconds: float
    ) -> None:
        raise TransferError("pieces", "readers of this plane bring what is exposed")

    def close(self) -> None:
        """Waits for reads under way, CLOSE_SECONDS at most. Memory stays registered as long as the
        process lives: a read under way may still write to it."""
        with self._lock:
            self._closed = True
            moving = list(self._moving)
        until = time.monotonic() + CLOSE_SECONDS
        for thread in moving:
            thread.join(max(0.0, until - time.monotonic()))
        _KEPT.append(self)


_KEPT: list[ReadingPlane] = []  # closed ones; engines whose object is destroyed may hang


def _offset(part: np.ndarray, whole: np.ndarray) -> int:
    return part.ctypes.data - whole.ctypes.data
