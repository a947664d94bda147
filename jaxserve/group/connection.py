"""A TCP or TLS connection whose reads and writes end within bounds, and that any thread may close.

The socket does not block: an operation is tried under the connection's lock, and waited for without
it. So no thread holds the lock for longer than one copy between the kernel and this process, and
who takes it knows that no operation is under way.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import TypeVar

TURN_SECONDS = 1.0  # between looks whether a connection that waits was closed
Given = TypeVar("Given")
Done = TypeVar("Done")


class ChannelError(OSError):
    """The other side is gone, does not know the secret, or said what it may not."""


class Connection:
    """One connection. Reads and writes may be called by different threads; `close` by any.

    vanish_seconds: after which the kernel ends the connection where the other host does not answer.
    Errors of all operations: ChannelError.
    """

    def __init__(self, connection: socket.socket, vanish_seconds: float):
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _notice_a_vanished_host(connection, vanish_seconds)
            connection.setblocking(False)
        except OSError as error:
            connection.close()
            raise ChannelError(str(error)) from None
        self.socket = connection
        self.closed = False
        self._lock = threading.Lock()  # of the socket, never held while waiting

    def read(self, operation: Callable[[Given], Done], given: Given, seconds: float = 0) -> Done:
        """Tries an operation that reads until it need not wait. seconds: bound of the wait, 0 for
        none. Errors: ChannelError."""
        return self._do(operation, given, select.POLLIN, seconds)

    def write(self, operation: Callable[[Given], Done], given: Given, seconds: float) -> Done:
        """Waits like `read`, for an operation that writes."""
        return self._do(operation, given, select.POLLOUT, seconds)

    def _do(
        self, operation: Callable[[Given], Done], given: Given, event: int, seconds: float
    ) -> Done:
        """event: what it waits for; TLS may wait for the other one."""
        began = time.monotonic()
        while True:
            awaited = event
            with self._lock:
                if self.closed:
                    raise ChannelError("the connection was closed")
                try:
                    return operation(given)
                except BlockingIOError:
                    pass
                except ssl.SSLWantReadError:
                    awaited = select.POLLIN
                except ssl.SSLWantWriteError:
                    awaited = select.POLLOUT
                file = self.socket.fileno()
            seconds_left = began + seconds - time.monotonic() if seconds else TURN_SECONDS
            if seconds_left <= 0:
                what = "took" if event == select.POLLOUT else "sent"
                raise ChannelError(f"the other side {what} no bytes for {seconds:g} s")
            poll = select.poll()
            poll.register(file, awaited)
            poll.poll(1000 * min(TURN_SECONDS, seconds_left))

    def settle(self) -> None:
        """Returns once an operation that is under way is over: at most one copy between the kernel
        and this process."""
        with self._lock:
            pass

    @property
    def own_host(self) -> str:
        """This side's address. Errors: ChannelError."""
        try:
            return self.socket.getsockname()[0]
        except OSError as error:
            raise ChannelError(str(error)) from None

    def close(self) -> None:
        """Ends the connection; an operation that waits fails."""
        with self._lock:
            self.closed = True
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(OSError):
                self.socket.close()


def _notice_a_vanished_host(connection: socket.socket, seconds: float) -> None:
    """Has the kernel ask the other side's whether it is there, and end the connection where no
    answer comes: a host that lost its power or its network closes nothing."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    limit = max(2, round(seconds))
    for name, value in (
        ("TCP_KEEPIDLE", limit // 2),  # seconds
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", limit - limit // 2),
        ("TCP_USER_TIMEOUT", 1000 * limit),  # of what was sent
    ):
        if hasattr(socket, name):  # Linux has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
