"""Asks other replicas for blocks of KV: the asker of `Blocks` in replica.proto.

A stream has one or two buffers of this process's staging memory, granted in the order of first
asking. It lends them to the source as windows, one batch of blocks at a time; the source writes
there and tells the blocks' checksums. Each block is copied out and checked by who reads it. A fault
of any kind ends the stream: what has not come by then is computed here.
"""

from __future__ import annotations

import itertools
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc
import numpy as np

from jaxserve.api.errors import RequestError
from jaxserve.api.request import KvSource
from jaxserve.group.handshake import Certificate
from jaxserve.server import replica_pb2 as pb
from jaxserve.server import replica_pb2_grpc as rpc
from jaxserve.server.auth.tls import Authorities
from jaxserve.server.block_service import SILENT_SECONDS, STREAM_SECONDS
from jaxserve.server.own_address import OwnAddress
from jaxserve.server.replica_auth import CallerProof
from jaxserve.server.replica_session import open_channel
from jaxserve.store.checksum import block_checksum
from jaxserve.transfer import ReceiveBuffers, TcpTransfer, TransferError, Window

STAGING_BYTES = 256 << 20  # of memory that is touched only where blocks arrive
WINDOW_BYTES = 16 << 20
WINDOWS = 2  # of a stream: one is filled while the other is read
ASK_SECONDS = 0.05  # between looks whether there is staging memory
log = logging.getLogger(__name__)


class StreamFault(Exception):
    """The reason why no more blocks come."""


class StagingBuffers:
    """Buffers of `memory`, as large as blocks need, granted in the order of first asking."""

    def __init__(self, memory: np.ndarray):
        self._size = memory.size
        self._lock = threading.Lock()
        self._buffers: ReceiveBuffers | None = None
        self._bytes = 0  # of a buffer

    def ask(self, name: str, count: int, block_bytes: int) -> list[int] | None:
        """Returns where the buffers of stream `name` begin in the memory, each of `WINDOW_BYTES` or
        a block; None: ask again. Errors: StreamFault if there can never be that many."""
        with self._lock:
            if self._buffers is None:
                self._bytes = max(WINDOW_BYTES, block_bytes)
                fit = self._size // self._bytes
                if not fit:
                    raise StreamFault(f"a block of {block_bytes} bytes; {self._size} fit")
                self._buffers = ReceiveBuffers(fit, STREAM_SECONDS, 10 * ASK_SECONDS)
            if block_bytes > self._bytes:
                raise StreamFault(f"a block of {block_bytes} bytes; a buffer has {self._bytes}")
            try:
                granted = self._buffers.ask(
                    name, min(count, self._buffers.count), 1, STREAM_SECONDS, time.monotonic()
                )
            except TransferError as error:
                raise StreamFault(str(error)) from None
            return None if granted is None else [n * self._bytes for n in granted.buffers]

    def release(self, name: str) -> None:
        with self._lock:
            if self._buffers is not None:
                self._buffers.release(name, time.monotonic())

    @property
    def used(self) -> int:
        """Buffers that streams have."""
        with self._lock:
            return 0 if self._buffers is None else self._buffers.count - self._buffers.free


class PeerReplicas:
    """`PeerBlocks` over gRPC and TCP. host, port: on which this process receives, port 0 for any
    that is free; own_address: how others reach it, if not by the host; tls: its certificate;
    authorities: of theirs. Errors: OSError where it cannot listen."""

    def __init__(
        self,
        secret: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        own_address: OwnAddress | None = None,
        tls: Certificate | None = None,
        authorities: Authorities | None = None,
    ):
        self.secret = secret
        self.authorities = authorities
        self.own_address = own_address or OwnAddress(host)
        self.memory = np.empty(STAGING_BYTES, np.uint8)
        peer_host = self.own_address.host
        self.transfer = TcpTransfer(self.memory, secret, host, port, peer_host=peer_host, tls=tls)
        self.buffers = StagingBuffers(self.memory)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._open: dict[str, PeerStream] = {}
        self._closed = False

    def __len__(self) -> int:
        """Streams that are open."""
        return len(self._open)

    def open(
        self, source: KvSource, keys: Sequence[bytes], time_left: float = math.inf
    ) -> PeerStream:
        wanted = Wanted(source, list(keys), time.monotonic() + time_left)
        stream = PeerStream(self, f"{next(self._numbers)}", wanted, self._forget)
        with self._lock:
            self._open[stream.name] = stream
            closed = self._closed
        if closed:
            stream.end()
        return stream

    def _forget(self, stream: PeerStream) -> None:
        with self._lock:
            self._open.pop(stream.name, None)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            streams = list(self._open.values())
        for stream in streams:
            stream.end()
        self.transfer.close()


@dataclass
class _Batch:
    """Blocks that go to one window. base: of the window in the staging memory. checksums: of those
    that were written; read: how many of these were read."""

    window: Window
    base: int
    blocks: int
    checksums: list[int]
    read: int = 0


class Wanted(NamedTuple):
    """Blocks with these keys, that a source has or computes, for a request whose first token is due
    at this monotonic second."""

    source: KvSource
    keys: list[bytes]
    due: float


