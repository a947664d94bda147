"""A simulated cluster serves every request once, keeps its books, and shows what routing, fetching
and splitting roles are for."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from experiments.virtual_cluster.admission import POLICIES
from experiments.virtual_cluster.cluster import ClusterSpec, run
from experiments.virtual_cluster.copies import Copies
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.cluster.roles import RatioLimits, Role
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.run import System
from jaxserve.settings.schema import ConfigError, MeshConfig

SYSTEM = System(MODELS["llama3-70b"], "a100", MeshConfig(tp=8))
PREFILL, DECODE, MIXED = Role.PREFILL, Role.DECODE, Role.MIXED


def spec(*roles: Role, **rest) -> ClusterSpec:
    return ClusterSpec(SYSTEM, roles, **rest)


def chats(count: int, rate: float, output: int, seed: int = 0, blocks: int = 16) -> list[Arrival]:
    """Requests on one of eight long documents, each with a question of its own."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, count))
    found = []
    for number, time in enumerate(times.tolist()):
        document = int(rng.integers(8)) * 1000
        keys = (*range(document, document + blocks), 10_000 + number)
        found.append(Arrival(time, 512 * (blocks + 1), output, blocks=keys))
    return found


def assert_books(report, arrivals, cluster):
    """Every request has one record whose times are in order; nothing is counted twice."""
    assert [record.id for record in report.records] == [str(n) for n in range(len(arrivals))]
    for record, arrival in zip(report.records, arrivals):
        assert record.arrival == arrival.time and record.prompt == arrival.prompt
        assert 0 <= record.fetched <= record.prompt and 0 <= record.cached < record.prompt
        if record.reason == "length":
            assert record.arrival < record.first <= record.end
            if record.decode_on is not None:
                assert cluster.roles[record.decode_on] is DECODE
                assert record.first <= record.transferred <= record.end
    sent = (
        0
        if DECODE not in cluster.roles
        else sum(record.prompt for record in report.records if record.transferred)
    )
    sent += sum(record.fetched for record in report.records)
    assert report.bytes_sent == pytest.approx(sent * SYSTEM.shape.kv_bytes_per_token())


@pytest.mark.parametrize(
    "roles", [(PREFILL, PREFILL, DECODE), (PREFILL, PREFILL), (MIXED, MIXED), (PREFILL, MIXED)]
)
@pytest.mark.parametrize("routing", ["random", "cache_aware"])
def test_every_request_is_served(roles, routing):
    cluster = spec(*roles, routing=routing)
    arrivals = chats(20, 1.0, 5)
    report = run(cluster, arrivals)
    assert_books(report, arrivals, cluster)
    assert len(report.served) == 20 and not any(report.refused.values())
    assert len(report.busy) == len(roles) and all(busy >= 0 for busy in report.busy)


def test_of_windows_only_what_they_see_is_sent():
    system = System(MODELS["gpt-oss-120b"], "h100", MeshConfig(tp=4))
    report = run(ClusterSpec(system, (PREFILL, DECODE)), chats(6, 0.5, 5))
    assert len(report.served) == 6
    half = system.shape.kv_bytes_per_token() / 2  # of all layers, those that see all tokens
    sent = sum(half * (record.prompt + 128) for record in report.records)
    assert report.bytes_sent == pytest.approx(sent)


def test_what_is_fetched_between_replicas_with_windows_is_not_computed():
    system = System(MODELS["gpt-oss-120b"], "h100", MeshConfig(tp=4))
    arrivals = chats(12, 4.0, 2, blocks=64)
    report = run(ClusterSpec(system, (PREFILL,) * 4, routing="cache_aware"), arrivals)
    fetched = [record for record in report.records if record.fetched]
    assert fetched and all(record.cached >= record.fetched for record in fetched)


def test_equal_runs_give_equal_results():
    cluster = spec(PREFILL, PREFILL, DECODE, routing="random", sample_every=5.0)
    first, second = (run(cluster, chats(15, 1.0, 4)) for _ in range(2))
    assert first.records == second.records and first.samples == second.samples
    other = run(dataclasses.replace(cluster, seed=1), chats(15, 1.0, 4))
    assert [r.prefill_on for r in other.records] != [r.prefill_on for r in first.records]


@pytest.mark.parametrize("layer_groups", [1, 4, SYSTEM.shape.layers])
def test_one_request_has_the_predicted_ttft_and_its_kv_follows_as_layers_leave(layer_groups):
    """One chunk: with one group its KV leaves at its end, else all but the last group's before."""
    prompt = 4096
    moved = prompt * SYSTEM.shape.kv_bytes_per_token()
    slow = spec(PREFILL, DECODE, bytes_per_s=1e9, layer_groups=layer_groups)
    (record,) = run(slow, [Arrival(0.0, prompt, 3)]).records
    assert record.ttft == pytest.approx(record.predicted_ttft, rel=0.02)
    seconds = moved / 1e9
    expected = max(seconds, record.first + seconds / layer_groups)
    assert record.transferred == pytest.approx(expected, rel=0.01)
    (quick,) = run(
        spec(PREFILL, DECODE, layer_groups=layer_groups), [Arrival(0.0, prompt, 3)]
    ).records
    tail = moved / layer_groups / 87e9
    assert tail <= quick.transferred - quick.first < tail + 0.005


