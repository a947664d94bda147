"""Sends blocks of KV to other replicas: the source of `Blocks` in replica.proto.

A stream wants blocks in their order. Those that are in host memory are sent at once, by the plane
that the asker chose, for the windows that it lent; for those that a request here still computes the
source waits. It ends where a block will not come, or where the asker says nothing any more. A
thread of the stream's own sends, and one reads from the asker, so that the RPC can say every second
that the source lives, whatever the sending waits for.

The leader of a replica with several processes names the places of the parts instead, and sends
nothing: it has the wanted blocks made, and tells when no more will be.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import grpc
import numpy as np

from jaxserve.cache.hashes import KEY_BYTES
from jaxserve.server import replica_pb2 as pb
from jaxserve.server import replica_pb2_grpc as rpc
from jaxserve.server.part_messages import part_message, part_of, place_message
from jaxserve.store.block_part import PartBytes
from jaxserve.store.checksum import block_checksum
from jaxserve.store.peers import BlockExporter, OfferedBlocks, PartedExporter
from jaxserve.transfer import Places, Plane, TransferError, Window
from jaxserve.transfer.plane import TCP, Staging

MAX_STREAMS = 1024  # that send or wait; each takes three threads, and no buffer while it waits
MAX_SENDING = 16  # at once
STREAM_SECONDS = 600.0  # a stream in all
ALIVE_SECONDS = 1.0  # between words of a source that has nothing to tell
SILENT_SECONDS = 5.0  # that either side may say nothing; the asker answers each word
WRITE_SECONDS = 10.0
TAKEN_SECONDS = 0.001  # between looks whether the asker has brought what lies open
GROUP_SECONDS = 10.0  # between two groups of layers of a block
GROUP_BYTES = 8 << 20  # that are written at once, a block at least
# sends blocks, of which the first is in its row, to an offset of a window: what to tell the asker
_Send = Callable[[Plane, Window, int, list[bytes], np.ndarray], pb.Sent | None]
log = logging.getLogger(__name__)


class BlockService(rpc.BlocksServicer):
    """Serves the blocks of one replica, or the parts of one of its processes, from `open` on, to at
    most MAX_SENDING streams at once; others wait, those whose requests are due first before others.
    planes: by which bytes are sent, the quickest first, tcp among them; none for blocks whose parts
    are elsewhere."""

    def __init__(self, planes: Sequence[Plane]):
        self._planes = {plane.name: plane for plane in planes}
        self._exporter: BlockExporter | PartedExporter | None = None
        self._lock = threading.Lock()  # of the next
        self.streams = 0
        self.places = Places(MAX_SENDING)

    def open(self, exporter: BlockExporter | PartedExporter | None) -> None:
        """Begins to serve; None: there are no blocks to be had."""
        self._exporter = exporter

    def Fetch(
        self, asked: Iterator[pb.BlocksAsked], context: grpc.ServicerContext
    ) -> Iterator[pb.BlocksTold]:
        """The RPC; gRPC calls it on a thread of the stream's own."""
        exporter = self._exporter
        parts = exporter.places if isinstance(exporter, PartedExporter) else ()
        if exporter is None or (isinstance(exporter, PartedExporter) and not parts):
            context.abort(grpc.StatusCode.UNAVAILABLE, "the replica has no blocks for others")
            return
        if not self._enter():
            said = f"there are {MAX_STREAMS} streams, the limit"
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, said)
            return
        try:
            ready = pb.Ready(
                block_bytes=exporter.layout.bytes,
                planes=[pb.PlaneOffer(name=n, address=p.address) for n, p in self._planes.items()],
                part=part_message(exporter.layout.part),
                places=map(place_message, parts),
            )
            yield pb.BlocksTold(ready=ready)
            source = self._source(exporter, asked)
            try:
                yield from source.told()
            finally:
                source.end(context)
        finally:
            with self._lock:
                self.streams -= 1

    def _source(
        self, exporter: BlockExporter | PartedExporter, asked: Iterator[pb.BlocksAsked]
    ) -> _Source:
        if isinstance(exporter, PartedExporter):
            return _Making(exporter, asked)
        return _Sending(exporter, asked, self._planes, self.places)

    def _enter(self) -> bool:
        """Counts a stream in; False where there are as many as there may be."""
        with self._lock:
            free = self.streams < MAX_STREAMS
            self.streams += free
        return free


