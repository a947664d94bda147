"""Who stands between a sender and a receiver and does them harm."""

import contextlib
import dataclasses
import socket
import threading
import time

from jaxserve.transfer.protocol import Window, split_address

PART = 1 << 14


class Proxy:
    """Passes bytes on between connections and a target. `harm(data, position, number)` is asked for
    each part on its way to the receiver: what goes on instead, or None to cut the connection.
    position: of the part's first byte in its connection; number: of the connection, from 0."""

    def __init__(self, window, harm, host="127.0.0.1"):
        self._target = split_address(window.peer)
        self._server = socket.create_server((host, 0))
        self.address = f"{host}:{self._server.getsockname()[1]}"
        self.window = dataclasses.replace(window, peer=self.address)
        self.connections = 0
        self._harm = harm
        self.ends = []
        self._threads = []
        self._run(self._listen)

    @classmethod
    def to(cls, address, harm, host="127.0.0.1"):
        """A proxy before an address of any kind."""
        return cls(Window(address, "", 1, 1), harm, host)

    def _run(self, body, *arguments):
        thread = threading.Thread(target=body, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _listen(self):
        with contextlib.suppress(OSError):
            while True:
                sender, _ = self._server.accept()
                receiver = socket.create_connection(self._target)
                self.ends += [sender, receiver]
                number = self.connections
                self.connections += 1
                self._run(self._pass, sender, receiver, lambda d, p, n=number: self._harm(d, p, n))
                self._run(self._pass, receiver, sender, lambda data, position: data)

    def _pass(self, source, target, change):
        position = 0
        with contextlib.suppress(OSError):
            while data := source.recv(PART):
                changed = change(data, position)
                if changed is None:
                    break
                target.sendall(changed)
                position += len(data)
        self._cut(source, target)

    def cut(self):
        """Cuts all connections that there are."""
        self._cut(*self.ends)

    @staticmethod
    def _cut(*ends):
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._cut(self._server)
        self._server.close()
        self.cut()
        for thread in self._threads:
            thread.join(10)
        for end in self.ends:
            end.close()


def nothing(data, position, number):
    return data


def cut_after(count, connections):
    """Cuts each of the first so many connections after so many bytes."""

    def harm(data, position, number):
        return None if number < connections and position + len(data) > count else data

    return harm


def flip(at, bit, connections):
    """Flips a bit of the byte at a position of each of the first so many connections."""

    def harm(data, position, number):
        if number < connections and position <= at < position + len(data):
            changed = bytearray(data)
            changed[at - position] ^= 1 << bit
            return bytes(changed)
        return data

    return harm


def slow(bytes_each_second):
    def harm(data, position, number):
        time.sleep(len(data) / bytes_each_second)
        return data

    return harm
