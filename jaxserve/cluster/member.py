"""A replica as a conductor knows it: its role, what was routed to it, how fast it prefills."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from jaxserve.api.events import Finished
from jaxserve.cluster.assignments import Assignments
from jaxserve.cluster.roles import Role
from jaxserve.replica.protocol import Replica

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
FIRST_RATE = 1e-4  # seconds per prompt token, before anything was seen
SMOOTHING = 0.2  # weight of a new observation
MIN_OBSERVED = 16  # computed tokens; fewer say little about the time per token


@dataclass
class Member:
    """A replica of a cluster, by a name that operators see. suspect: it failed a call, and is not
    asked again before it was seen alive by the next check."""

    name: str
    replica: Replica
    work: Assignments = field(default_factory=Assignments)
    rate: float = FIRST_RATE  # learnt seconds per prompt token that is computed
    suspect: bool = False
    lost: bool = False  # its requests were taken from it, as it was not alive

    @property
    def role(self) -> Role:
        return Role(self.replica.info.role)

    @property
    def alive(self) -> bool:
        return self.replica.alive and not self.suspect

    @property
    def usable(self) -> bool:
        """Whether requests may be sent to it."""
        return self.alive and bool(
            self.ask(lambda replica: replica.available and replica.overdue() is None)
        )

    def ask(self, question: Callable[[Replica], Answer]) -> Answer | None:
        """What the replica answers; None where it cannot be reached."""
        try:
            return question(self.replica)
        except Exception as error:
            log.warning("replica %s did not answer: %s", self.name, error)
            return None

    def prefill(self, cached: int, total: int) -> float:
        """Predicted seconds in which it computes tokens `cached` to before `total`."""
        return self.rate * (total - cached)

    def learn(self, end: Finished) -> None:
        """Learns from a request that has ended how fast prompts are computed."""
        computed = end.usage.prompt - end.usage.cached
        seconds = end.timing.first_token - end.timing.queued
        if end.usage.completion and computed >= MIN_OBSERVED and seconds > 0:
            self.rate += SMOOTHING * (seconds / computed - self.rate)