class _Source:
    """One stream, with threads of its own. asked: what follows the proof."""

    def __init__(self, blocks: OfferedBlocks, asked: Iterator[pb.BlocksAsked]):
        self._blocks = blocks
        self._asked = asked
        self._told: queue.SimpleQueue[pb.Sent] = queue.SimpleQueue()
        self._heard: queue.SimpleQueue[pb.BlocksAsked | None] = queue.SimpleQueue()
        self._heard_at = time.monotonic()
        self._ending = threading.Event()
        self._final = False  # the asker has said that no more blocks are made
        self._threads = [
            threading.Thread(target=run, name="kv-source", daemon=True)
            for run in (self._run, self._listen)
        ]
        for thread in self._threads:
            thread.start()

    def told(self) -> Iterator[pb.BlocksTold]:
        """Yields reports of sent blocks and, in between, signs of life, until the stream ends."""
        until = time.monotonic() + STREAM_SECONDS
        while time.monotonic() < until:
            try:
                sent = self._told.get(timeout=ALIVE_SECONDS)
            except queue.Empty:
                sent = pb.Sent()
            yield pb.BlocksTold(sent=sent)
            if sent.last or time.monotonic() - self._heard_at > SILENT_SECONDS:
                return

    def end(self, context: grpc.ServicerContext) -> None:
        """Sends no more; returns when the threads have ended, which no wait of them delays by more
        than its own bound."""
        self._ending.set()
        context.cancel()  # one may wait for what the asker says
        for thread in self._threads:
            thread.join()

    def _listen(self) -> None:
        try:
            for message in self._asked:
                self._heard_at = time.monotonic()
                if message.HasField("final"):
                    self._final = True
                elif message.HasField("taken"):
                    self._took(message.taken.place)
                elif not message.HasField("alive"):
                    self._heard.put(message)
        except Exception:  # as gRPC ends it
            log.debug("the asker of blocks has gone")
        finally:
            self._heard.put(None)

    def _took(self, place: str) -> None:
        """The asker has brought what lay open at this place."""

    def _run(self) -> None:
        try:
            first = self._heard.get()
            if first is not None:
                self._serve(first.want)
        except TransferError as error:
            log.warning("blocks could not be sent: %s", error)
        except Exception:  # the asker is not to wait for it
            log.exception("a stream of blocks ends early")
        finally:
            self._told.put(pb.Sent(last=True))

    def _serve(self, want: pb.Want) -> None:
        keys = [
            want.keys[position : position + KEY_BYTES]
            for position in range(0, len(want.keys), KEY_BYTES)
        ]
        self._blocks.want(keys)
        try:
            self._serve_keys(keys, want)
        finally:
            self._blocks.unwant(keys)

    def _serve_keys(self, keys: list[bytes], want: pb.Want) -> None:
        """Does what is to be done for the blocks, until the asker ends or no more come. Errors:
        TransferError."""
        raise NotImplementedError


class _Making(_Source):
    """Has blocks made of which other processes send the parts."""

    def __init__(self, exporter: PartedExporter, asked: Iterator[pb.BlocksAsked]):
        self._exporter = exporter
        super().__init__(exporter, asked)

    def _serve_keys(self, keys: list[bytes], want: pb.Want) -> None:
        while self._exporter.coming(want.request_id):
            if self._ending.wait(ALIVE_SECONDS):
                return
        self._exporter.settle(keys)


