"""Connections whose other side has not yet proved that it knows the secret."""

from __future__ import annotations

import collections
import contextlib
import socket
import threading


class Strangers:
    """At most `most` connections in the handshake. For another one the oldest of the address that
    has the most is ended: silent ones keep no sender out that knows the secret.

    Handshakes are ended by handles of their own of the connections, for TLS takes these away.
    """

    def __init__(self, most: int):
        self._most = most
        self._lock = threading.Lock()
        self._addresses: dict[socket.socket, str] = {}  # by handle, the oldest first
        self._closed = False

    def add(self, connection: socket.socket, address: str) -> socket.socket:
        """Adds a connection before its handshake, and returns the handle by which `remove` takes it
        out. Errors: OSError."""
        handle = connection.dup()
        with self._lock:
            self._addresses[handle] = address
            if self._closed:
                _end(handle)
            elif len(self._addresses) > self._most:
                oldest = self._oldest()
                del self._addresses[oldest]
                _end(oldest)
        return handle

    def remove(self, handle: socket.socket) -> None:
        """Takes out a connection after its handshake, however that ended."""
        with self._lock:
            self._addresses.pop(handle, None)
            handle.close()

    def end_all(self) -> None:
        """Ends the handshakes, and those of connections that are added later."""
        with self._lock:
            self._closed = True
            for handle in self._addresses:
                _end(handle)

    def _oldest(self) -> socket.socket:
        """Returns the oldest connection of the address with the most."""
        counts = collections.Counter(self._addresses.values())
        most = max(counts.values())
        return next(one for one, address in self._addresses.items() if counts[address] == most)


def _end(handle: socket.socket) -> None:
    with contextlib.suppress(OSError):
        handle.shutdown(socket.SHUT_RDWR)
