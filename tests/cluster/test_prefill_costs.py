"""A conductor predicts prefills as the replica's own scheduler does, from what that reports."""

from __future__ import annotations

import json

import pytest

from jaxserve.checkpoint.zoo import MODELS
from jaxserve.cluster.prefill_costs import PrefillCosts
from jaxserve.lab.simulate.replica import VirtualReplica
from jaxserve.lab.simulate.run import System
from jaxserve.scheduling.prefill_facts import predictor_of
from jaxserve.server.replica_messages import info_of, info_text
from jaxserve.settings.schema import CacheConfig, ConfigError, MeshConfig, SchedulerConfig
from tests.cluster.fakes import make

PROMPTS = [(0, 100), (0, 8_000), (7_000, 8_000), (0, 100_000), (90_000, 100_000), (99_999, 100_000)]


def replica(
    mesh: str, placement: str = CacheConfig.placement, exchange: str = SchedulerConfig.exchange
) -> VirtualReplica:
    system = System(MODELS["llama3.1-8b"], "a100", MeshConfig.parse(mesh))
    scheduler = SchedulerConfig(chunk_tokens=2048, exchange=exchange)
    tokens = 4096 if "kvp" in mesh else None
    cache = CacheConfig(block_size=256, placement=placement, lane_tokens=tokens)
    return system.replica(scheduler, cache)


@pytest.mark.parametrize(
    ("mesh", "placement", "exchange"),
    [
        ("tp=1", CacheConfig.placement, SchedulerConfig.exchange),
        ("spp=2,tp=2", CacheConfig.placement, SchedulerConfig.exchange),
        ("kvp=4,tp=2", "zigzag", "auto"),
        ("kvp=4,tp=2", "grow", "pass_kv"),
        ("kvp=2,tp=1", "hashed", "gather"),
    ],
)
def test_predictions_are_those_of_the_replica_also_from_another_process(mesh, placement, exchange):
    made = replica(mesh, placement, exchange)
    there = PrefillCosts(info_of(info_text(made.info)))
    for cached, total in PROMPTS:
        assert there.seconds(cached, total) == pytest.approx(
            made.scheduler.times.seconds(cached, total)
        )


def test_a_long_prefix_is_not_priced_as_nothing():
    """Tokens behind a prefix attend to it, so the last 10,000 of 100,000 take longer."""
    costs = PrefillCosts(replica("tp=1").info)
    assert costs.seconds(90_000, 100_000) > 1.5 * costs.seconds(0, 10_000)
    assert costs.seconds(0, 100_000) > 12 * costs.seconds(0, 10_000)


def test_without_a_profile_costs_are_nominal_and_requests_teach_their_scale():
    costs = PrefillCosts(make().info)
    nominal = predictor_of({}, MeshConfig()).prefill(0, 100, make().info.chunk_tokens)
    assert costs.facts == {} and costs.seconds(0, 100) == nominal > 0
    for _ in range(60):
        costs.learn(0, 100, 50 * nominal)
    assert costs.seconds(0, 100) == pytest.approx(50 * nominal, rel=0.01)
    assert costs.queued(nominal) == pytest.approx(50 * nominal, rel=0.01)
    costs.learn(99, 100, 1000.0)  # a few tokens say little
    assert costs.seconds(0, 100) == pytest.approx(50 * nominal, rel=0.01)


def test_what_a_replica_with_a_profile_reports_of_its_queue_is_not_corrected_again():
    costs = PrefillCosts(replica("tp=1").info, scale=3.0)
    assert costs.queued(2.0) == 2.0


def test_facts_of_another_version_are_refused():
    facts = json.loads(json.dumps(replica("tp=1").info.prefill))
    for broken in ({"costs": {}}, {**facts, "costs": {**facts["costs"], "unknown": 1}}):
        with pytest.raises(ConfigError, match="version"):
            predictor_of(broken, MeshConfig())


def test_a_member_keeps_what_it_learnt_when_its_profile_comes(cluster):
    fake = make()
    (member,) = cluster(fake).members
    member.prefill_costs.scale = 2.0
    fake.prefill = replica("tp=1").info.prefill
    assert member.prefill_costs.facts == fake.prefill and member.prefill_costs.scale == 2.0