class _Sending(_Source):
    """Sends the blocks of one stream, each batch when it has one of `places`."""

    def __init__(
        self,
        exporter: BlockExporter,
        asked: Iterator[pb.BlocksAsked],
        planes: Mapping[str, Plane],
        places: Places,
    ):
        self._exporter = exporter
        self._planes = planes
        self._places = places
        self._request_id = ""
        self._layout = exporter.layout
        # buffers while the stream has a place: free groups of blocks, those that lie open at a
        # place until the asker has brought them, and one block where a part of it is sent
        self._free: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()
        self._exposed: dict[str, np.ndarray] = {}
        self._whole: np.ndarray | None = None
        super().__init__(exporter, asked)

    def _serve_keys(self, keys: list[bytes], want: pb.Want) -> None:
        self._request_id = want.request_id
        self._layout = self._wanted(want)
        name = want.plane or TCP
        if name not in self._planes:
            raise TransferError("plane", f"there is none with the name {name[:100]!r} here")
        plane = self._planes[name]
        due = time.monotonic() + want.time_left
        position = 0
        for message in iter(self._heard.get, None):
            batch = message.batch
            mine = keys[position : position + batch.blocks]
            position += len(mine)
            window = Window(batch.peer, batch.token, batch.size, batch.epoch)
            if not self._send_in_turn(plane, window, mine, due):
                return

    def _wanted(self, want: pb.Want) -> PartBytes:
        """Returns what to send of each block. Errors: TransferError where it is not here."""
        here = self._exporter.layout
        if not want.HasField("part"):
            return here
        part = part_of(want.part)
        if not len(part) or not part.within(here.part):
            raise TransferError("part", f"{part} is not here, but {here.part}")
        return here.of(part)

    def _send_in_turn(self, plane: Plane, window: Window, keys: list[bytes], due: float) -> bool:
        """Sends a batch when it has a place. No stream keeps one while its asker may wait for
        another stream. Errors: TransferError."""
        place = self._places.ask(due)
        try:
            while not place.given.wait(ALIVE_SECONDS):
                if self._ending.is_set():
                    return False
            staging = self._stage(plane)
            if staging is None:
                return False
            if self._layout != self._exporter.layout:
                self._whole = np.empty(self._exporter.layout.bytes, np.uint8)
            try:
                return self._send(plane, window, keys)
            finally:
                self._wait_until_taken()
                staging.close()
        finally:
            self._whole = None
            place.leave()

    def _stage(self, plane: Plane) -> Staging | None:
        """Waits for staging memory; None at the end. Errors: TransferError."""
        rows = max(1, GROUP_BYTES // self._layout.bytes)
        while not self._ending.is_set():
            staging = plane.stage(rows * self._layout.bytes, ALIVE_SECONDS)
            if staging is not None:
                self._free = queue.SimpleQueue()
                for buffer in staging.buffers:
                    self._free.put(buffer.reshape(rows, self._layout.bytes))
                return staging
        return None

    def _took(self, place: str) -> None:
        rows = self._exposed.pop(place, None)
        if rows is not None:
            self._free.put(rows)

    def _wait_until_taken(self) -> None:
        """Waits until the asker has brought all that lies open, or ends."""
        while self._exposed and not self._ending.wait(TAKEN_SECONDS):
            continue
        self._exposed.clear()

    def _group(self) -> np.ndarray | None:
        """Waits for memory of a group that the asker does not read; None at the end."""
        while not self._ending.is_set():
            with contextlib.suppress(queue.Empty):
                return self._free.get(timeout=ALIVE_SECONDS)
        return None

    def _send(self, plane: Plane, window: Window, keys: list[bytes]) -> bool:
        """Sends these blocks to a window, from its beginning; False where one does not come.
        Errors: TransferError."""
        position = 0
        while position < len(keys):
            rows = self._group()
            if rows is None:
                return False
            group = keys[position : position + len(rows)]
            offset = position * self._layout.bytes
            send = self._wait(group[0], rows[0], plane.writes and self._whole is None)
            sent = None if send is None else send(plane, window, offset, group, rows)
            if sent is None:
                return False
            if sent.place:
                self._exposed[sent.place] = rows
            else:
                self._free.put(rows)
            self._told.put(sent)
            position += len(sent.checksums)
        return True

    def _wait(self, key: bytes, row: np.ndarray, in_groups: bool) -> _Send | None:
        """Reads a block, as long as it may come, or with `in_groups` the first layers of one that
        comes. Returns what sends it and those behind it; None where it does not come."""
        in_groups = in_groups and bool(self._exporter.layer_groups)
        while not self._ending.is_set():
            coming = not self._final and self._exporter.coming(self._request_id)
            if in_groups and self._exporter.read_layers(key, 0, row, ALIVE_SECONDS):
                return self._send_layers
            if self._read(key, row, 0.0 if in_groups and coming else ALIVE_SECONDS):
                return self._send_whole
            if not coming:
                return None
        return None

    def _send_whole(
        self, plane: Plane, window: Window, offset: int, keys: list[bytes], rows: np.ndarray
    ) -> pb.Sent:
        """Sends the first block, which is in its row, and those of the next that are there. Errors:
        TransferError."""
        began = time.monotonic()
        count = 1
        while count < len(keys) and self._read(keys[count], rows[count], 0.0):
            count += 1
        checksums = list(map(block_checksum, keys[:count], rows))
        place = plane.expose(rows[:count].reshape(-1), window, offset, WRITE_SECONDS)
        return pb.Sent(checksums=checksums, place=place, seconds=time.monotonic() - began)

    def _send_layers(
        self, plane: Plane, window: Window, offset: int, keys: list[bytes], rows: np.ndarray
    ) -> pb.Sent | None:
        """Sends the first block, whose first layers are in its row, and those of the next whose
        first layers are there: each group of layers while those behind it are computed. None where
        one will not be whole. Errors: TransferError."""
        exporter = self._exporter
        count = 1
        while count < len(keys) and exporter.read_layers(keys[count], 0, rows[count], 0.0):
            count += 1
        blocks = list(zip(keys[:count], rows))
        size = self._layout.bytes
        seconds = 0.0  # of writing alone
        for number, layers in enumerate(exporter.layer_groups):
            for key, row in blocks if number else ():
                came = exporter.read_layers(key, number, row, GROUP_SECONDS)
                if not came and not exporter.read(key, row, 0.0):  # nor whole by now
                    return None
            pieces = [
                (offset + index * size + some.start, row[some])
                for index, (_, row) in enumerate(blocks)
                for some in self._layout.of_layers(layers)
            ]
            began = time.monotonic()
            plane.write(pieces, window, WRITE_SECONDS)
            seconds += time.monotonic() - began
        if not all(exporter.read(key, row, GROUP_SECONDS) for key, row in blocks):
            return None
        return pb.Sent(checksums=list(map(block_checksum, keys, rows[:count])), seconds=seconds)

    def _read(self, key: bytes, row: np.ndarray, seconds: float) -> bool:
        """Reads what is wanted of a block to a row; see `BlockExporter.read`."""
        if self._whole is None:
            return self._exporter.read(key, row, seconds)
        if not self._exporter.read(key, self._whole, seconds):
            return False
        self._exporter.layout.take(self._whole, self._layout.part, row)
        return True
