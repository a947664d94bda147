"""Moves blocks of KV between the devices' pages and the tiers below, beside the steps.

What the devices do happens in the order of commands: pages are read before the step that overwrites
them, and written before the step that attends over them. Everything that takes time is done by two
threads: one waits for pages that were read and stores them, one finds the blocks of a fetch, checks
them and has them brought to the devices, piece by piece, a few of them ahead of the engine. A
fetch from another replica, which may still compute the blocks, has a thread of its own meanwhile.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from jaxserve.api.batch import PageStores
from jaxserve.cache.tiers import Fetch
from jaxserve.engine.fetched_pieces import Arrival, FetchedPieces
from jaxserve.engine.page_io import BlocksRead, GatheredBlocks, PageIo
from jaxserve.engine.resized_stream import ResizedStream
from jaxserve.engine.stage_programs import Stage
from jaxserve.store.peers import BlockStream, PeerBlocks
from jaxserve.store.tiered import TieredBlocks
from jaxserve.transfer.protocol import addresses_of

PIECES_AHEAD = 4  # of fetches, on the devices or on their way and not written to their pages yet
STORES_AHEAD = 64  # launches whose pages were read and not stored yet; more are not stored
ASKED_AT_ONCE = 16  # fetches from other replicas; more wait
CLOSE_SECONDS = 10.0
IssueStage = Callable[[Stage], None]
log = logging.getLogger(__name__)


class BlockMover:
    """Stores and fetches blocks. arrived: called for each piece of a fetch, settled: for blocks
    that were stored or never will be, both on any thread. peers: asks other replicas for blocks."""

    def __init__(
        self,
        io: PageIo,
        tiers: TieredBlocks,
        arrived: Callable[[Arrival], None],
        settled: Callable[[Sequence[bytes]], None],
        peers: PeerBlocks | None = None,
    ):
        self.io = io
        self.tiers = tiers
        self._arrived = arrived
        self._settled = settled
        self._peers = peers
        self._stores: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._fetches: queue.Queue[tuple[Fetch, FetchReader] | None] = queue.Queue()
        self._pieces = FetchedPieces(PIECES_AHEAD)
        self.skipped = 0  # blocks that were not stored because too many waited to be
        self._threads = [
            threading.Thread(target=self._run, args=job, name=name, daemon=True)
            for name, *job in (
                ("kv-store", self._stores, lambda job: job()),
                ("kv-fetch", self._fetches, self._fetch),
            )
        ]
        for thread in self._threads:
            thread.start()
        self._asking = concurrent.futures.ThreadPoolExecutor(ASKED_AT_ONCE, "kv-ask")

    # --- on the engine's thread

    def store(self, stores: PageStores) -> None:
        """Reads pages, before later commands overwrite them, and has their blocks stored."""
        with self._storing(stores, self._store) as issued:
            for stage in self.io.stages:
                issued(stage)

    def storing(self, stores: PageStores) -> contextlib.AbstractContextManager[IssueStage]:
        """Has the blocks of pages stored that a step fills. In the context, a call of what it gives
        reads what a stage filled of them; others can read that as soon as it is stored."""
        in_groups = len(self.io.stages) > 1
        return self._storing(stores, self._store_layers if in_groups else self._store)

    @contextlib.contextmanager
    def _storing(
        self, stores: PageStores, store: Callable[[BlocksRead, PageStores], None]
    ) -> Iterator[IssueStage]:
        """Begins to store blocks. Where too many wait for that they are read nevertheless, for
        other processes may have a part in it."""
        reads = list(self.io.reads(np.stack([stores.lanes, stores.pages], axis=1)))
        at = 0
        for blocks in reads:
            part = stores[at : at + len(blocks)]
            at += len(blocks)
            if self._stores.qsize() >= STORES_AHEAD:
                self.skipped += len(part)
                self.tiers.events.recheck()
                self._settled(part.keys)
            else:
                self.tiers.expect(part.keys)
                self._stores.put(functools.partial(self._settling, store, blocks, part))

        def issued(stage: Stage) -> None:
            for blocks in reads:
                blocks.issue(stage)

        try:
            yield issued
        finally:
            for blocks in reads:
                blocks.end()

    @property
    def idle(self) -> bool:
        """Returns whether no block is on its way: all that was read is stored, all that came is
        loaded."""
        return self.stored and not len(self._pieces)

    @property
    def stored(self) -> bool:
        """Returns whether all that was read is stored."""
        return not self._stores.unfinished_tasks

    def fetch(self, fetch: Fetch) -> None:
        """Has the blocks of a fetch brought to the devices; `arrived` is called for each piece."""
        self._pieces.begin(fetch.ticket)
        if fetch.source is None or self._peers is None:
            self._fetches.put((fetch, FetchReader(self.tiers)))
            return
        # here, so that all processes of a replica open their streams in the same order
        far = [key for key in fetch.keys if not self.tiers.holds(key)]
        stream = self._stream(fetch, far)
        reader = FetchReader(self.tiers, stream, far, fetch.source.address)
        self._asking.submit(self._safely, self._fetch, (fetch, reader))

    def load(self, arrival: Arrival) -> None:
        """Writes the first blocks of a piece to their pages, as many as every process has; where it
        is the last, nothing more of its fetch need come."""
        blocks = self._pieces.take(arrival.ticket, arrival.piece, arrival.last)
        if blocks is not None and arrival.blocks:
            self.io.write(blocks.first(arrival.blocks))

    def close(self) -> None:
        """Ends the threads, once what was read is stored, and closes the tiers."""
        self._pieces.close()
        if self._peers is not None:
            self._peers.close()
        self._asking.shutdown(wait=False, cancel_futures=True)
        self._stores.put(None)
        self._fetches.put(None)
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)
        self.tiers.close()

    # --- on threads of its own

    def _run(self, jobs: queue.Queue, do: Callable) -> None:
        while (job := jobs.get()) is not None:
            self._safely(do, job)
            jobs.task_done()

    def _safely(self, do: Callable, job: object) -> None:
        try:
            do(job)
        except Exception:
            log.exception("blocks of KV could not be moved")

    def _settling(
        self,
        store: Callable[[BlocksRead, PageStores], None],
        blocks: BlocksRead,
        stores: PageStores,
    ) -> None:
        try:
            store(blocks, stores)
        finally:
            self.tiers.settle(stores.keys)
            self._settled(stores.keys)

    def _store(self, blocks: BlocksRead, stores: PageStores) -> None:
        """Stores blocks, once all of them is here."""
        blocks.wait()
        for index, (key, retention) in enumerate(zip(stores.keys, stores.retention.tolist())):
            self.tiers.put(key, functools.partial(blocks.copy, index), retention)

    def _store_layers(self, blocks: BlocksRead, stores: PageStores) -> None:
        """Stores what each stage has of the blocks as soon as it is here; blocks that have no room
        beside the others are not stored."""
        begun = {
            index: filling
            for index, (key, retention) in enumerate(zip(stores.keys, stores.retention.tolist()))
            if (filling := self.tiers.begin(key, retention)) is not None
        }
        try:
            for part in blocks.parts():
                for index, filling in begun.items():
                    blocks.copy_part(part, index, filling.view)
                self.tiers.host.grow(list(begun.values()))
            while begun:
                self.tiers.host.commit(begun.popitem()[1])
        finally:
            for filling in begun.values():
                self.tiers.host.abandon(filling)

    def _fetch(self, job: tuple[Fetch, FetchReader]) -> None:
        """Brings the blocks in pieces until one is missing; the last piece may be empty."""
        fetch, reader = job
        size = self.io.most
        buffer = np.empty((min(size, len(fetch.keys)), self.io.layout.bytes), np.uint8)
        with contextlib.closing(reader):
            for piece, first in enumerate(range(0, len(fetch.keys), size)):
                keys = fetch.keys[first : first + size]
                count = self._read(reader, keys, buffer)
                if not self._pieces.wait(fetch.ticket):
                    return
                count, gathered = self._gather(fetch, first, buffer[:count])
                last = first + count == len(fetch.keys) or count < len(keys)
                if not self._pieces.put(fetch.ticket, piece, gathered):
                    return
                self._arrived(Arrival(fetch.ticket, piece, count, last))
                if last:
                    return

    def _stream(self, fetch: Fetch, far: Sequence[bytes]) -> BlockStream:
        """Opens a stream of the blocks `far` of a fetch from its source, of the parts that are to
        be here."""
        assert fetch.source is not None and self._peers is not None
        here = self.io.layout
        if fetch.there is None:
            return self._peers.open(fetch.source, far, fetch.time_left, here.by_part)
        theirs = self.io.layout_of(fetch.there.size)
        keys = fetch.there.keys
        stream = self._peers.open(fetch.source, keys, fetch.time_left, theirs.by_part)
        return ResizedStream(stream, fetch.keys, fetch.there, here, theirs)

    def _read(self, reader: FetchReader, keys: list[bytes], buffer: np.ndarray) -> int:
        """Reads the next blocks of a fetch to the buffer until one is missing; how many came."""
        try:
            missing = (n for n, key in enumerate(keys) if not reader.read(key, buffer[n]))
            return next(missing, len(keys))
        except Exception:  # a sequence waits for the rest of the fetch
            log.exception("a fetch ends early")
            return 0

    def _gather(
        self, fetch: Fetch, first: int, blocks: np.ndarray
    ) -> tuple[int, GatheredBlocks | None]:
        """Brings blocks, from number `first` of the fetch on, to the devices: how many, and these
        on their way."""
        if not len(blocks):
            return 0, None
        views = [self.io.layout.view(block) for block in blocks]
        try:
            places = fetch.places[first : first + len(views)]
            return len(views), self.io.gather(views, places)
        except Exception:
            log.exception("a fetch ends early")
            return 0, None


class FetchReader:
    """Reads the blocks of a fetch, in their order: from the tiers here, and those `far` from a
    stream from `source`, if there is one."""

    def __init__(
        self,
        tiers: TieredBlocks,
        stream: BlockStream | None = None,
        far: Collection[bytes] = (),
        source: str = "",
    ):
        self._tiers = tiers
        self._stream = stream
        self._far = frozenset(far)
        self._source = addresses_of(source)[0]

    def read(self, key: bytes, into: np.ndarray) -> bool:
        """Copies the next block to `into` [bytes] uint8; False where it does not come."""
        if self._stream is None or key not in self._far:
            return self._tiers.read(key, into)
        began = time.monotonic()
        came = self._stream.read(key, into)
        seconds = time.monotonic() - began
        self._tiers.count_from_peer(key, self._source, self._stream.route, came, seconds)
        return came

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
