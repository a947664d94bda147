"""One process's share in a stream of blocks from another replica: an RPC of `Blocks` in
replica.proto, and the windows that the asker lends to it.

The source writes batches of blocks to the windows, in order, or lays them open for the asker, who
brings them; it tells their checksums. Each block is copied out and checked by who reads it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import grpc
import numpy as np

from jaxserve.api.errors import RequestError
from jaxserve.server import replica_pb2 as pb
from jaxserve.server import replica_pb2_grpc as rpc
from jaxserve.server.block_service import SILENT_SECONDS, STREAM_SECONDS
from jaxserve.server.replica_auth import CallerProof
from jaxserve.store.checksum import block_checksum
from jaxserve.transfer import Plane, TransferError, Window
from jaxserve.transfer.plane import TCP, Arrival

BRING_SECONDS = 15.0  # for the bytes of a group, where the asker brings them
LOOK_SECONDS = 0.05  # between looks whether they have come, or the stream is closed


class StreamFault(Exception):
    """The reason why no more blocks come."""


class PathFault(StreamFault):
    """A failure of one way to a source, which may be there by another one. address: that cannot be
    reached; plane: that has failed; one of them is ''."""

    def __init__(self, said: str, *, address: str = "", plane: str = ""):
        super().__init__(said)
        self.address = address
        self.plane = plane


class _Group(NamedTuple):
    """Blocks that a source sent at once. first: of its batch's blocks. arrival: of their bytes, if
    the asker brings them. seconds: that the source took."""

    first: int
    blocks: int
    arrival: Arrival | None
    seconds: float


@dataclass
class _Batch:
    """Blocks that go to one window. base: of the window in the staging memory. checksums: of those
    that were sent; read: how many of these were read. groups: in which they were sent, those that
    were not read."""

    window: Window
    base: int
    blocks: int
    checksums: list[int] = field(default_factory=list)
    groups: deque[_Group] = field(default_factory=deque)
    read: int = 0


class PartStream:
    """Blocks, or a part of each, from one process. session: with it. plane: by which they come.
    keys: of the blocks. size: bytes of what comes of each. learn: takes bytes, and the seconds in
    which they came."""

    def __init__(
        self,
        session: BlocksSession,
        plane: Plane,
        keys: Sequence[bytes],
        size: int,
        learn: Callable[[int, float], None],
    ):
        self._session = session
        self.plane = plane
        self._keys = keys
        self._size = size
        self._learn = learn
        self._per_batch = 0
        self._asked = 0  # blocks of all batches
        self._lock = threading.Lock()  # of the batches, which the session's thread fills
        self._batches: deque[_Batch] = deque()
        self._closed = False

    def begin(self, want: pb.Want, bases: Sequence[int], per_batch: int) -> None:
        """Asks for the blocks, `per_batch` to each window, which begin at these places in the
        memory. Errors: TransferError."""
        self._per_batch = per_batch
        self._session.take = self._take
        self._session.say(pb.BlocksAsked(want=want))
        for base in bases:
            self._ask(base)

    def _ask(self, base: int) -> None:
        """Asks for the next blocks, which are to come from `base` on."""
        blocks = min(self._per_batch, len(self._keys) - self._asked)
        if not blocks:
            return
        window = self.plane.lend(base, blocks * self._size, STREAM_SECONDS)
        with self._lock:
            self._batches.append(_Batch(window, base, blocks))
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
        if batch.groups and batch.groups[0].first == batch.read:
            self._wait_for(batch.groups[0])
            batch.groups.popleft()
        begin = batch.base + batch.read * self._size
        np.copyto(into, self.plane.memory[begin : begin + self._size])
        if block_checksum(key, into) != batch.checksums[batch.read]:
            raise self._plane_fault("a block's bytes are not those of its checksum")
        batch.read += 1
        if batch.read == batch.blocks:
            with self._lock:
                self._batches.popleft()
            self.plane.end(batch.window)
            self._ask(batch.base)

    def _hear(self) -> None:
        """Waits for what the source says next, which `_take` has taken by then."""
        sent = self._session.next().sent
        if sent.last and not sent.checksums:
            raise StreamFault("it has no more")

    def _take(self, sent: pb.Sent) -> None:
        """Begins to bring the blocks that the source has sent, if they are not here; on the
        session's thread, so that the source's memory is freed whatever the reader waits for.
        Errors: StreamFault, TransferError."""
        blocks = len(sent.checksums)
        with self._lock:
            batch = next((one for one in self._batches if len(one.checksums) < one.blocks), None)
            if self._closed or not blocks:
                return
            if batch is None or len(batch.checksums) + blocks > batch.blocks:
                raise StreamFault("it tells of blocks that were not asked for")
            first = len(batch.checksums)
            arrival = None
            if sent.place:
                begin = batch.base + first * self._size
                into = self.plane.memory[begin : begin + blocks * self._size]
                taken = pb.BlocksAsked(taken=pb.Taken(place=sent.place))
                arrival = self.plane.bring(into, sent.place, lambda: self._session.say(taken))
            batch.groups.append(_Group(first, blocks, arrival, sent.seconds))
            batch.checksums.extend(sent.checksums)

    def _wait_for(self, group: _Group) -> None:
        """Waits until the bytes of a group are here. Errors: StreamFault."""
        seconds = group.seconds
        if group.arrival is not None:
            self._wait_over(group.arrival)
            seconds = max(seconds, group.arrival.seconds)
        self._learn(group.blocks * self._size, seconds)

    def _wait_over(self, arrival: Arrival) -> None:
        deadline = time.monotonic() + BRING_SECONDS
        while not arrival.over.wait(LOOK_SECONDS):
            if self._session.ended:
                raise StreamFault("closed")
            if time.monotonic() > deadline:
                raise self._plane_fault(f"a group did not come in {BRING_SECONDS:g} s")
        if arrival.error:
            raise self._plane_fault(arrival.error)

    def _plane_fault(self, said: str) -> StreamFault:
        """A fault after which tcp is tried, if this was another plane."""
        name = self.plane.name
        return StreamFault(said) if name == TCP else PathFault(said, plane=name)

    def final(self) -> None:
        """Tells the source that no more blocks are made."""
        self._session.say(pb.BlocksAsked(final=pb.Alive()))

    def close(self) -> None:
        """Ends the windows, and waits until nothing is brought to them, BRING_SECONDS at most."""
        with self._lock:
            self._closed = True
            batches = list(self._batches)
            self._batches.clear()
        until = time.monotonic() + BRING_SECONDS
        for batch in batches:
            for group in batch.groups:
                if group.arrival is not None:
                    group.arrival.over.wait(max(0.0, until - time.monotonic()))
            self.plane.end(batch.window)


class BlocksSession:
    """The RPC of one stream with the process at `address`, on a channel of its own, which ends with
    it; a thread of its own reads the reports. take: called there with what was sent, before `next`
    gives it."""

    def __init__(self, channel: grpc.Channel, address: str):
        self.address = address
        self.ended = False  # by this side
        self.take: Callable[[pb.Sent], None] = lambda sent: None
        self._channel = channel
        self._handshakes = rpc.HandshakeStub(channel)  # see `CallerProof.begin`
        self._blocks = rpc.BlocksStub(channel)
        self._said: queue.SimpleQueue[pb.BlocksAsked | None] = queue.SimpleQueue()
        self._heard: queue.SimpleQueue[pb.BlocksTold | StreamFault] = queue.SimpleQueue()
        self._heard_at = time.monotonic()
        self._over = False

    def _listen(self, proof: CallerProof, told: Any) -> None:
        try:
            proof.check(told)
            for report in told:
                self._heard_at = time.monotonic()
                self._over = report.sent.last
                self.take(report.sent)
                self._heard.put(report)
                if report.HasField("sent"):
                    self.say(pb.BlocksAsked(alive=pb.Alive()))
            self._heard.put(StreamFault("it has no more"))
        except grpc.RpcError as error:
            self._heard.put(self._fault(error.details() or "", error.code().name))
        except RequestError as error:
            self._heard.put(self._fault(str(error), error.status))
        except StreamFault as fault:
            self._heard.put(fault)
        except TransferError as error:
            self._heard.put(StreamFault(str(error)))
        finally:
            self._over = True

    def open(self, secret: bytes) -> pb.Ready:
        """Proves both sides' secrets; returns what the source is ready to send. Errors:
        StreamFault."""
        try:
            proof = CallerProof.begin(self._handshakes, secret)
            told = proof.call(self._blocks.Fetch, iter(self._said.get, None), STREAM_SECONDS)
        except RequestError as error:
            raise self._fault(str(error), error.status) from None
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
            said = f"it has said nothing for {SILENT_SECONDS:g} s"
            raise PathFault(said, address=self.address) from None
        if isinstance(report, StreamFault):
            raise report
        return report

    def _fault(self, said: str, status: str) -> StreamFault:
        """A fault as gRPC tells it: of the address, where nothing can be reached there."""
        said = said or status
        if status in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
            return PathFault(said, address=self.address)
        return StreamFault(said)

    @property
    def over(self) -> bool:
        """Returns whether the source has ended, or is silent: nothing more comes of it."""
        return self._over or time.monotonic() - self._heard_at > SILENT_SECONDS

    def end(self) -> None:
        self.ended = True
        self._heard.put(StreamFault("closed"))
        self._said.put(None)
        self._channel.close()  # cancels its calls
