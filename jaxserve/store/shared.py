"""The shared cold tier: blocks of KV that any replica may have put into a store of many hosts.

No caller waits for the store. What leaves host memory is copied to a few rows of staging memory and
put by a thread; where the store is slower than that, blocks are not put. Waiting prompts have the
store asked for the blocks that they lack: those that it has from the first on, without a gap, are
announced as coming, and brought to host memory by another thread. So a prompt hits what is in the
store, and never waits for a store that does not answer: after a call that hung, no other is made
for a while.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np

from jaxserve.cache.tiers import Lookup

ROWS = 16  # blocks of one call
WAITING = 32  # blocks that may wait to be put, and MiB of them, but for four
WAITING_MIB = 256
LEAST = 4  # blocks that a prompt lacks, for the store to be asked
SLOW_SECONDS = 1.0  # a call without any block that takes longer has hung
REST_SECONDS = 10.0  # without calls after one that hung
CLOSE_SECONDS = 10.0
log = logging.getLogger(__name__)


class BlockStore(Protocol):
    """A store of many hosts, as `store.mooncake.MooncakeBlocks`. Its errors are misses."""

    def put(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[np.ndarray],
        expires: float = 0.0,
        keep: bool = False,
    ) -> list[bool]: ...

    def get(self, keys: Sequence[bytes], into: Sequence[np.ndarray]) -> list[bool]: ...

    def contains(self, keys: Sequence[bytes]) -> list[bool]: ...

    def close(self) -> None: ...


class Coming(Protocol):
    """Receiver of the blocks that a prompt lacks. Called on a thread of the tier."""

    def expect(self, keys: Sequence[bytes]) -> None:
        """Takes note of blocks that the store has and that are being brought."""

    def came(self, key: bytes, block: np.ndarray) -> None:
        """Copies a block that came."""

    def settle(self, keys: Sequence[bytes]) -> None:
        """Ends the expectation of blocks: they have come, or will not come."""


class SharedTier:
    """A store, behind host memory. All methods may be called from any thread, and none but `close`
    waits for the store, unless it says so."""

    def __init__(self, store: BlockStore, block_bytes: int):
        self._store = store
        self._waiting = min(WAITING, max(4, WAITING_MIB * 2**20 // block_bytes))
        self._memory = np.empty((self._waiting, block_bytes), np.uint8)
        self._arriving = np.empty((min(ROWS, self._waiting), block_bytes), np.uint8)
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for row in range(self._waiting):
            self._free.put(row)
        self._offered: queue.SimpleQueue[tuple[bytes, int, float] | None] = queue.SimpleQueue()
        self._rests_until = 0.0  # in seconds of time.monotonic
        self._closing = False
        self.stored = 0
        self.dropped = 0  # blocks that were offered and not put
        self._writer = threading.Thread(target=self._write, name="kv-shared-put", daemon=True)
        self._writer.start()
        self._reader = ThreadPoolExecutor(1, "kv-shared-get")

    # --- what goes there

    def offer(self, key: bytes, block: np.ndarray, expires: float, seconds: float = 0.0) -> None:
        """Has a block [block_bytes] uint8 put that is kept until `expires` (unix seconds, 0: as
        long as there is room). Copies it; waits for room for at most `seconds`."""
        row = None if self._rests else self._row(seconds)
        if row is None:
            self.dropped += 1
            return
        self._memory[row] = block
        self._offered.put((key, row, expires))

    def _row(self, seconds: float) -> int | None:
        try:
            return self._free.get(seconds > 0, seconds or None)
        except queue.Empty:
            return None

    def _write(self) -> None:
        while (first := self._offered.get()) is not None:
            offered, last = self._more(first)
            try:
                self._put(offered)
            except Exception:
                log.exception("blocks were not put into the shared store")
            for _, row, _ in offered:
                self._free.put(row)
            if last:
                return

    def _more(self, first: tuple[bytes, int, float]) -> tuple[list[tuple[bytes, int, float]], bool]:
        """Takes what was offered with this block; and whether nothing comes after it."""
        offered = [first]
        while len(offered) < ROWS:
            try:
                one = self._offered.get_nowait()
            except queue.Empty:
                break
            if one is None:
                return offered, True
            offered.append(one)
        return offered, False

    def _put(self, offered: list[tuple[bytes, int, float]]) -> None:
        """Puts blocks that the store lacks, those of one time of expiry together."""
        present = self._asked([key for key, _, _ in offered])
        new = [each for each, known in zip(offered, present) if not known]
        for expires in sorted({expires for _, _, expires in new}):
            part = [(key, row) for key, row, until in new if until == expires]
            if self._rests:
                self.dropped += len(part)
                continue
            began = time.monotonic()
            blocks = [self._memory[row] for _, row in part]
            put = self._store.put([key for key, _ in part], blocks, expires, keep=bool(expires))
            self._note_time(began, any(put))
            self.stored += sum(put)
            self.dropped += len(put) - sum(put)

    # --- what comes from there

    def look(self, keys: Sequence[bytes], coming: Coming) -> Lookup:
        """Has the store asked for these blocks of a prompt, in order. `coming` is called with those
        that it has from the first on, before the lookup is answered."""
        if len(keys) < LEAST or self._rests or self._closing:
            return Lookup(answered=True)
        lookup = Lookup()
        try:
            self._reader.submit(self._look, list(keys), coming, lookup)
        except RuntimeError:  # it is closed just now
            lookup.answered = True
        return lookup

    def _look(self, keys: list[bytes], coming: Coming, lookup: Lookup) -> None:
        stored: list[bytes] = []
        try:
            stored = keys[: _leading(self._asked(keys))]
            coming.expect(stored)
        finally:
            lookup.answered = True
        try:
            self._bring(stored, coming)
        finally:
            coming.settle(stored)

    def _bring(self, keys: list[bytes], coming: Coming) -> None:
        """Brings blocks until one does not come."""
        rows = self._arriving
        for first in range(0, len(keys), len(rows)):
            part = keys[first : first + len(rows)]
            if self._rests or self._closing:
                return
            began = time.monotonic()
            came = _leading(self._store.get(part, list(rows[: len(part)])))
            self._note_time(began, bool(came))
            for key, row in zip(part[:came], rows):
                coming.came(key, row)
            if came < len(part):
                return

    # --- both

    def _asked(self, keys: list[bytes]) -> list[bool]:
        """Asks whether the store has each block."""
        if self._rests:
            return [False] * len(keys)
        began = time.monotonic()
        present = self._store.contains(keys)
        self._note_time(began, any(present))
        return present

    @property
    def _rests(self) -> bool:
        """Returns whether no call is made now, after one that hung."""
        return time.monotonic() < self._rests_until

    def _note_time(self, began: float, well: bool) -> None:
        """Notes how long a call took that ended now. well: whether any block came of it."""
        now = time.monotonic()
        if now - began > SLOW_SECONDS and not well:
            self._rests_until = now + REST_SECONDS

    @property
    def idle(self) -> bool:
        """Returns whether all blocks that were offered are put, or were not put."""
        return self._free.qsize() == len(self._memory)

    def close(self) -> None:
        """Puts what was offered, within CLOSE_SECONDS, and leaves the store."""
        self._closing = True
        self._offered.put(None)
        self._writer.join(CLOSE_SECONDS)
        self._reader.shutdown(wait=False, cancel_futures=True)
        self._store.close()


def _leading(present: Sequence[bool]) -> int:
    """Counts the True ones before the first False."""
    return next((number for number, one in enumerate(present) if not one), len(present))
