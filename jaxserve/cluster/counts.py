"""Counters of a conductor, beside the metrics of its members."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

PREFIX = "jaxserve:"
# causes for which a request is taken from a replica
LOST = "lost"  # the replica is not alive
ENDED = "ended"  # it is, and ended the request with UNAVAILABLE: it stops, or starts its workers
CAUSES = (LOST, ENDED)


class ConductorCounts:
    """Counters of requests that were sent to another replica, in `registry`."""

    def __init__(self, registry: CollectorRegistry):
        self._retries = _by_cause(
            registry, "retries", "Requests without a token that were sent to another replica"
        )
        self._migrations = _by_cause(
            registry, "migrations", "Requests with tokens that went on at another replica"
        )

    def count_resent(self, cause: str, with_tokens: bool) -> None:
        """Counts a request that is sent to another replica for one of CAUSES."""
        counters = self._migrations if with_tokens else self._retries
        counters[cause].inc()


def _by_cause(registry: CollectorRegistry, name: str, help: str) -> dict[str, Counter]:
    counter = Counter(PREFIX + name, help, ("cause",), registry=registry)
    return {cause: counter.labels(cause) for cause in CAUSES}
