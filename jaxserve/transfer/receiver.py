"""The receiving side over TCP: a port, one thread for each connection, and leases that fence.

A thread copies what comes straight into the staging memory, a part at a time, and looks before each
part whether the lease is still open, under the connection's lock. To end a lease is therefore: mark
it, then take every connection's lock once. No byte is written there afterwards, though the sender
may be stopped in the middle of a slice; the rest of that slice goes to nowhere.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time

import numpy as np

from jaxserve.group import handshake
from jaxserve.group.connection import ChannelError, Connection
from jaxserve.group.handshake import Certificate, Session
from jaxserve.transfer.frames import (
    PURPOSE,
    REQUEST_BYTES,
    Answer,
    Request,
    encode_answer,
)
from jaxserve.transfer.sieve import Sieve
from jaxserve.transfer.strangers import Strangers
from jaxserve.transfer.windows import Lease, Windows

STALL_SECONDS = 10.0  # that a sender may take between two parts of a slice
MAX_HANDSHAKES = 64  # at once, a thread each
BACKLOG = 256
RETRY_SECONDS = 0.1  # to wait where this process has no file left for a connection
DRAIN_BYTES = 1 << 16  # that are thrown away at a time
JOIN_SECONDS = 5.0  # for a thread to end
log = logging.getLogger(__name__)


class Receiver:
    """Listens, and writes what senders send into the windows of `windows`.

    max_connections: beyond these the least used idle one is closed; its sender makes another.
    """

    def __init__(
        self,
        memory: np.ndarray,
        windows: Windows,
        host: str,
        port: int,
        secret: bytes,
        tls: Certificate | None,
        max_connections: int,
    ):
        self.received_bytes = 0
        self.refused = 0
        self._memory = memory.data
        self._windows = windows
        self._secret = secret
        self._tls = tls
        self._max_connections = max_connections
        self._strangers = Strangers(MAX_HANDSHAKES)
        self._lock = threading.Lock()  # of all below
        self._links: Sieve[_Link] = Sieve()
        self._threads: set[threading.Thread] = set()
        self._closing = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, port), family=family, backlog=BACKLOG)
        self.port: int = self._server.getsockname()[1]
        self._start(self._listen, "transfer-listen")

    @property
    def connections(self) -> int:
        return len(self._links)

    def settle(self) -> None:
        """Returns once no copy that began before this call is under way."""
        with self._lock:
            links = self._links.keys()
        for link in links:
            link.connection.settle()

    def close(self) -> None:
        with self._lock:
            self._closing = True
            links = self._links.keys()
            threads = list(self._threads)
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._strangers.end_all()
        for link in links:
            link.connection.close()
        for thread in threads:
            thread.join(JOIN_SECONDS)

    def _start(self, run, name: str, *arguments) -> None:
        """Runs something on a thread of its own, which `close` waits for."""

        def body() -> None:
            try:
                run(*arguments)
            finally:
                with self._lock:
                    self._threads.discard(thread)

        thread = threading.Thread(target=body, name=name, daemon=True)
        with self._lock:  # `close` can wait only for threads that were started
            self._threads.add(thread)
            thread.start()

    def _listen(self) -> None:
        while not self._closing:
            try:
                connection, address = self._server.accept()
            except OSError as error:
                if not self._closing:
                    log.warning("transfer: no connection can be taken: %s", error)
                    time.sleep(RETRY_SECONDS)
                continue
            if self._tls is not None:
                self._tls = self._tls.renewed()
            try:
                handle = self._strangers.add(connection, address[0])
            except OSError as error:
                connection.close()
                log.warning("transfer: no connection can be taken: %s", error)
                continue
            self._start(self._receive, "transfer-receive", connection, handle, address)

    def _receive(self, connection: socket.socket, handle: socket.socket, address: tuple) -> None:
        """A connection's life. handle: by which its handshake can be ended."""
        try:
            link = _Link(handshake.accept(connection, self._secret, PURPOSE, self._tls))
        except OSError as error:
            with self._lock:
                self.refused += 1
            log.info("transfer: refused %s: %s", address[0], error)
            return
        finally:
            self._strangers.remove(handle)
        try:
            if self._admit(link):
                while True:
                    self._take_slice(link)
        except OSError as error:
            log.debug("transfer: the connection of %s ended: %s", address[0], error)
        finally:
            link.connection.close()
            with self._lock:
                self._links.remove(link)

    def _admit(self, link: _Link) -> bool:
        """Counts a connection in. False where all there may be are busy, or at the end."""
        with self._lock:
            if self._closing:
                return False
            if len(self._links) >= self._max_connections:
                evicted = self._links.evict(lambda other: other.idle)
                if evicted is None:
                    return False
                evicted.connection.close()
            self._links.add(link)
            return True

    def _take_slice(self, link: _Link) -> None:
        """Waits for one request and serves it. Errors: OSError, which end the connection."""
        request = link.request()
        with self._lock:
            self._links.use(link)
        answer = self._windows.find(request, time.monotonic())
        taken = 0
        if isinstance(answer, Lease):
            start = answer.base + request.offset
            view = self._memory[start : start + request.size]
            taken = link.fill(view, answer)
            with self._lock:
                self.received_bytes += taken
            answer = Answer.WRITTEN if taken == request.size else Answer.LEASE_OVER
        link.discard(request.size - taken)
        link.answer(answer)


class _Link:
    """A connection to one sender, and how many requests came by it."""

    def __init__(self, session: Session):
        self.connection = Connection(session.connection, STALL_SECONDS)
        self.idle = True  # between two slices
        self._session = session
        self._number = 0
        self._head = memoryview(bytearray(REQUEST_BYTES))
        self._nowhere = memoryview(bytearray(DRAIN_BYTES))

    def request(self) -> Request:
        """Waits for the next request, for ever. Errors: OSError."""
        taken = 0
        while taken < REQUEST_BYTES:
            receive = self.connection.socket.recv_into
            part = self.connection.read(receive, self._head[taken:])
            taken += _some(part)
            self.idle = False
        return Request.decode(self._head, self._session.receiving, self._number)

    def fill(self, view: memoryview, lease: Lease) -> int:
        """Receives into `view` until it is full or the lease is over; returns how many bytes.
        Errors: OSError."""
        taken = 0

        def receive(part: memoryview) -> int | None:
            # under the connection's lock: see `Receiver.settle`
            if not lease.open(time.monotonic()):
                return None
            return self.connection.socket.recv_into(part)

        while taken < len(view):
            part = self.connection.read(receive, view[taken:], STALL_SECONDS)
            if part is None:
                break
            taken += _some(part)
        return taken

    def discard(self, size: int) -> None:
        """Receives bytes and drops them. Errors: OSError, also where they do not come in
        STALL_SECONDS."""
        receive = self.connection.socket.recv_into
        until = time.monotonic() + STALL_SECONDS
        while size:
            seconds = max(until - time.monotonic(), 1e-3)
            size -= _some(self.connection.read(receive, self._nowhere[:size], seconds))

    def answer(self, answer: Answer) -> None:
        """Ends the request. Errors: OSError."""
        unsent = memoryview(encode_answer(answer, self._session.sending, self._number))
        self._number += 1
        self.idle = True
        while unsent:
            sent = self.connection.write(self.connection.socket.send, unsent, STALL_SECONDS)
            unsent = unsent[sent:]


def _some(part: int) -> int:
    """Checks that bytes came. Errors: ChannelError where the other side has ended the
    connection."""
    if not part:
        raise ChannelError("the connection was closed")
    return part
