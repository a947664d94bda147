"""Sends blocks of KV to other replicas: the source of `Blocks` in replica.proto.

A stream wants blocks in their order. Those that are in host memory are sent at once, by a
`Transfer`, into the windows that the asker lent; for those that a request here still computes the
source waits. It ends where a block will not come, or where the asker says nothing any more. A
thread of the stream's own sends, and one reads from the asker, so that the RPC can say every second
that the source lives, whatever the sending waits for.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator

import grpc
import numpy as np

from jaxserve.cache.hashes import KEY_BYTES
from jaxserve.server import replica_pb2 as pb
from jaxserve.server import replica_pb2_grpc as rpc
from jaxserve.store.checksum import block_checksum
from jaxserve.store.peers import BlockExporter
from jaxserve.transfer import Places, Transfer, TransferError, Window

MAX_STREAMS = 1024  # that send or wait; each takes three threads, and no buffer while it waits
MAX_SENDING = 16  # at once
STREAM_SECONDS = 600.0  # a stream in all
ALIVE_SECONDS = 1.0  # between words of a source that has nothing to tell
SILENT_SECONDS = 5.0  # that either side may say nothing; the asker answers each word
WRITE_SECONDS = 10.0
GROUP_BYTES = 8 << 20  # that are written at once, a block at least
log = logging.getLogger(__name__)


class BlockService(rpc.BlocksServicer):
    """Serves the blocks of one replica from `open` on, to at most MAX_SENDING streams at once;
    others wait, those whose requests are due first before others. transfer: by which bytes are
    sent."""

    def __init__(self, transfer: Transfer):
        self._transfer = transfer
        self._exporter: BlockExporter | None = None
        self._lock = threading.Lock()  # of the next
        self.streams = 0
        self.places = Places(MAX_SENDING)

    def open(self, exporter: BlockExporter | None) -> None:
        """Begins to serve; None: there are no blocks to be had."""
        self._exporter = exporter

    def Fetch(
        self, asked: Iterator[pb.BlocksAsked], context: grpc.ServicerContext
    ) -> Iterator[pb.BlocksTold]:
        """The RPC; gRPC calls it on a thread of the stream's own."""
        exporter = self._exporter
        if exporter is None:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the replica has no blocks for others")
            return
        if not self._enter():
            said = f"there are {MAX_STREAMS} streams, the limit"
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, said)
            return
        try:
            yield pb.BlocksTold(ready=pb.Ready(block_bytes=exporter.block_bytes))
            sending = _Sending(exporter, self._transfer, self.places, asked)
            try:
                yield from sending.told()
            finally:
                sending.end(context)
        finally:
            with self._lock:
                self.streams -= 1

    def _enter(self) -> bool:
        """Counts a stream in; False where there are as many as there may be."""
        with self._lock:
            free = self.streams < MAX_STREAMS
            self.streams += free
        return free


class _Sending:
    """Sends the blocks of one stream, on a thread of its own. asked: what follows the proof."""

    def __init__(
        self,
        exporter: BlockExporter,
        transfer: Transfer,
        places: Places,
        asked: Iterator[pb.BlocksAsked],
    ):
        self._exporter = exporter
        self._transfer = transfer
        self._places = places
        self._asked = asked
        self._request_id = ""
        self._rows = np.empty((0, exporter.block_bytes), np.uint8)
        self._told: queue.SimpleQueue[pb.Sent] = queue.SimpleQueue()
        self._heard: queue.SimpleQueue[pb.BlocksAsked | None] = queue.SimpleQueue()
        self._heard_at = time.monotonic()
        self._ending = threading.Event()
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
                if not message.HasField("alive"):
                    self._heard.put(message)
        except Exception:  # as gRPC ends it
            log.debug("the asker of blocks has gone")
        finally:
            self._heard.put(None)

    def _run(self) -> None:
        try:
            self._send_all()
        except TransferError as error:
            log.warning("blocks could not be sent: %s", error)
        except Exception:  # the asker is not to wait for it
            log.exception("a stream of blocks ends early")
        finally:
            self._told.put(pb.Sent(last=True))

    def _send_all(self) -> None:
        """Waits for a place, then sends batch after batch, until the asker ends or a block does not
        come. Errors: TransferError."""
        first = self._heard.get()
        if first is None:
            return
        want = first.want
        place = self._places.ask(time.monotonic() + want.time_left)
        keys = [
            want.keys[position : position + KEY_BYTES]
            for position in range(0, len(want.keys), KEY_BYTES)
        ]
        self._request_id = want.request_id
        self._exporter.want(keys)
        try:
            while not place.given.wait(ALIVE_SECONDS):
                if self._ending.is_set():
                    return
            self._send_batches(keys)
        finally:
            place.leave()
            self._exporter.unwant(keys)

    def _send_batches(self, keys: list[bytes]) -> None:
        rows = max(1, GROUP_BYTES // self._exporter.block_bytes)
        self._rows = np.empty((rows, self._exporter.block_bytes), np.uint8)
        position = 0
        for message in iter(self._heard.get, None):
            batch = message.batch
            mine = keys[position : position + batch.blocks]
            position += len(mine)
            window = Window(batch.peer, batch.token, batch.size, batch.epoch)
            if not self._send(window, mine):
                return

    def _send(self, window: Window, keys: list[bytes]) -> bool:
        """Sends these blocks to a window, from its beginning; False where one does not come.
        Errors: TransferError."""
        position = 0
        while position < len(keys):
            if not self._wait(keys[position]):
                return False
            group = keys[position : position + len(self._rows)]
            count = 1
            while count < len(group) and self._exporter.read(group[count], self._rows[count], 0.0):
                count += 1
            self._write(window, position * self._exporter.block_bytes, self._rows[:count])
            self._told.put(pb.Sent(checksums=map(block_checksum, group[:count], self._rows)))
            position += count
        return True

    def _wait(self, key: bytes) -> bool:
        """Reads a block to the first row, as long as it may come; False where it does not."""
        while not self._ending.is_set():
            coming = self._exporter.coming(self._request_id)
            if self._exporter.read(key, self._rows[0], ALIVE_SECONDS):
                return True
            if not coming:
                return False
        return False

    def _write(self, window: Window, offset: int, rows: np.ndarray) -> None:
        ticket = self._transfer.write(window, offset, rows.reshape(-1), WRITE_SECONDS)
        fault = self._transfer.wait(ticket, WRITE_SECONDS + 1)
        if fault is None:
            raise TransferError("write", "is not over in time")
        self._transfer.release(ticket)
        if fault:
            raise TransferError("write", fault)
