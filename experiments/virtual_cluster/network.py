"""The network between the nodes of a simulated cluster: each node sends and receives at one
bandwidth, one transfer after the other."""

from __future__ import annotations

from jaxserve.settings.schema import ConfigError

LATENCY = 1e-3  # seconds from a transfer's order to its first byte


class Network:
    """Links of `nodes` nodes; bytes_per_s: of each node, in either direction. A transfer waits
    until its sender has sent and its receiver received all before it."""

    def __init__(self, nodes: int, bytes_per_s: float, latency: float = LATENCY):
        if not bytes_per_s > 0:
            raise ConfigError("bytes_per_s", f"must be above 0, not {bytes_per_s}")
        self.bytes_per_s = bytes_per_s
        self.latency = latency
        self.bytes_sent = 0.0
        # clock seconds at which each has done what it was asked to so far
        self._send_free = [0.0] * nodes
        self._receive_free = [0.0] * nodes

    def seconds(self, source: int, target: int, size: float, now: float) -> float:
        """Seconds from `now` until `size` bytes were sent, if they were ordered now."""
        start = max(now, self._send_free[source], self._receive_free[target])
        return start - now + self.latency + size / self.bytes_per_s

    def send(self, source: int, target: int, size: float, now: float) -> float:
        """Orders a transfer of `size` bytes; returns the clock second at which it is done."""
        end = now + self.seconds(source, target, size, now)
        self._send_free[source] = self._receive_free[target] = end
        self.bytes_sent += size
        return end

    def stream(
        self, source: int, target: int, size: float, begun: float, now: float, last: float
    ) -> float:
        """Orders a transfer of what was made evenly from clock second `begun` to `now`, sent as it
        was made; its last `last` bytes were made just now. Returns the clock second at which it is
        done."""
        end = self.send(source, target, size, begun)
        end = max(end, now + self.latency + last / self.bytes_per_s)
        self._send_free[source] = max(self._send_free[source], end)
        self._receive_free[target] = max(self._receive_free[target], end)
        return end
