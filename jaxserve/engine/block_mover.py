"""Moves blocks of KV between the devices' pages and the tiers below, beside the steps.

What the devices do happens in the order of commands: pages are read before the step that overwrites
them, and written before the step that attends over them. Everything that takes time is done by two
threads: one waits for pages that were read and stores them, one finds the blocks of a fetch, checks
them and has them brought to the devices, piece by piece, at most so many ahead of the engine.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxserve.cache.tiers import Fetch, key_of
from jaxserve.engine.page_io import BlocksRead, GatheredBlocks, PageIo
from jaxserve.store.tiered import TieredBlocks

PIECES_AHEAD = 4  # of fetches, on the devices or on their way and not written to their pages yet
STORES_AHEAD = 64  # launches whose pages were read and not stored yet; more are not read
CLOSE_SECONDS = 10.0
log = logging.getLogger(__name__)


class Arrival(NamedTuple):
    """A piece of a fetch that can be written to its pages: `blocks` of them, the next ones of the
    fetch. last: nothing comes after it; what is missing then was not found."""

    ticket: int
    piece: int
    blocks: int
    last: bool


class BlockMover:
    """Stores and fetches blocks. arrived: hears of each piece of a fetch, on another thread."""

    def __init__(self, io: PageIo, tiers: TieredBlocks, arrived: Callable[[Arrival], None]):
        self.io = io
        self.tiers = tiers
        self._arrived = arrived
        self._stores: queue.Queue[tuple[BlocksRead, list[bytes], list[int]] | None] = queue.Queue()
        self._fetches: queue.Queue[Fetch | None] = queue.Queue()
        self._pieces: dict[tuple[int, int], GatheredBlocks | None] = {}
        self._room = threading.Semaphore(PIECES_AHEAD)
        self._dropped: set[int] = set()  # tickets of fetches that nobody waits for
        self._buffer = np.empty((io.most, io.layout.bytes), np.uint8)  # of the fetching thread
        self._closing = threading.Event()
        self.skipped = 0  # blocks that were not stored because too many waited to be
        self._threads = [
            threading.Thread(target=self._run, args=job, name=name, daemon=True)
            for name, *job in (
                ("kv-store", self._stores, self._store),
                ("kv-fetch", self._fetches, self._fetch),
            )
        ]
        for thread in self._threads:
            thread.start()

    # --- on the engine's thread

    def store(self, stores: np.ndarray) -> None:
        """Reads pages, before later commands overwrite them, and has their blocks stored. stores:
        see `StepCommand`."""
        if not len(stores):
            return
        if self._stores.qsize() >= STORES_AHEAD:
            self.skipped += len(stores)
            return
        at = 0
        for blocks in self.io.read(stores[:, :2]):
            part = stores[at : at + len(blocks)]
            keys = [key_of(row[3:]) for row in part]
            self._stores.put((blocks, keys, part[:, 2].tolist()))
            at += len(blocks)

    @property
    def stored(self) -> bool:
        """Whether all that was read is stored."""
        return not self._stores.unfinished_tasks

    def fetch(self, fetch: Fetch) -> None:
        """Has the blocks of a fetch brought to the devices; `arrived` will hear of them."""
        self._fetches.put(fetch)

    def load(self, ticket: int, piece: int) -> None:
        """Writes a piece that arrived to its pages."""
        blocks = self._pieces.pop((ticket, piece))
        self._room.release()
        if blocks is not None:
            self.io.write(blocks)

    def drop(self, arrival: Arrival) -> None:
        """Forgets a piece that arrived; no more of its fetch need come."""
        if arrival.last:
            self._dropped.discard(arrival.ticket)
        else:
            self._dropped.add(arrival.ticket)
        self._pieces.pop((arrival.ticket, arrival.piece))
        self._room.release()

    def close(self) -> None:
        """Ends the threads, once what was read is stored, and closes the tiers."""
        self._closing.set()
        self._room.release()
        self._stores.put(None)
        self._fetches.put(None)
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)
        self.tiers.close()

    # --- on threads of its own

    def _run(self, jobs: queue.Queue, do: Callable) -> None:
        while (job := jobs.get()) is not None:
            try:
                do(job)
            except Exception:
                log.exception("blocks of KV could not be moved")
            jobs.task_done()

    def _store(self, job: tuple[BlocksRead, list[bytes], list[int]]) -> None:
        blocks, keys, keep = job
        blocks.wait()
        for index, (key, seconds) in enumerate(zip(keys, keep)):
            self.tiers.put(key, functools.partial(blocks.copy, index), float(seconds))

    def _fetch(self, fetch: Fetch) -> None:
        """Brings the blocks in pieces until one is missing; the last piece may be empty."""
        most = self.io.most
        for piece, first in enumerate(range(0, len(fetch.keys), most)):
            self._room.acquire()
            if self._closing.is_set() or fetch.ticket in self._dropped:
                self._dropped.discard(fetch.ticket)
                self._room.release()
                return
            try:
                found, gathered = self._gather(fetch, first)
            except Exception:  # nobody may wait for ever
                log.exception("a fetch ends early")
                found, gathered = 0, None
            last = first + found == len(fetch.keys) or found < most
            self._pieces[fetch.ticket, piece] = gathered
            self._arrived(Arrival(fetch.ticket, piece, found, last))
            if last:
                return

    def _gather(self, fetch: Fetch, first: int) -> tuple[int, GatheredBlocks | None]:
        """How many blocks of the piece that begins with block `first` were found, and these, on
        their way to the devices."""
        found = 0
        for key, block in zip(fetch.keys[first : first + self.io.most], self._buffer):
            if not self.tiers.read(key, block):
                break
            found += 1
        if not found:
            return 0, None
        blocks = [self.io.layout.view(block) for block in self._buffer[:found]]
        return found, self.io.gather(blocks, fetch.places[first : first + found])
