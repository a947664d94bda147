"""Metrics of the time that tenants use of a replica, of their credit, and of what they got in
time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from jaxserve.observe.attained import ATTAINED, Attained
from jaxserve.observe.metric_rows import PREFIX

SECONDS, CREDIT = "tenant_seconds", "tenant_credit_seconds"


class TenantMetrics:
    """Collects the rows of each tenant; callers without a key are the tenant ''. read: by tenant,
    the predicted seconds of steps that it has used, those that it may use beyond its share, and how
    many of its requests and tokens were in time."""

    def __init__(
        self,
        read: Callable[[], tuple[Mapping[str, float], Mapping[str, float], Mapping[str, Attained]]],
    ):
        self._read = read

    def collect(self) -> Iterator[Metric]:
        used, credit, attained = self._read()
        for family, values in (
            (
                CounterMetricFamily(
                    PREFIX + SECONDS, "Predicted seconds of steps, by tenant", labels=["tenant"]
                ),
                used,
            ),
            (
                GaugeMetricFamily(
                    PREFIX + CREDIT,
                    "Seconds that a tenant may use beyond its share; below 0: that it has used",
                    labels=["tenant"],
                ),
                credit,
            ),
        ):
            for tenant, value in values.items():
                family.add_metric([tenant], value)
            yield family
        for name, help in ATTAINED.items():
            counter = CounterMetricFamily(
                f"{PREFIX}tenant_{name}", f"{help}, by tenant", labels=["tenant"]
            )
            for tenant, counts in attained.items():
                counter.add_metric([tenant], getattr(counts, name))
            yield counter
