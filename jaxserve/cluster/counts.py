"""Counters of a conductor, beside the metrics of its members."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter

from jaxserve.api.errors import RequestError
from jaxserve.observe.metric_rows import OTHER, PREFIX, REJECTIONS

# causes for which a request is taken from a replica
LOST = "lost"  # the replica is not alive
ENDED = "ended"  # it is, and ended the request with UNAVAILABLE: it stops, or starts its workers
CAUSES = (LOST, ENDED)
UNAVAILABLE = "unavailable"  # a replica drains, starts its workers, or cannot be reached
REFUSALS = (*REJECTIONS, UNAVAILABLE, OTHER)


class ConductorCounts:
    """Counters of requests that were sent to another replica, in `registry`."""

    def __init__(self, registry: CollectorRegistry):
        self._retries = _labelled(
            registry,
            "retries",
            "Requests without a token that were taken from a replica, for another one",
            "cause",
            CAUSES,
        )
        self._migrations = _labelled(
            registry,
            "migrations",
            "Requests with tokens that were taken from a replica, to go on at another one",
            "cause",
            CAUSES,
        )
        self._refusals = _labelled(
            registry,
            "replica_refusals",
            "Times that a replica refused a request, so that another one was asked",
            "reason",
            REFUSALS,
        )

    def count_resent(self, cause: str, with_tokens: bool) -> None:
        """Counts a request that is sent to another replica for one of CAUSES."""
        counters = self._migrations if with_tokens else self._retries
        counters[cause].inc()

    def count_refusal(self, error: RequestError) -> None:
        """Counts a refusal of a replica, after which another one is asked."""
        reason = UNAVAILABLE if error.status == "UNAVAILABLE" else error.reason
        self._refusals[reason if reason in REFUSALS else OTHER].inc()


def _labelled(
    registry: CollectorRegistry, name: str, help: str, label: str, values: Iterable[str]
) -> dict[str, Counter]:
    """Makes a counter for each value of a label."""
    counter = Counter(PREFIX + name, help, (label,), registry=registry)
    return {value: counter.labels(value) for value in values}
