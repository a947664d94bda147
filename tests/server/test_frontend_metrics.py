"""What a server counts beside its engine: answers under bounded labels, the event loop's lag, the
process."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

import jaxserve
from jaxserve.observe.metric_rows import READ
from jaxserve.observe.metrics import Metrics
from jaxserve.server.frontend_metrics import CONTENT_TYPE, FrontendMetrics, exposition


def samples(*registries) -> dict[tuple[str, ...], float]:
    return {
        (sample.name.removeprefix("jaxserve:"), *sample.labels.values()): sample.value
        for family in parse(exposition(registries).decode())
        for sample in family.samples
    }


def test_statuses_that_no_protocol_has_are_counted_as_one():
    front = FrontendMetrics()
    for protocol, status in (
        ("http", 200),
        ("http", "200"),
        ("http", 429),
        ("http", 499),
        ("grpc", "OK"),
        ("grpc", "RESOURCE_EXHAUSTED"),
    ):
        front.answered(protocol, status)
    for hostile in ("x", "200\n", 99999, "", "ok"):
        front.answered("http", hostile)
        front.answered("grpc", hostile)
    found = {
        key[1:]: count
        for key, count in samples(front.registry).items()
        if key[0] == "requests_total"
    }
    assert found == {
        ("http", "200"): 2,
        ("http", "429"): 1,
        ("http", "499"): 1,
        ("http", "other"): 5,
        ("grpc", "OK"): 1,
        ("grpc", "RESOURCE_EXHAUSTED"): 1,
        ("grpc", "other"): 5,
    }
    with pytest.raises(KeyError):
        front.answered("gopher", "OK")


def test_a_loop_that_is_held_up_shows_as_lag():
    front = FrontendMetrics()

    def measured() -> float:
        return samples(front.registry)["event_loop_lag_seconds_count",]

    async def main() -> None:
        watch = asyncio.create_task(front.watch_loop())
        while not measured():
            await asyncio.sleep(0.01)
        time.sleep(0.3)  # what must not happen on a loop
        before = measured()
        while measured() < before + 2:
            await asyncio.sleep(0.01)
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch

    asyncio.run(main())
    found = samples(front.registry)
    count = found["event_loop_lag_seconds_count",]
    assert count >= 3 and found["event_loop_lag_seconds_bucket", "0.2"] < count, (
        "a lag of 0.25 s or more"
    )
    assert found["event_loop_lag_seconds_sum",] >= 0.2


def test_the_process_is_told_beside_an_engine():
    front = FrontendMetrics()
    engine = Metrics(4, (), lambda: dict.fromkeys(READ, 3.0))
    found = samples(front.registry, engine.registry)
    assert found["process_resident_memory_bytes",] > 2**20 and found["process_open_fds",] > 2
    assert found["num_requests_running",] == 3 and found["build_info", jaxserve.__version__] == 1
    assert CONTENT_TYPE.startswith("text/plain") and b"jaxserve:num_requests_running" in exposition(
        [engine.registry]
    )
