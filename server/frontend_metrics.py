"""Prometheus metrics of the server apart from its replica: responses by protocol and status, lag of
the event loop, and the process itself. They exist before the replica does, and all labels come from
fixed lists.
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
from prometheus_client.registry import Collector

import jaxserve
from jaxserve.observe.metric_rows import OTHER, PREFIX

# by protocol: statuses with a label of their own
STATUSES: dict[str, tuple[str, ...]] = {
    "grpc": tuple(code.name for code in grpc.StatusCode),
    "http": (*(str(status.value) for status in HTTPStatus), "499"),
}
TICKETS = ("issued", "fetched", "computed", "foreign")  # what became of them
LAG_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
LAG_PERIOD = 0.05  # seconds between measurements of the event loop's lag
# not OpenMetrics, for which the library replaces the colons of names by underscores
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class FrontendMetrics:
    """The metrics of one server, in a `registry` of its own. All methods belong to the event
    loop."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        ProcessCollector(registry=self.registry)
        self._answers = Counter(
            PREFIX + "requests",
            "Calls that were answered, refusals of what was read included, by protocol and status",
            ("protocol", "status"),
            registry=self.registry,
        )
        self._answers.labels("grpc", "OK")  # exported from the start, at 0
        self._answers.labels("http", "200")
        self._tickets = Counter(
            PREFIX + "kv_tickets",
            "Tickets by which routers pass KV on: issued to a prefill request; of decode requests "
            "those whose KV was fetched, was computed here at least in part, or whose ticket is "
            "not of this cluster",
            ("outcome",),
            registry=self.registry,
        )
        for outcome in TICKETS:
            self._tickets.labels(outcome)
        self._lag = Histogram(
            PREFIX + "event_loop_lag_seconds",
            "Seconds by which the event loop was late, looked at 20 times a second",
            registry=self.registry,
            buckets=LAG_BUCKETS,
        )
        Info(PREFIX + "build", "What serves", registry=self.registry).info(
            {"version": jaxserve.__version__}
        )

    def answered(self, protocol: str, status: str | int) -> None:
        """Counts a response. protocol: http or grpc. status: a code of it, 404 or NOT_FOUND;
        unknown ones count as other. Errors: KeyError for another protocol."""
        label = str(status) if str(status) in STATUSES[protocol] else OTHER
        self._answers.labels(protocol, label).inc()

    def count_ticket(self, outcome: str) -> None:
        """Counts a ticket for KV by what became of it, one of TICKETS."""
        assert outcome in TICKETS
        self._tickets.labels(outcome).inc()

    def lagged(self, seconds: float) -> None:
        """Records by how much the event loop was late."""
        self._lag.observe(max(0.0, seconds))

    async def watch_loop(self) -> None:
        """Measures the event loop's lag until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_PERIOD
            await asyncio.sleep(LAG_PERIOD)
            self.lagged(loop.time() - due)


def exposition(registries: Iterable[Collector]) -> bytes:
    """The metrics of registries, whose names must differ, as CONTENT_TYPE."""
    return b"".join(map(generate_latest, registries))
