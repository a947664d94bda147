"""Metrics of a conductor over replicas that are lost, begin again, leave and come."""

from __future__ import annotations

import re

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families as parse

from jaxserve.api.errors import RequestError
from jaxserve.cluster.conductor import Conductor
from jaxserve.cluster.member import Member
from jaxserve.observe.metric_rows import OF_TRANSFERS, READ
from jaxserve.observe.metrics import Metrics
from tests.cluster.fakes import RoleCluster, RoleReplica


class Counting(RoleReplica):
    """A fake whose metrics are 0 at first: `values`, of which tests count preemptions."""

    def __init__(self, role: str):
        super().__init__(role)
        self.restart()
        self.metrics = Metrics(
            4, ("chat",), lambda: self.values, transfers=lambda: {("host:1", "tcp"): self.transfers}
        )

    def restart(self) -> None:
        self.values = dict.fromkeys(READ, 0.0)
        self.transfers = dict.fromkeys(OF_TRANSFERS, 0.0)

    def count(self, number: int) -> None:
        self.values["num_preemptions"] += number


class Scraped:
    """A conductor whose members are asked for metrics."""

    def __init__(self, *roles: str):
        self.fakes = [Counting(role) for role in roles]
        self.cluster = RoleCluster(*self.fakes)
        self.conductor: Conductor = self.cluster.conductor

    def by_role(self) -> dict[tuple[str, str], float]:
        return self.samples("role")

    def samples(self, label: str = "replica") -> dict[tuple[str, str], float]:
        """Returns samples by name and the value of a label (or '')."""
        text = generate_latest(self.conductor.metrics_registry).decode()
        return {
            (sample.name.removeprefix("jaxserve:"), sample.labels.get(label, "")): sample.value
            for family in parse(text)
            for sample in family.samples
            if not sample.name.endswith(("_bucket", "_created"))
        }

    def counted(self) -> float:
        return self.samples()["num_preemptions_total", ""]


def test_sums_of_what_grows_do_not_fall_when_a_replica_is_lost_restarts_or_leaves():
    scraped = Scraped("mixed", "mixed")
    first, second = scraped.fakes
    first.count(10)
    second.count(5)
    assert scraped.counted() == 15
    first.alive = False
    assert scraped.counted() == 15
    second.count(1)
    assert scraped.counted() == 16
    first.restart()
    first.alive = True
    first.count(2)
    assert scraped.counted() == 18
    first.count(10)
    assert scraped.counted() == 28
    scraped.conductor.remove(scraped.cluster.members[0])
    scraped.conductor.check()
    assert [member.replica for member in scraped.conductor.members] == [second]
    assert scraped.counted() == 28
    scraped.conductor.add(Member("new", Counting("mixed")))
    assert scraped.counted() == 28


def test_gauges_are_those_of_the_replicas_that_live():
    scraped = Scraped("mixed", "mixed")
    for fake in scraped.fakes:
        fake.values.update(num_requests_running=3, kv_cache_usage_perc=0.5)
    assert scraped.samples()["num_requests_running", ""] == 6
    assert scraped.samples()["kv_cache_usage_perc", ""] == 0.5, "a mean"
    scraped.fakes[0].alive = False
    assert scraped.samples()["num_requests_running", ""] == 3


def test_each_replica_has_its_series():
    scraped = Scraped("prefill", "decode")
    scraped.fakes[1].count(7)
    first, second = (member.name for member in scraped.conductor.members)
    samples = scraped.samples()
    assert samples["replica_num_preemptions_total", first] == 0
    assert samples["replica_num_preemptions_total", second] == 7
    assert samples["replica_queued_prefill_seconds", first] == 0
    scraped.fakes[0].alive = False
    assert ("replica_num_preemptions_total", first) not in scraped.samples()


def test_kv_that_goes_from_one_replica_to_another_has_a_series():
    scraped = Scraped("prefill", "decode")
    scraped.fakes[1].transfers["kv_transfer_blocks"] = 5
    text = generate_latest(scraped.conductor.metrics_registry).decode()
    name = scraped.conductor.members[1].name
    series = "jaxserve:replica_kv_transfer_blocks_total"
    assert f'{series}{{plane="tcp",replica="{name}",source="host:1"}} 5.0' in text
    assert 'jaxserve:kv_transfer_blocks_total{plane="tcp",source="host:1"} 5.0' in text


def test_signals_by_role_tell_how_long_requests_wait():
    scraped = Scraped("prefill", "prefill", "decode")
    now = scraped.conductor.now()
    first, _, decode = scraped.cluster.members
    first.work.begin_prefill("long", 1000.0, now)
    signals = scraped.by_role()
    assert signals["role_replicas", "prefill"] == 2 and signals["role_replicas", "decode"] == 1
    assert signals["role_queue_seconds", "prefill"] == pytest.approx(500.0, abs=5)
    assert signals["role_queue_seconds", "decode"] == 0
    for number in range(decode.replica.info.max_seqs + 1):
        decode.work.expect_decode(f"{number}", 10, now)
    assert scraped.by_role()["role_queue_seconds", "decode"] > 0
    scraped.fakes[2].alive = False
    assert scraped.by_role()["role_replicas", "decode"] == 0
    assert ("role_replicas", "mixed") not in scraped.by_role()


def test_a_refusal_after_which_another_replica_is_asked_is_counted_by_its_reason():
    scraped = Scraped("mixed", "mixed", "mixed")
    full, draining, _ = scraped.fakes
    full.fault = RequestError("", "5 wait", "RESOURCE_EXHAUSTED", reason="queue")
    draining.drain()
    for number in range(6):
        scraped.cluster.submit(f"{number}")
    text = generate_latest(scraped.conductor.metrics_registry).decode()
    for reason in ("queue", "unavailable"):
        assert float(re.search(rf'refusals_total{{reason="{reason}"}} (\S+)', text)[1]) > 0
    assert 'refusals_total{reason="ttft"} 0.0' in text