class PeerStream:
    """`BlockStream` of one request. closed: called when it has given back all that it had."""

    def __init__(
        self,
        peers: PeerReplicas,
        name: str,
        wanted: Wanted,
        closed: Callable[[PeerStream], None],
    ):
        self.name = name
        self._peers = peers
        self._source = wanted.source
        self._keys = wanted.keys
        self._due = wanted.due
        self._closed = closed
        self._reading = threading.Lock()
        self._ending = threading.Event()
        self._session: _Session | None = None
        self._block_bytes = 0
        self._asked = 0  # blocks of all batches
        self._batches: deque[_Batch] = deque()

    def read(self, key: bytes, into: np.ndarray) -> bool:
        with self._reading:
            if self._ending.is_set():
                return False
            try:
                if self._session is None:
                    self._begin(into.size)
                self._read(key, into)
                return True
            except (StreamFault, TransferError) as fault:
                if not self._ending.is_set():
                    log.warning("no more KV comes from %s: %s", self._source.address, fault)
                self.end()
                return False

    def _begin(self, block_bytes: int) -> None:
        """Waits for staging memory first: with a stream at its source it could block others."""
        peers = self._peers
        self._block_bytes = block_bytes
        self._per_batch = max(1, WINDOW_BYTES // block_bytes)
        windows = min(WINDOWS, -(-len(self._keys) // self._per_batch))
        deadline = time.monotonic() + STREAM_SECONDS
        while (bases := peers.buffers.ask(self.name, windows, block_bytes)) is None:
            if self._ending.wait(ASK_SECONDS) or time.monotonic() > deadline:
                raise StreamFault("there is no staging memory")
        self._session = _Session(self._source.address, peers.authorities)
        if self._ending.is_set():
            raise StreamFault("closed")
        want = pb.Want(
            keys=b"".join(self._keys),
            request_id=self._source.request_id,
            time_left=self._due - time.monotonic(),
        )
        agreement = self._session.open(peers.secret, want)
        if agreement != block_bytes:
            raise StreamFault(f"its blocks have {agreement} bytes, not {block_bytes}")
        for base in bases:
            self._ask(base)

    def _ask(self, base: int) -> None:
        """Asks for the next blocks, to be written from `base` on."""
        blocks = min(self._per_batch, len(self._keys) - self._asked)
        if not blocks:
            return
        assert self._session is not None
        window = self._peers.transfer.lend(base, blocks * self._block_bytes, STREAM_SECONDS)
        self._batches.append(_Batch(window, base, blocks, []))
        self._asked += blocks
        self._session.say(pb.BlocksAsked(batch=pb.Batch(blocks=blocks, **window.to_json())))

    def _read(self, key: bytes, into: np.ndarray) -> None:
        """Reads the next block. Errors: StreamFault if it does not come, or differs from what was
        sent."""
        if not self._batches:
            raise StreamFault("more blocks are read than were asked for")
        batch = self._batches[0]
        while batch.read == len(batch.checksums):
            self._hear()
        begin = batch.base + batch.read * self._block_bytes
        np.copyto(into, self._peers.memory[begin : begin + self._block_bytes])
        if block_checksum(key, into) != batch.checksums[batch.read]:
            raise StreamFault("a block's bytes are not those of its checksum")
        batch.read += 1
        if batch.read == batch.blocks:
            self._batches.popleft()
            self._peers.transfer.end(batch.window)
            self._ask(batch.base)

    def _hear(self) -> None:
        """Takes what the source says next."""
        assert self._session is not None
        sent = self._session.next().sent
        for checksum in sent.checksums:
            batch = next((one for one in self._batches if len(one.checksums) < one.blocks), None)
            if batch is None:
                raise StreamFault("it tells of blocks that were not asked for")
            batch.checksums.append(checksum)
        if sent.last and not sent.checksums:
            raise StreamFault("it has no more")

    def end(self) -> None:
        """Ends the wait of who reads, and lets nothing more come."""
        self._ending.set()
        if self._session is not None:
            self._session.end()

    def close(self) -> None:
        self.end()
        with self._reading:
            for batch in self._batches:
                self._peers.transfer.end(batch.window)
            self._batches.clear()
            self._peers.buffers.release(self.name)
        self._closed(self)


class _Session:
    """The RPC of one stream; a thread of its own reads the reports."""

    def __init__(self, address: str, authorities: Authorities | None):
        self._channel = open_channel(address, authorities)
        self._said: queue.SimpleQueue[pb.BlocksAsked | None] = queue.SimpleQueue()
        self._heard: queue.SimpleQueue[pb.BlocksTold | str] = queue.SimpleQueue()

    def _listen(self, proof: CallerProof, told: Any) -> None:
        try:
            proof.check(told)
            for report in told:
                self._heard.put(report)
                if report.HasField("sent"):
                    self.say(pb.BlocksAsked(alive=pb.Alive()))
            self._heard.put("it has no more")
        except grpc.RpcError as error:
            self._heard.put(error.details() or error.code().name)
        except RequestError as error:
            self._heard.put(str(error))

    def open(self, secret: bytes, want: pb.Want) -> int:
        """Proves both sides' secrets and tells what is wanted; returns a block's bytes there.
        Errors: StreamFault."""
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
        ready = self.next().ready
        self.say(pb.BlocksAsked(want=want))
        return ready.block_bytes

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

    def end(self) -> None:
        self._heard.put("closed")
        self._said.put(None)
        self._channel.close()  # cancels its calls
