"""What the server did, beside what its engine did, for Prometheus: answers by protocol and status,
how long the event loop was kept from its work, and the process itself. It is there before the
engine is, and what it counts bears labels from fixed lists alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from http import HTTPStatus

import grpc
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    Info,
    ProcessCollector,
    generate_latest,
)

import jaxserve
from jaxserve.observe.metrics import OTHER, PREFIX

STATUSES: dict[str, tuple[str, ...]] = {  # by protocol, what counts under its own name
    "grpc": tuple(code.name for code in grpc.StatusCode),
    "http": (*(str(status.value) for status in HTTPStatus), "499"),
}
LAGS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
PERIOD = 0.05  # seconds between looks at the event loop
# in OpenMetrics the library makes underscores of the names' colons
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class FrontendMetrics:
    """The metrics of one server, in a `registry` of its own. All methods are of the event loop."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        ProcessCollector(registry=self.registry)
        self._answers = Counter(
            PREFIX + "requests",
            "Calls that were answered, refusals of what was read included, by protocol and status",
            ("protocol", "status"),
            registry=self.registry,
        )
        # there from the start, at 0
        self._answers.labels("grpc", "OK"), self._answers.labels("http", "200")
        self._lag = Histogram(
            PREFIX + "event_loop_lag_seconds",
            "Seconds by which the event loop was late, looked at 20 times a second",
            registry=self.registry,
            buckets=LAGS,
        )
        Info(PREFIX + "build", "What serves", registry=self.registry).info(
            {"version": jaxserve.__version__}
        )

    def answered(self, protocol: str, status: str | int) -> None:
        """A call was answered. protocol: http or grpc; status: a code of it, as 404 or NOT_FOUND;
        any other counts as other. Errors: KeyError for another protocol."""
        known = str(status) if str(status) in STATUSES[protocol] else OTHER
        self._answers.labels(protocol, known).inc()

    def lagged(self, seconds: float) -> None:
        """The event loop was late by so much."""
        self._lag.observe(max(0.0, seconds))

    async def watch_loop(self) -> None:
        """Looks at the event loop until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + PERIOD
            await asyncio.sleep(PERIOD)
            self.lagged(loop.time() - due)


def exposition(registries: Iterable[CollectorRegistry]) -> bytes:
    """The page for Prometheus, of CONTENT_TYPE, of all of these; their names must differ."""
    return b"".join(map(generate_latest, registries))