def test_a_prefix_is_fetched_from_the_replica_that_has_it_and_is_on_both_then():
    keys = tuple(range(32))
    arrivals = [Arrival(0.0, 512 * 32, 1, blocks=keys)]
    # four at once: the holder is busy with the first, the other fetches
    arrivals += [Arrival(60.0, 512 * 32, 1, blocks=(*keys[:31], 100 + n)) for n in range(4)]
    report = run(spec(PREFILL, PREFILL), arrivals)
    fetched = [record for record in report.records if record.fetched]
    assert fetched and {record.fetched for record in fetched} == {512 * 31}
    assert all(record.cached == 512 * 31 for record in report.records[1:])
    assert report.copies.at_rank(1) == report.copies.at_rank(31) == 2
    local = run(spec(PREFILL, PREFILL, routing="local_cache_aware"), arrivals)
    assert not any(record.fetched for record in local.records)


def test_blocks_are_ranked_by_all_samples_and_counted_in_the_settled_ones():
    copies = Copies(settles=10.0)
    copies.add(0.0, [["a", "b"], ["a"], ["a"]])
    assert copies.at_rank(1) == 0  # nothing is settled
    copies.add(10.0, [["b"], ["b"], []])
    copies.add(20.0, [["b"], ["a"], []])
    assert copies.total == {"a": 4, "b": 4}
    assert copies.at_rank(1) == 0.5 and copies.at_rank(2) == 1.5  # of equals the first seen
    assert copies.at_rank(3) == 0


def test_the_less_routing_sees_the_less_it_finds():
    arrivals = chats(80, 3.0, 1, blocks=48)
    hits = [
        run(spec(*[PREFILL] * 4, routing="local_cache_aware", seen=seen), arrivals).hit_rate()
        for seen in (None, 4, 2, 1)
    ]
    assert hits[0] == hits[1] > hits[2] > hits[3]


def test_caches_pay_in_the_order_of_the_paper():
    """Mooncake, Fig. 5, in miniature: chance, load, own caches, all caches."""
    arrivals = chats(80, 3.0, 1, blocks=48)
    mean = {
        name: run(spec(*[PREFILL] * 4, routing=name), arrivals).ttft().mean()
        for name in ("random", "load_balanced", "local_cache_aware", "cache_aware")
    }
    assert mean["cache_aware"] <= mean["local_cache_aware"] < mean["load_balanced"]
    assert mean["load_balanced"] < mean["random"]


def test_decodes_beside_no_prefill_have_steady_gaps():
    arrivals = chats(30, 1.0, 40)
    apart = run(spec(PREFILL, DECODE), arrivals)
    together = run(spec(MIXED, MIXED, routing="load_balanced"), arrivals)
    assert apart.tbt().mean() < 0.05 < together.tbt().mean()


def test_overload_is_refused_on_arrival_or_in_vain():
    arrivals = chats(80, 20.0, 60)
    for name in POLICIES:
        cluster = spec(PREFILL, PREFILL, DECODE, admission=name, ttft=8.0, tbt=0.021)
        report = run(cluster, arrivals)
        assert_books(report, arrivals, cluster)
        refused = report.refused
        assert len(report.served) + sum(refused.values()) == 80
        late = [record for record in report.records if record.reason == "refused_late"]
        assert all(record.first for record in late) and len(late) == refused["refused_late"]
        assert (sum(refused.values()) > 0) == (name != "none")
        if name == "baseline":
            assert refused["refused_late"] > 0


def test_a_small_decode_replica_makes_requests_wait_and_serves_them_all():
    cluster = spec(PREFILL, DECODE, decode_tokens=30_000)
    arrivals = chats(12, 4.0, 30)
    assert len(run(cluster, arrivals).served) == 12


def test_what_has_not_ended_by_the_end_is_unfinished():
    report = run(spec(PREFILL, DECODE), chats(10, 1.0, 200), until=5.0)
    assert {record.reason for record in report.records} <= {"unfinished", "length"}
    assert any(record.reason == "unfinished" for record in report.records)


def test_a_cluster_that_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="roles"):
        spec(DECODE)
    with pytest.raises(ConfigError, match="one of random"):
        spec(MIXED, routing="best")


def test_nodes_change_sides_with_the_load_and_all_is_served():
    limits = RatioLimits(cooldown=2.0)
    made = spec(PREFILL, PREFILL, DECODE, DECODE, ttft=2.0, ratio=limits, cache_tokens=400_000)
    long_prompts = [Arrival(0.2 * number, 20_000, 4) for number in range(60)]
    report = run(made, long_prompts)
    assert report.role_changes[0].prefilling == 3
    assert len(report.served) == 60 and {one.prefill_on for one in report.records} > {0, 1}
    fixed = run(
        spec(PREFILL, PREFILL, DECODE, DECODE, ttft=2.0, cache_tokens=400_000), long_prompts
    )
    assert fixed.role_changes == [] and report.ttft().mean() < fixed.ttft().mean()
