"""The improvement rate: the time that a larger group of instances must save, by load (Tetris, 5.1).
It is small while instances idle, and large when other prompts wait for them.

A table gives the improvement rate that was best at each arrival rate (see
`improvement_search`); online, the arrival rate is that of a sliding window, and the
table is looked up at intervals.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from jaxserve.api.errors import ConfigError


class ImprovementRate:
    """The improvement rate of a table, by the load of late.

    table: improvement rate by requests per second. load: requests per second for which it is looked
    up at first; window: seconds over which arrivals are counted; every: seconds between look-ups.
    """

    def __init__(
        self,
        table: Mapping[float, float],
        load: float = 0.0,
        window: float = 60.0,
        every: float = 30.0,
    ):
        """Looks the rate of `load` up. Errors: ConfigError for an empty table, rates that are not
        in [0, 1), or times that are not above 0."""
        if not table or not all(load >= 0 and 0 <= rate < 1 for load, rate in table.items()):
            raise ConfigError(
                "table",
                "must map requests per second to rates of at least 0 and below 1, "
                f"not {dict(table)}",
            )
        for name, value in (("window", window), ("every", every)):
            if not value > 0:
                raise ConfigError(name, f"must be above 0 seconds, not {value}")
        self.table = dict(table)
        self.window = window
        self.every = every
        self.value = self._best(load)  # in force until the next look-up
        self._seen: deque[float] = deque()
        self._began = self._due = 0.0

    def arrived(self, now: float) -> float:
        """Notes a request that comes now; returns the improvement rate for it."""
        if not self._seen:
            self._began = now
            self._due = now + self.every
        self._seen.append(now)
        if now >= self._due:
            self._due = now + self.every
            self.value = self._best(self._load(now))
        return self.value

    def _best(self, load: float) -> float:
        """The table's rate for the nearest load that it has."""
        return self.table[min(self.table, key=lambda known: abs(known - load))]

    def _load(self, now: float) -> float:
        """Requests per second over the window, or since the first request while that is shorter."""
        while self._seen[0] < now - self.window:
            self._seen.popleft()
        return len(self._seen) / min(self.window, now - self._began)
