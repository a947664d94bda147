"""Batches between their issue and the reading of their tokens, and when the devices are free."""

from __future__ import annotations

from collections import deque

from jaxserve.api.batch import Batch
from jaxserve.engine.results import InFlightBatch


class InFlight:
    """Batches that were issued and not read, oldest first. stages: pipeline stages; lookahead:
    batches beyond one for each stage that may be issued. Times are clock seconds."""

    def __init__(self, stages: int, lookahead: int):
        self._stages = stages
        self._depth = stages + lookahead
        self._flights: deque[InFlightBatch] = deque()
        self._read_at = -1.0  # when the last batch was read
        self._free_at = 0.0  # when the first stage should be free again
        self._in_part = 0.0  # predicted seconds of groups of layers issued after the newest batch
        self.partial: InFlightBatch | None = None  # some groups of its layers are to be issued

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def newest(self) -> InFlightBatch:
        return self._flights[-1]

    @property
    def full(self) -> bool:
        return len(self._flights) >= self._depth

    @property
    def samples_later(self) -> bool:
        """Returns whether the newest batch is still to be sampled: nothing is issued behind it."""
        return bool(self._flights) and self.newest.sample_later

    @property
    def has_room(self) -> bool:
        """Returns whether another batch may be issued."""
        return not self.samples_later and not self.full

    def before(self, flight: InFlightBatch) -> list[Batch]:
        """Batches other than this one, the newest, that were not read."""
        return [other.batch for other in self._flights if other is not flight]

    def seconds_to_spare(self, now: float) -> float:
        """Seconds until the first stage should be free; 0 where a stage waits for a batch, or a
        batch for a token."""
        starved = self.full or len(self._flights) < self._stages
        if self.samples_later or (starved and self.partial is None):
            return 0.0
        return max(0.0, self._free_at - now)

    def issue_part(self, seconds: float, now: float) -> None:
        """Counts predicted seconds of a batch's layers that are issued at `now`."""
        self._in_part += seconds
        self._free_at = max(now, self._free_at) + seconds

    def issue(self, flight: InFlightBatch, now: float) -> None:
        """Adds a batch whose issue began at `now`."""
        self.issue_part(flight.batch.seconds, now)
        self.add(flight)

    def add(self, flight: InFlightBatch) -> None:
        """Adds a batch of which all parts are issued."""
        flight.seconds = self._in_part
        self._in_part = 0.0
        self._flights.append(flight)

    def take(self) -> InFlightBatch:
        """Takes the oldest batch, to be read."""
        return self._flights.popleft()

    def read(self, flight: InFlightBatch, now: float) -> tuple[float, bool]:
        """Notes when a batch that was taken was read. Returns how long its step took: since it was
        issued, or since the one before it left the stages; and whether all of that was its own
        time, which a pipeline tells only of the latter."""
        began = max(self._read_at, flight.issued)
        self._read_at = now
        waiting = list(self._flights)[self._stages - 1 :]  # they have not left the first stage
        self._free_at = now + sum(other.seconds for other in waiting) + self._in_part
        unmixed = self._stages == 1 or began > flight.issued
        return now - began, unmixed and not flight.mixed

    def clear(self) -> None:
        """Forgets all batches: what they computed is lost."""
        self._flights.clear()
        self._free_at = 0.0
        self._in_part = 0.0
        self.partial = None
