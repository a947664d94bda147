"""Border A: what everything above a replica may ask of it. Requests go in, events come out.

The live engine, the virtual replica of the simulator and the fake of the tests implement it, and
one test suite (tests/replica) runs over all of them. Callers of a `Replica` cannot tell which of
these it is, and reach through it to nothing behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from prometheus_client import CollectorRegistry

from jaxserve.api.events import Event
from jaxserve.api.request import Request
from jaxserve.cache.block_events import BlockEvents
from jaxserve.replica.adapters import Adapters
from jaxserve.replica.info import ReplicaInfo
from jaxserve.replica.weights import ReplicaWeights
from jaxserve.scheduling import Load

Sink = Callable[[Sequence[Event]], None]


@runtime_checkable
class Replica(Protocol):
    """One model instance, one failure domain. All methods may be called from any thread."""

    @property
    def info(self) -> ReplicaInfo:
        """The facts of the replica."""

    @property
    def alive(self) -> bool:
        """False once it has failed for good."""

    @property
    def available(self) -> bool:
        """False while its devices are restarted: requests are refused until then."""

    def start(self) -> None:
        """Begins to run what was submitted."""

    def now(self) -> float:
        """Returns seconds on the replica's clock, on which arrivals and deadlines are given."""

    def submit(self, request: Request, sink: Sink) -> None:
        """Takes a request. Its events go to `sink` from the replica's own thread, those of one step
        in one call: the last token of a completion comes together with its end. `sink` must not
        block; one that raises is not called again, and its request is cancelled.

        Errors: RequestError for an id in use, a full queue, a request that can never fit or that
        could not be in time, a replica that is drained, closed or broken.
        """

    def cancel(self, request_id: str, reason: str = "cancelled") -> bool:
        """Ends a request; its sink gets Finished. False for an unknown id (it may just have
        ended)."""

    def stop(self, request_id: str, index: int) -> bool:
        """Ends one completion of a request with the reason 'stop'. False where it has ended."""

    def post(self, command: Callable[[], object]) -> None:
        """Runs a command on the replica's thread before its next step, without waiting for it; at
        once where that thread has ended. The command must not raise."""

    def load(self) -> Load:
        """Returns how busy the replica is."""

    def overdue(self) -> float | None:
        """Seconds by which the step in progress is overdue; None where none is. Never waits."""

    def view(self, since: int = 0) -> dict[str, Any]:
        """Returns what runs and what ran lately, steps from number `since` on, as plain data for
        the dashboard."""

    def count_rejected(self, reason: str) -> None:
        """Counts a request that was refused before it got here, by the reason."""

    @property
    def metrics_registry(self) -> CollectorRegistry:
        """Its metrics, for Prometheus."""

    @property
    def block_events(self) -> BlockEvents:
        """The blocks of KV that it stores and loses. Listeners subscribe by way of `post`, and
        are called on the replica's thread."""

    @property
    def adapters(self) -> Adapters:
        """The adapters that requests may be computed with."""

    @property
    def weights(self) -> ReplicaWeights:
        """The weights that requests are computed with."""

    def flush_cache(self) -> int:
        """Forgets cached prefixes that no request uses; returns how many pages that frees."""

    def drain(self) -> None:
        """Takes no new requests from now on; those that it has go on."""

    def close(self) -> None:
        """Stops. Requests that still run end with an error of status UNAVAILABLE."""
