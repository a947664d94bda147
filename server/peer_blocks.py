"""Asks other replicas for blocks of KV: the asker of `Blocks` in replica.proto.

A stream has one or two buffers of this process's staging memory, granted in the order of opening.
It lends them to the source as windows, one batch of blocks at a time, or to several processes of
the source, each with a part of the buffers for its part of the blocks.

Where an address or a plane of the source fails, the stream goes on by another one, each tried once.
A fault of any other kind ends the stream: what has not come by then is computed here.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxserve.api.request import KvSource
from jaxserve.group.handshake import Certificate
from jaxserve.server import replica_pb2 as pb
from jaxserve.server.auth.tls import Authorities
from jaxserve.server.block_service import STREAM_SECONDS
from jaxserve.server.own_address import OwnAddress
from jaxserve.server.part_messages import part_message, part_of, place_of
from jaxserve.server.part_stream import BlocksSession, PartStream, PathFault, StreamFault
from jaxserve.server.replica_session import open_channel
from jaxserve.store.block_part import BlockPart, PartBytes, PartPlace, cover
from jaxserve.store.peers import Route
from jaxserve.transfer import Plane, ReceiveBuffers, TcpPlane, TcpTransfer, TransferError
from jaxserve.transfer.failures import RecentFailures
from jaxserve.transfer.plane import choose_plane
from jaxserve.transfer.protocol import addresses_of
from jaxserve.transfer.rates import Rates

STAGING_BYTES = 256 << 20  # of memory that is touched only where blocks arrive
WINDOW_BYTES = 16 << 20
WINDOWS = 2  # of a stream: one is filled while the other is read
ASK_SECONDS = 0.05  # between looks whether there is staging memory
AVOID_SECONDS = 60.0  # that an address or a plane which failed is tried after others
LOOK_SECONDS = 0.2  # between looks at the processes of a source
log = logging.getLogger(__name__)


class StagingBuffers:
    """Buffers of `memory`, as large as blocks need, granted in the order of first asking: processes
    of one replica give theirs to the same streams first, so that none waits for another's."""

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
                self._buffers = ReceiveBuffers(fit, STREAM_SECONDS, STREAM_SECONDS)
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
    """`PeerBlocks` over gRPC and planes. host, port: on which this process receives, port 0 for any
    that is free; own_address: how others reach it, if not by the host; tls: its certificate;
    authorities: of theirs. faster: makes a plane that is taken before tcp where both sides have it,
    of the memory in which blocks come and of the host by which others reach this process.

    planes: the quickest first. rates: at which blocks came, by a source's first address and plane.
    failed: addresses of sources, and their planes as (first address, plane), which failed lately.
    Errors: OSError where it cannot listen; those of `faster`.
    """

    def __init__(
        self,
        secret: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        own_address: OwnAddress | None = None,
        tls: Certificate | None = None,
        authorities: Authorities | None = None,
        faster: Callable[[np.ndarray, str], Plane] | None = None,
    ):
        self.secret = secret
        self.authorities = authorities
        self.own_address = own_address or OwnAddress(host)
        self.memory = np.empty(STAGING_BYTES, np.uint8)
        planes = [] if faster is None else [faster(self.memory, self.own_address.host)]
        hosts = self.own_address.hosts
        self.transfer = TcpTransfer(self.memory, secret, host, port, peer_hosts=hosts, tls=tls)
        self.planes: tuple[Plane, ...] = (*planes, TcpPlane(self.transfer))
        self.rates = Rates()
        self.failed: RecentFailures[str | tuple[str, str]] = RecentFailures(AVOID_SECONDS)
        self.buffers = StagingBuffers(self.memory)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._open: dict[str, PeerStream] = {}
        self._closed = False

    def __len__(self) -> int:
        """Streams that are open."""
        return len(self._open)

    def open(
        self, source: KvSource, keys: Sequence[bytes], time_left: float, layout: PartBytes
    ) -> PeerStream:
        wanted = Wanted(source, list(keys), time.monotonic() + time_left, layout)
        stream = PeerStream(self, f"{next(self._numbers)}", wanted, self._forget)
        with self._lock:
            self._open[stream.name] = stream
            closed = self._closed
        if closed:
            stream.end()
        with contextlib.suppress(StreamFault):  # it comes again when the stream is read
            stream.ask_memory()
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
        for plane in self.planes:
            plane.close()


