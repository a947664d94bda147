"""The sending side over TCP: writes are cut into slices, which several connections carry.

Each peer has a queue of slices and up to `paths` connections, each with a thread of its own that
takes a burst of slices, sends it, and reads the answers. Connections are made on demand; of all
peers together there are at most `max_connections`, and the idle one that SIEVE chooses is closed
for one that is needed. Where a connection fails, its slices go to another, a few times. Every wait
ends with the deadline of a ticket. A peer with several addresses has at least one connection to
each, side by side; one that failed is not tried for a while, and its slices go by the others. While
there are others, a burst must be over in STALL_SECONDS: an address may fail in silence.

One lock guards the state of all peers; it is free while a thread sends, receives or waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence

import numpy as np

from jaxserve.group.handshake import StrangerError
from jaxserve.transfer.failures import RecentFailures
from jaxserve.transfer.frames import REFUSALS, SLICE_BYTES, Answer, Request, decode_token
from jaxserve.transfer.link import SendingLink
from jaxserve.transfer.peers import Peer, PeerLink
from jaxserve.transfer.protocol import (
    MAX_TICKETS,
    Ticket,
    TransferError,
    Window,
    check_pieces,
    check_seconds,
)
from jaxserve.transfer.sieve import Sieve
from jaxserve.transfer.writes import Slice, Write

IDLE_SECONDS = 120.0  # after which a connection without work is closed
JOIN_SECONDS = 10.0  # for a thread to end: it may be connecting
MIN_WAIT_SECONDS = 0.01
STALL_SECONDS = 2.0  # for a burst to an address, where the peer has others
AVOID_SECONDS = 10.0  # that an address which failed is not tried, where the peer has others
log = logging.getLogger(__name__)


class Sender:
    """Writes into the windows of any number of peers. See `protocol.Transfer` for the methods.

    tls: whether receivers have certificates. paths: connections to one peer.
    """

    def __init__(self, secret: bytes, tls: bool, paths: int, max_connections: int):
        self.sent_bytes = 0
        self.retries = 0
        self._secret = secret
        self._tls = tls
        self._paths = paths
        self._max_connections = max_connections
        self._lock = threading.Lock()  # of all below
        self._writes: dict[int, Write] = {}
        self._last = 0
        self._peers: dict[str, Peer] = {}
        self._links: Sieve[PeerLink] = Sieve()
        self._failed_addresses: RecentFailures[str] = RecentFailures(AVOID_SECONDS)
        self._threads: set[threading.Thread] = set()
        self._closing = False

    @property
    def connections(self) -> int:
        return len(self._links)

    @property
    def tickets(self) -> int:
        return len(self._writes)

    def write_many(
        self, window: Window, pieces: Sequence[tuple[int, np.ndarray]], seconds: float
    ) -> Ticket:
        checked = check_pieces(window, pieces)
        check_seconds(seconds)
        token = decode_token(window.token)
        write = Write(time.monotonic() + seconds, seconds)
        slices = list(_slices(write, token, window.epoch, checked))
        write.left = len(slices)
        with self._lock:
            if self._closing:
                raise TransferError("transfer", "it was closed")
            if len(self._writes) >= MAX_TICKETS:
                raise TransferError("tickets", f"{MAX_TICKETS} are not released: the limit")
            self._last += 1
            self._writes[self._last] = write
            peer = self._peer(window.peer)
            peer.put(slices)
            self._work(peer)
            return Ticket(self._last, sum(len(data) for _, data in checked))

    def status(self, ticket: Ticket) -> str | None:
        write = self._find(ticket)
        if not write.over.is_set() and time.monotonic() >= write.deadline:
            with self._lock:
                write.expire()
        return write.error if write.over.is_set() else None

    def wait(self, ticket: Ticket, seconds: float) -> str | None:
        write = self._find(ticket)
        until = time.monotonic() + seconds
        while (status := self.status(ticket)) is None:
            now = time.monotonic()
            if now >= until:
                break
            write.over.wait(min(until - now, max(write.deadline - now, MIN_WAIT_SECONDS)))
        return status

    def release(self, ticket: Ticket) -> None:
        if self.status(ticket) is None:
            raise TransferError("ticket", "is under way")
        with self._lock:
            self._writes.pop(ticket.number, None)

    def close(self) -> None:
        with self._lock:
            self._closing = True
            links = self._links.keys()
            threads = list(self._threads)
            for peer in self._peers.values():
                peer.wake.notify_all()
        for link in links:
            link.link.close()
        for thread in threads:
            thread.join(JOIN_SECONDS)
        with self._lock:
            for write in self._writes.values():
                write.fail("the transfer was closed")

    def _find(self, ticket: Ticket) -> Write:
        write = self._writes.get(ticket.number)
        if write is None:
            raise TransferError("ticket", f"number {ticket.number} was released or never given")
        return write

    def _peer(self, address: str) -> Peer:
        if address not in self._peers:
            self._peers[address] = Peer(address, self._lock)
        return self._peers[address]

    # --- under the lock: which connections there are

    def _work(self, peer: Peer) -> None:
        """Wakes or makes connections for what is in a peer's queue."""
        peer.wake.notify(peer.bursts())
        for _ in range(peer.wanted(self._paths)):
            if not self._connect(peer):
                break

    def _connect(self, peer: Peer) -> bool:
        """Adds a connection, another one's room if need be. False where all are busy: the first
        that has no more to do makes room (`_next_burst`)."""
        if len(self._links) >= self._max_connections:
            evicted = self._links.evict(lambda link: link.idle)
            if evicted is None:
                return False
            self._retire(evicted)
        address = peer.next_address(self._failed_addresses)
        made = PeerLink(peer, address, SendingLink(address, self._secret, self._tls))
        self._links.add(made)
        peer.links.add(made)
        thread = threading.Thread(target=self._run, args=(made,), name="transfer-send", daemon=True)
        self._threads.add(thread)
        thread.start()
        return True

    def _retire(self, link: PeerLink) -> None:
        """Takes an idle connection out of use; its thread ends."""
        link.evicted = True
        link.idle = False
        link.link.close()
        link.peer.links.discard(link)
        link.peer.wake.notify_all()

    def _serve_hungry(self) -> None:
        """Gives peers with work and without a connection one, at the cost of an idle one."""
        for peer in self._peers.values():
            if peer.busy and not peer.links and not self._connect(peer):
                return

    # --- a connection's thread

    def _run(self, link: PeerLink) -> None:
        try:
            while burst := self._next_burst(link):
                if not self._carry(link, burst):
                    break
        finally:
            link.link.close()
            with self._lock:
                self._forget(link)

    def _forget(self, link: PeerLink) -> None:
        """At a connection's end, under the lock: what its peer still has to do goes to others."""
        peer = link.peer
        self._links.remove(link)
        peer.links.discard(link)
        self._threads.discard(threading.current_thread())
        if self._closing:
            return
        if peer.busy:
            self._work(peer)
        elif not peer.links:
            self._peers.pop(peer.address, None)
        self._serve_hungry()

    def _next_burst(self, link: PeerLink) -> list[Slice]:
        """Waits for work; none where the connection is to end."""
        peer = link.peer
        with self._lock:
            while not self._closing and not link.evicted:
                link.fresh = False
                if burst := peer.burst(time.monotonic()):
                    self._links.use(link)
                    return burst
                link.idle = True
                self._serve_hungry()
                if link.evicted:
                    break
                woken = peer.wake.wait(IDLE_SECONDS)
                link.idle = False
                if not woken and not peer.busy:
                    break
            return []

    def _carry(self, link: PeerLink, burst: list[Slice]) -> bool:
        """Sends a burst and settles what became of each slice. False where the connection failed:
        it is closed by then, and nothing reads the slices' memory."""
        answers: list[Answer] = []
        until = deadline = min(part.write.deadline for part in burst)
        if link.peer.has_others(link.address, self._failed_addresses):
            until = min(until, time.monotonic() + STALL_SECONDS)
        final = False
        try:
            link.link.carry([(part.request, part.data) for part in burst], answers, until)
            reason = ""
        except StrangerError as error:
            reason, final = str(error), True
        except OSError as error:
            reason = str(error)
        if reason:
            link.link.close()
            self._failed_addresses.note(link.address)
        with self._lock:
            for part, answer in zip(burst, answers):
                self.sent_bytes += len(part.data)
                part.write.answered(REFUSALS.get(answer, ""))
            self._failed(link.peer, burst[len(answers) :], reason, deadline, final)
        return not reason

    def _failed(
        self, peer: Peer, parts: Iterable[Slice], reason: str, until: float, final: bool
    ) -> None:
        """Puts slices back to be sent once more, unless their time or tries are over. until: the
        deadline of the burst that they were part of. final: it is of no use to try again."""
        now = time.monotonic()
        again = []
        for part in parts:
            if now < until:
                part.tries += 1
            exhausted = final or part.tries > max(self._paths, len(peer.addresses))
            if part.write.given_back(now, reason if exhausted else ""):
                again.append(part)
        peer.put_back(again)
        self.retries += len(again)
        if again:
            log.info("transfer: %d slices again to %s: %s", len(again), peer.address, reason)


def _slices(
    write: Write, token: bytes, epoch: int, pieces: Sequence[tuple[int, memoryview]]
) -> Iterable[Slice]:
    for offset, data in pieces:
        for start in range(0, len(data), SLICE_BYTES):
            part = data[start : start + SLICE_BYTES]
            yield Slice(write, Request(token, epoch, offset + start, len(part)), part)
