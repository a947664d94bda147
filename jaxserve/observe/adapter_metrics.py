"""The adapters of running and of waiting requests, as routers ask for them (Gateway API Inference
Extension, by way of vLLM's metric)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from jaxserve.observe.metric_rows import PREFIX

NAME = "lora_requests_info"


class AdapterMetrics:
    """Collects one gauge, whose labels name the adapters and whose value is the time, in seconds
    since 1970. read: names of the adapters of running requests, and of waiting ones. places: for
    adapters on the devices."""

    def __init__(self, read: Callable[[], tuple[Iterable[str], Iterable[str]]], places: int):
        self._read = read
        self._places = places

    def collect(self) -> Iterator[Metric]:
        running, waiting = (",".join(sorted(set(names))) for names in self._read())
        labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
        family = GaugeMetricFamily(
            PREFIX + NAME, "Adapters of running and of waiting requests", labels=labels
        )
        family.add_metric([str(self._places), running, waiting], time.time())
        yield family
