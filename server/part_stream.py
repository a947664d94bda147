"""One process's share in a stream of blocks from another replica: an RPC of `Blocks` in
replica.proto, and the windows that the asker lends to it.

The source writes batches of blocks to the windows, in order, and tells their checksums. Each block
is copied out and checked by who reads it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from jaxserve.api.errors import RequestError
from jaxserve.server import replica_pb2 as pb
from jaxserve.server import replica_pb2_grpc as rpc
from jaxserve.server.block_service import SILENT_SECONDS, STREAM_SECONDS
from jaxserve.server.replica_auth import CallerProof
from jaxserve.store.checksum import block_checksum
from jaxserve.transfer import Transfer, Window


class StreamFault(Exception):
    """The reason why no more blocks come."""


@dataclass
class _Batch:
    """Blocks that go to one window. base: of the window in the staging memory. checksums: of those
    that were written; read: how many of these were read."""

    window: Window
    base: int
    blocks: int
    checksums: list[int]
    read: int = 0


class PartStream:
    """Blocks, or a part of each, from one process. session: with it. transfer: lends its memory.
    keys: of the blocks. size: bytes of what comes of each."""

    def __init__(
        self, session: BlocksSession, transfer: Transfer, keys: Sequence[bytes], size: int
    ):
        self._session = session
        self._transfer = transfer
        self._keys = keys
        self._size = size
        self._per_batch = 0
        self._asked = 0  # blocks of all batches
        self._batches: deque[_Batch] = deque()

    def begin(self, want: pb.Want, bases: Sequence[int], per_batch: int) -> None:
        """Asks for the blocks, `per_batch` to each window, which begin at these places in the
        memory. Errors: TransferError."""
        self._per_batch = per_batch
        self._session.say(pb.BlocksAsked(want=want))
        for base in bases:
            self._ask(base)

    def _ask(self, base: int) -> None:
        """Asks for the next blocks, to be written from `base` on."""
        blocks = min(self._per_batch, len(self._keys) - self._asked)
        if not blocks:
            return
        window = self._transfer.lend(base, blocks * self._size, STREAM_SECONDS)
        self._batches.append(_Batch(window, base, blocks, []))
        self._asked += blocks
        self._session.say(pb.BlocksAsked(batch=pb.Batch(blocks=blocks, **window.to_json())))

    def read(self, key: bytes, into: np.ndarray) -> None:
        """Copies the next block to `into` [size] uint8. Errors: StreamFault if it does not come, or
        differs from what was sent."""
        if not self._batches:
            raise StreamFault("more blocks are read than were asked for")
        batch = self._batches[0]
        while batch.read == len(batch.checksums):
            self._hear()
        begin = batch.base + batch.read * self._size
        np.copyto(into, self._transfer.memory[begin : begin + self._size])
        if block_checksum(key, into) != batch.checksums[batch.read]:
            raise StreamFault("a block's bytes are not those of its checksum")
        batch.read += 1
        if batch.read == batch.blocks:
            self._batches.popleft()
            self._transfer.end(batch.window)
            self._ask(batch.base)

    def _hear(self) -> None:
        """Takes what the source says next."""
        sent = self._session.next().sent
        for checksum in sent.checksums:
            batch = next((one for one in self._batches if len(one.checksums) < one.blocks), None)
            if batch is None:
                raise StreamFault("it tells of blocks that were not asked for")
            batch.checksums.append(checksum)
        if sent.last and not sent.checksums:
            raise StreamFault("it has no more")

    def final(self) -> None:
        """Tells the source that no more blocks are made."""
        self._session.say(pb.BlocksAsked(final=pb.Alive()))

    def close(self) -> None:
        """Ends the windows."""
        for batch in self._batches:
            self._transfer.end(batch.window)
        self._batches.clear()


class BlocksSession:
    """The RPC of one stream, on a channel of its own, which ends with it; a thread of its own reads
    the reports."""

    def __init__(self, channel: grpc.Channel):
        self._channel = channel
        self._said: queue.SimpleQueue[pb.BlocksAsked | None] = queue.SimpleQueue()
        self._heard: queue.SimpleQueue[pb.BlocksTold | str] = queue.SimpleQueue()
        self._heard_at = time.monotonic()
        self._over = False

    def _listen(self, proof: CallerProof, told: Any) -> None:
        try:
            proof.check(told)
            for report in told:
                self._heard_at = time.monotonic()
                self._over = report.sent.last
                self._heard.put(report)
                if report.HasField("sent"):
                    self.say(pb.BlocksAsked(alive=pb.Alive()))
            self._heard.put("it has no more")
        except grpc.RpcError as error:
            self._heard.put(error.details() or error.code().name)
        except RequestError as error:
            self._heard.put(str(error))
        finally:
            self._over = True

    def open(self, secret: bytes) -> pb.Ready:
        """Proves both sides' secrets; returns what the source is ready to send. Errors:
        StreamFault."""
        try:
            proof = CallerProof.begin(self._channel, secret)
            fetch = rpc.BlocksStub(self._channel).Fetch
            told = proof.call(fetch, iter(self._said.get, None), STREAM_SECONDS)
        except RequestError as error:
            raise StreamFault(str(error)) from None
        listener = threading.Thread(
            target=self._listen, args=(proof, told), name="kv-peer", daemon=True
        )
        listener.start()
        return self.next().ready

    def say(self, asked: pb.BlocksAsked) -> None:
        self._said.put(asked)

    def next(self) -> pb.BlocksTold:
        """Returns the next report. Errors: StreamFault if the source is silent, or has ended."""
        try:
            report = self._heard.get(timeout=SILENT_SECONDS)
        except queue.Empty:
            raise StreamFault(f"it has said nothing for {SILENT_SECONDS:g} s") from None
        if isinstance(report, str):
            raise StreamFault(report)
        return report

    @property
    def over(self) -> bool:
        """Returns whether the source has ended, or is silent: nothing more comes of it."""
        return self._over or time.monotonic() - self._heard_at > SILENT_SECONDS

    def end(self) -> None:
        self._heard.put("closed")
        self._said.put(None)
        self._channel.close()  # cancels its calls
