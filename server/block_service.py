"""Sends blocks of KV to other replicas: the source of `Blocks` in replica.proto.

A stream wants blocks in their order. Those that are in host memory are sent at once, by a
`Transfer`, into the windows that the asker lent; for those that a request here still computes the
source waits, and says every second that it lives. It ends where a block will not come.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import grpc
import numpy as np

from jaxserve.cache.hashes import KEY_BYTES
from jaxserve.server import replica_pb2 as pb
from jaxserve.server import replica_pb2_grpc as rpc
from jaxserve.server.replica_auth import CALLER, REPLICA, new_nonce, proof, proves
from jaxserve.store.checksum import block_checksum
from jaxserve.store.peers import BlockExporter
from jaxserve.transfer import Transfer, TransferError, Window

MAX_STREAMS = 16  # at once; each takes a thread
HANDSHAKE_SECONDS = 5.0
ALIVE_SECONDS = 1.0  # between words of a source that waits
WRITE_SECONDS = 10.0
GROUP_BYTES = 8 << 20  # that are written at once, a block at least
log = logging.getLogger(__name__)


class BlockService(rpc.BlocksServicer):
    """Serves the blocks of one replica from `open` on. transfer: by which bytes are sent."""

    def __init__(self, secret: bytes, transfer: Transfer):
        self._secret = secret
        self._transfer = transfer
        self._exporter: BlockExporter | None = None
        self._room = threading.BoundedSemaphore(MAX_STREAMS)
        self.streams = 0

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
        if not self._room.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_STREAMS} streams run already")
            return
        self.streams += 1
        try:
            yield from self._handshake(exporter, asked, context)
            yield from self._serve(exporter, asked)
        finally:
            self.streams -= 1
            self._room.release()

    def _handshake(
        self,
        exporter: BlockExporter,
        asked: Iterator[pb.BlocksAsked],
        context: grpc.ServicerContext,
    ) -> Iterator[pb.BlocksTold]:
        late = threading.Timer(HANDSHAKE_SECONDS, context.cancel)
        late.daemon = True
        late.start()
        try:
            hello = next(asked, pb.BlocksAsked()).hello
            nonce = new_nonce()
            yield pb.BlocksTold(challenge=pb.Challenge(nonce=nonce))
            given = next(asked, pb.BlocksAsked()).proof.proof
        finally:
            late.cancel()
        if not proves(given, self._secret, CALLER, nonce, hello.nonce):
            log.warning("refused blocks to %s, which does not know the secret", context.peer())
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the replica has another secret")
        own = proof(self._secret, REPLICA, nonce, hello.nonce)
        yield pb.BlocksTold(ready=pb.Ready(proof=own, block_bytes=exporter.block_bytes))

    def _serve(
        self, exporter: BlockExporter, asked: Iterator[pb.BlocksAsked]
    ) -> Iterator[pb.BlocksTold]:
        want = next(asked, pb.BlocksAsked()).want
        keys = [want.keys[at : at + KEY_BYTES] for at in range(0, len(want.keys), KEY_BYTES)]
        sending = _Sending(exporter, self._transfer, want.request_id)
        exporter.want(keys)
        try:
            at = 0
            for message in asked:
                batch = message.batch
                mine = keys[at : at + batch.blocks]
                at += len(mine)
                window = Window(batch.peer, batch.token, batch.size, batch.epoch)
                for sent in sending.batch(window, mine):
                    yield pb.BlocksTold(sent=sent)
                    if sent.last:
                        return
        except TransferError as error:
            log.warning("blocks could not be sent: %s", error)
            yield pb.BlocksTold(sent=pb.Sent(last=True))
        finally:
            exporter.unwant(keys)


class _Sending:
    """Sends the blocks of one stream, some at a time."""

    def __init__(self, exporter: BlockExporter, transfer: Transfer, request_id: str):
        self._exporter = exporter
        self._transfer = transfer
        self._request_id = request_id
        rows = max(1, GROUP_BYTES // exporter.block_bytes)
        self._rows = np.empty((rows, exporter.block_bytes), np.uint8)

    def batch(self, window: Window, keys: list[bytes]) -> Iterator[pb.Sent]:
        """Sends these blocks to a window, from its beginning. Errors: TransferError."""
        at = 0
        while at < len(keys):
            while not self._exporter.read(keys[at], self._rows[0], ALIVE_SECONDS):
                if not self._exporter.coming(self._request_id) and not self._exporter.read(
                    keys[at], self._rows[0], ALIVE_SECONDS
                ):
                    yield pb.Sent(last=True)
                    return
                yield pb.Sent()
            group = keys[at : at + len(self._rows)]
            count = 1
            while count < len(group) and self._exporter.read(group[count], self._rows[count], 0.0):
                count += 1
            self._write(window, at * self._exporter.block_bytes, self._rows[:count])
            yield pb.Sent(checksums=map(block_checksum, group[:count], self._rows))
            at += count

    def _write(self, window: Window, offset: int, rows: np.ndarray) -> None:
        ticket = self._transfer.write(window, offset, rows.reshape(-1), WRITE_SECONDS)
        fault = self._transfer.wait(ticket, WRITE_SECONDS + 1)
        if fault is None:
            raise TransferError("write", "is not over in time")
        self._transfer.release(ticket)
        if fault:
            raise TransferError("write", fault)