@dataclass(frozen=True)
class LeaderSide:
    """In the place of `PeerReplicas` at the leader of several processes, which has no blocks itself
    and asks for none. The fields are those of `PeerReplicas`."""

    secret: bytes
    own_address: OwnAddress
    planes: tuple[Plane, ...] = ()


class Wanted(NamedTuple):
    """Blocks with these keys, that a source has or computes, for a request whose first token is due
    at this monotonic second. layout: what is wanted of each."""

    source: KvSource
    keys: list[bytes]
    due: float
    layout: PartBytes

    def message(self, part: BlockPart | None = None, plane: str = "") -> pb.Want:
        """Makes the first message for the source, or for its process with this part."""
        return pb.Want(
            keys=b"".join(self.keys),
            request_id=self.source.request_id,
            time_left=self.due - time.monotonic(),
            part=None if part is None else part_message(part),
            plane=plane,
        )


class PeerStream:
    """`BlockStream` of one request. Its source is asked first; where that is several processes, all
    that have some of what is wanted send it, and blocks are joined here. closed: called when it has
    given back all that it had."""

    def __init__(
        self,
        peers: PeerReplicas,
        name: str,
        wanted: Wanted,
        closed: Callable[[PeerStream], None],
    ):
        self.name = name
        self._peers = peers
        self._wanted = wanted
        self._closed = closed
        self._addresses = addresses_of(wanted.source.address)
        self._leader = self._addresses[0]  # the one in use
        self._read_blocks = 0  # of what is wanted
        self._tried: set[str] = set()  # addresses and planes that failed in this stream
        self._reading = threading.Lock()
        self._ending = threading.Event()
        self._sessions: list[BlocksSession] = []
        self._parts: list[tuple[PartStream, PartBytes, np.ndarray]] = []  # with a row for each
        per_window = max(1, WINDOW_BYTES // wanted.layout.bytes)
        self._windows = min(WINDOWS, -(-len(wanted.keys) // per_window))
        self._per_window = per_window

    def ask_memory(self) -> list[int] | None:
        """Asks for staging memory; returns where its windows begin, None: ask again. Errors:
        StreamFault where there never is enough."""
        buffers, size = self._peers.buffers, self._wanted.layout.bytes
        return buffers.ask(self.name, self._windows, size)

    def read(self, key: bytes, into: np.ndarray) -> bool:
        with self._reading:
            while not self._ending.is_set():
                try:
                    if not self._parts:
                        self._begin()
                    self._read(key, into)
                    self._read_blocks += 1
                    return True
                except (StreamFault, TransferError) as fault:
                    if not self._go_around(fault):
                        self._give_up(fault)
            return False

    def _give_up(self, fault: Exception) -> None:
        if not self._ending.is_set():
            log.warning("no more KV comes from %s: %s", self._wanted.source.address, fault)
        self.end()

    # --- which way blocks come

    @property
    def route(self) -> Route:
        plane = self._parts[0][0].plane if self._parts else self._peers.planes[-1]
        rate = self._peers.rates.of(self._addresses[0], plane.name)
        return Route(plane.name, rate * max(len(self._parts), 1))  # parts come side by side

    def _address(self) -> str:
        """Returns the source's address to be tried: one that has not failed, here or lately."""
        failed = self._peers.failed
        return min(self._addresses, key=lambda one: (one in self._tried, one in failed))

    def _plane(self, ready: pb.Ready) -> Plane:
        """Returns the plane for what a source offers, none that has failed, here or lately."""
        planes = {plane.name: plane for plane in self._peers.planes}
        failed = self._peers.failed
        first = self._addresses[0]
        good = [n for n in planes if n not in self._tried and (first, n) not in failed]
        return planes[choose_plane(good, [offer.name for offer in ready.planes])]

    def _go_around(self, fault: Exception) -> bool:
        """Prepares to go on by another way after a fault; returns whether there is one."""
        if not isinstance(fault, PathFault) or self._ending.is_set():
            return False
        failed = self._peers.failed
        if fault.plane:
            failed.note((self._addresses[0], fault.plane))
            self._tried.add(fault.plane)
        else:
            failed.note(fault.address)
            self._tried.add(fault.address)
            if fault.address not in self._addresses or self._tried.issuperset(self._addresses):
                return False
        log.warning("KV comes from %s by another way: %s", self._wanted.source.address, fault)
        self._drop_sessions()
        return True

    def _drop_sessions(self) -> None:
        """Ends the sessions and their windows; returns once nothing is written for them."""
        for session in list(self._sessions):
            session.end()
        for stream, *_ in self._parts:
            stream.close()
        self._sessions.clear()
        self._parts.clear()

    # --- what comes

    def _begin(self) -> None:
        """Waits for staging memory first: with a stream at its source it could block others."""
        deadline = time.monotonic() + STREAM_SECONDS
        while (bases := self.ask_memory()) is None:
            if self._ending.wait(ASK_SECONDS) or time.monotonic() > deadline:
                raise StreamFault("there is no staging memory")
        keys = self._wanted.keys[self._read_blocks :]
        self._read_blocks = 0
        self._wanted = wanted = self._wanted._replace(keys=keys)
        self._leader = self._address()
        session, ready = self._connect(self._leader, wanted.layout)
        if not ready.places:
            self._add(session, self._plane(ready), wanted.layout.part, bases)
            return
        session.say(pb.BlocksAsked(want=wanted.message()))
        for place in self._places(ready):
            there, ready = self._connect(place.address, wanted.layout.of(place.part))
            bases = self._add(there, self._plane(ready), place.part, bases)
        threading.Thread(target=self._watch, name="kv-parts", daemon=True).start()

    def _watch(self) -> None:
        """Has the processes of the source wait for no more blocks once its leader says that none
        are made any more, or one of them is gone, whose parts would not come."""
        while not self._ending.wait(LOOK_SECONDS):
            if any(session.over for session in list(self._sessions)):
                for stream, *_ in list(self._parts):
                    stream.final()
                return

    def _places(self, ready: pb.Ready) -> list[PartPlace]:
        """Divides what is wanted among the processes of the source; of several that have the same
        each stream asks another first. Errors: StreamFault."""
        places = list(map(place_of, ready.places))
        first = int(self.name) % len(places)
        try:
            return cover(self._wanted.layout.part, [*places[first:], *places[:first]])
        except ValueError as error:
            raise StreamFault(str(error)) from None

    def _connect(self, address: str, wanted: PartBytes) -> tuple[BlocksSession, pb.Ready]:
        """Begins a session with a process that has, or whose group has, what is wanted. Errors:
        StreamFault."""
        peers = self._peers
        channel = open_channel(address, peers.authorities, self._leader)
        session = BlocksSession(channel, address)
        self._sessions.append(session)
        if self._ending.is_set():
            raise StreamFault("closed")
        ready = session.open(peers.secret)
        there = wanted.of(part_of(ready.part))
        if there.bytes != ready.block_bytes:
            raise StreamFault(f"its blocks have {ready.block_bytes} bytes, not {there.bytes}")
        if not wanted.part.within(there.part):
            raise StreamFault(f"it has {there.part} of blocks, not {wanted.part}")
        return session, ready

    def _add(
        self, session: BlocksSession, plane: Plane, part: BlockPart, bases: Sequence[int]
    ) -> list[int]:
        """Has a process send its part to the windows, from these places on. Returns where the next
        part begins in each."""
        layout = self._wanted.layout.of(part)
        learn = functools.partial(self._peers.rates.learn, self._addresses[0], plane.name)
        stream = PartStream(session, plane, self._wanted.keys, layout.bytes, learn)
        self._parts.append((stream, layout, np.empty(layout.bytes, np.uint8)))
        stream.begin(self._wanted.message(part, plane.name), bases, self._per_window)
        return [base + self._per_window * layout.bytes for base in bases]

    def _read(self, key: bytes, into: np.ndarray) -> None:
        """Reads the next block. Errors: StreamFault, TransferError."""
        whole = self._wanted.layout
        for stream, layout, row in self._parts:
            if layout == whole:
                stream.read(key, into)
            else:
                stream.read(key, row)
                whole.put(into, layout.part, row)

    def end(self) -> None:
        """Ends the wait of who reads, and lets nothing more come."""
        self._ending.set()
        for session in list(self._sessions):
            session.end()

    def close(self) -> None:
        self.end()
        with self._reading:
            self._drop_sessions()
            self._peers.buffers.release(self.name)
        self._closed(self)
