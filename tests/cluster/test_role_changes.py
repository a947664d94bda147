"""Members of a live cluster change sides where one side is more loaded, one at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import MappingProxyType

from jaxserve.cluster.role_board import OwnRoles, RoleBoard
from jaxserve.cluster.role_changes import RoleChanges
from jaxserve.cluster.roles import RatioLimits
from jaxserve.settings.schema import SchedulerConfig
from tests.cluster.fakes import RoleCluster, RoleReplica, assert_right


class Promising(RoleReplica):
    """A fake that says what objectives it has: 2 s to the first token, 0.1 s per token."""

    @property
    def info(self):
        info = super().info
        scheduler = dataclasses.asdict(SchedulerConfig())
        settings = MappingProxyType({**info.settings, "scheduler": scheduler})
        return dataclasses.replace(info, settings=settings)


def four() -> list[Promising]:
    return [Promising(role) for role in ("prefill", "prefill", "decode", "decode")]


def parted(
    fakes: Sequence[Promising] = (), board: RoleBoard | None = None
) -> tuple[RoleCluster, RoleChanges]:
    """Two members that prefill and two that decode, and what changes them. board: that another
    conductor uses too."""
    cluster = RoleCluster(*(fakes or four()))
    table = cluster.conductor.table
    limits = RatioLimits(cooldown=10.0)
    return cluster, RoleChanges(table, board or OwnRoles(), lambda command: command(), limits)


def roles(cluster: RoleCluster) -> list[str]:
    return [row["role"] for row in cluster.conductor.view()["members"]]


def busy_prefill(cluster: RoleCluster, seconds: float, now: float) -> None:
    for number, member in enumerate(cluster.members[:2]):
        member.work.begin_prefill("busy", seconds + number, now)


def test_a_member_that_decodes_prefills_where_prompts_wait():
    cluster, changes = parted()
    busy_prefill(cluster, 8.0, now=100.0)
    cluster.members[2].work.expect_decode("one", 10, 0.0)
    cluster.members[2].work.begin_decode("one", 0.0)
    changes.check(100.0)
    assert roles(cluster) == ["prefill", "prefill", "decode", "prefill"], "the less loaded one"
    changes.check(200.0)
    assert roles(cluster).count("decode") == 1, "each side keeps one"


def test_a_member_that_prefills_decodes_where_tokens_are_slow():
    cluster, changes = parted()
    for member in cluster.members[2:]:
        member.decode_rate.learn(1, 0.5)
        member.work.expect_decode("one", 10, 0.0)
        member.work.begin_decode("one", 0.0)
    changes.check(100.0)
    assert roles(cluster) == ["decode", "prefill", "decode", "decode"]


def test_nothing_changes_where_both_sides_are_idle_or_soon_after_a_change():
    cluster, changes = parted()
    changes.check(100.0)
    assert roles(cluster) == ["prefill", "prefill", "decode", "decode"]
    busy_prefill(cluster, 8.0, now=100.0)
    changes.check(100.0)
    for member in cluster.members[:2]:
        member.work.end_prefill("busy", 101.0)
    changes.check(101.0)
    assert roles(cluster).count("prefill") == 3


def test_of_two_conductors_that_see_the_same_one_changes_a_role():
    fakes, board = four(), OwnRoles()
    (one, of_one), (other, of_other) = parted(fakes, board), parted(fakes, board)
    busy_prefill(one, 8.0, now=100.0)
    busy_prefill(other, 8.0, now=100.0)
    one.members[3].work.expect_decode("one", 10, 0.0)  # so that each would choose another member
    one.members[3].work.begin_decode("one", 0.0)
    of_one.check(100.0)
    of_other.check(100.0)
    right = ["prefill", "prefill", "prefill", "decode"]
    assert roles(one) == roles(other) == right
    of_one.follow(101.0)
    of_other.follow(101.0)
    assert roles(one) == roles(other) == right
    of_other.check(109.0)
    assert roles(other) == right, "after the change of the other one it waits too"


def test_a_conductor_that_starts_again_remembers_roles():
    fakes, board = four(), OwnRoles()
    one, changes = parted(fakes, board)
    busy_prefill(one, 8.0, now=100.0)
    changes.check(100.0)
    assert roles(one).count("prefill") == 3
    again, changes = parted(fakes, board)
    changes.follow(200.0)
    assert roles(again) == roles(one)


def test_a_request_is_served_by_a_member_in_its_new_role(cluster):
    fakes = [Promising(role) for role in ("prefill", "decode", "decode")]
    three = cluster(*fakes, change_roles=True)
    three.members[0].work.begin_prefill("busy", 1000.0, three.conductor.now())
    three.conductor.check()
    assert roles(three).count("prefill") == 2
    assert_right(three.serve())
    assert sum(len(fake.jobs) for fake in fakes[1:]) == 1
