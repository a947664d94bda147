"""Routers of other systems choose as their papers and sources say."""

from __future__ import annotations

import dataclasses

import pytest

from experiments.virtual_cluster.cluster import ClusterSpec, run
from experiments.virtual_cluster.routers import ROUTERS, RouterQuery
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.cluster.roles import Role
from jaxserve.cluster.routing import PrefillView, RoutingQuery
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.run import System
from jaxserve.settings.schema import CacheConfig, MeshConfig

TOTAL = 1000  # tokens of the prompt


class Costs:
    """A second per 100 tokens; nothing is sent."""

    def prefill(self, member: int, cached: int, total: int) -> float:
        return (total - cached) / 100

    def transfer(self, source: int, target: int, tokens: int) -> float:
        raise AssertionError("these routers fetch nothing")


def query(prefixes, active=(0, 0, 0), kept=(0, 0, 0), queues=(0.0, 0.0, 0.0), name=b"a"):
    views = [
        PrefillView(member, prefix, queue, 0)
        for member, (prefix, queue) in enumerate(zip(prefixes, queues))
    ]
    return RouterQuery(RoutingQuery(views, TOTAL, Costs()), active, kept, name, ttft=12.0)


@pytest.mark.parametrize(
    "given, member",
    [
        (dict(prefixes=(0, 501, 400)), 1),  # more than half of the prompt
        (dict(prefixes=(0, 500, 400), kept=(5, 9, 3)), 2),  # else the smallest tree
        (dict(prefixes=(900, 900, 0), active=(7, 3, 0)), 1),
        (dict(prefixes=(900, 0, 0), active=(33, 5, 0)), 2),  # loads differ by more than 32
        (dict(prefixes=(900, 0, 0), active=(32, 5, 0)), 0),
    ],
)
def test_sglang_goes_by_prefix_unless_loads_differ(given, member):
    choice = ROUTERS["sglang"](query(**given))
    assert choice.member == member and choice.fetch is None


def test_load_alone_goes_to_the_least_work():
    given = query((900, 0, 0), queues=(3.0, 2.0, 2.0), active=(0, 4, 1))
    assert ROUTERS["by_load"](given).member == 2


def test_dualmap_has_two_replicas_for_a_prefix_and_leaves_the_nearer_when_it_is_late():
    names = [bytes([number]) for number in range(60)]
    members = lambda **given: [
        ROUTERS["dualmap"](query(name=name, **given)).member for name in names
    ]
    at_rest = members(prefixes=(0, 0, 0))
    late = members(prefixes=(0, 0, 0), queues=(20.0, 0.0, 0.0))
    assert set(at_rest) == {0, 1, 2}
    # those that a late replica has alone stay there, others go to their second one
    assert 0 < late.count(0) < at_rest.count(0)
    for before, after in zip(at_rest, late):
        assert before == after or before == 0
    near = members(prefixes=(900, 0, 0))
    assert near.count(0) > at_rest.count(0)


SYSTEM = System(MODELS["llama3-8b"], "a100", MeshConfig(tp=2))


def conversation(turns: int) -> list[Arrival]:
    """A session whose turns come when the one before has long ended; id 0 stands for answers."""
    blocks: tuple[int, ...] = ()
    found = []
    for turn in range(turns):
        blocks = (*blocks, *range(100 * turn + 1, 100 * turn + 9))
        found.append(Arrival(60.0 * turn, 512 * len(blocks), 512, blocks=blocks))
        blocks = (*blocks, 0)
    return found


@pytest.mark.parametrize("routing", ROUTERS)
def test_a_cluster_runs_under_every_router(routing):
    spec = ClusterSpec(SYSTEM, (Role.MIXED,) * 3, routing=routing)
    report = run(spec, conversation(3))
    assert [record.reason for record in report.records] == ["length"] * 3
    assert report.bytes_sent == 0
    if routing == "sglang":
        # the second turn finds less than half of its prompt, and goes to an empty tree
        assert [record.cached for record in report.records] == [0, 0, 512 * 17]


def test_what_a_decode_replica_has_is_not_sent_again():
    spec = ClusterSpec(
        SYSTEM, (Role.PREFILL, Role.DECODE), CacheConfig(block_size=512), routing="sglang"
    )
    plain = run(spec, conversation(3))
    caching = run(dataclasses.replace(spec, decode_caching=True), conversation(3))
    assert caching.bytes_sent < 0.6 * plain.bytes_sent
    assert all(record.longest_gap >= record.tbt > 0 for record in caching.served)
