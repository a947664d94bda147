"""The loads of a cluster's roles, as one conductor knows them: what role changes and autoscalers go
by."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxserve.cluster.member import Member
from jaxserve.cluster.member_table import MemberTable
from jaxserve.cluster.roles import Role
from jaxserve.observe.metric_rows import PREFIX


class RoleLoads:
    """Loads of members: 1 where an objective is just met."""

    def __init__(self, table: MemberTable):
        self._table = table

    def prefill(self, member: Member, now: float) -> float:
        """Returns its queue over the objective for the first token."""
        return member.queue(now) / self._table.objectives.of().ttft

    def decode(self, member: Member) -> float:
        """Returns its seconds per token over the objective, or its share of slots, if that is
        more."""
        decodes = member.decodes
        if not decodes:
            return 0.0
        pace = member.decode_rate.seconds(decodes) / self._table.objectives.of().tpot
        return max(pace, decodes / member.replica.info.max_seqs)

    def of(self, member: Member, now: float) -> float:
        """Returns the load of what its role does, of both if it is mixed the larger one."""
        prefill = self.prefill(member, now) if member.role.prefills else 0.0
        decode = self.decode(member) if member.role.decodes else 0.0
        return max(prefill, decode)


class RoleSignals(Collector):
    """Gauges by role, means over the replicas of the role that can be sent requests. now: clock
    seconds."""

    def __init__(self, table: MemberTable, now: Callable[[], float]):
        self._table = table
        self._loads = RoleLoads(table)
        self._now = now

    def collect(self) -> Iterator[Metric]:
        now = self._now()
        replicas = _gauge("role_replicas", "Replicas that can be sent requests")
        queues = _gauge(
            "role_queue_seconds",
            "Predicted seconds that a request which comes now waits for its prefill, or for a slot",
        )
        loads = _gauge("role_load", "Load of a role's replicas; 1: an objective is just met")
        for role in Role:
            members = [one for one in self._table.all if one.joined and one.role is role]
            usable = [one for one in members if one.usable]
            if not members:
                continue
            count = max(len(usable), 1)
            waits = (one.queue(now) + one.slot_wait for one in usable)
            replicas.add_metric([role.value], len(usable))
            queues.add_metric([role.value], math.fsum(waits) / count)
            loads.add_metric(
                [role.value], math.fsum(self._loads.of(one, now) for one in usable) / count
            )
        yield from (replicas, queues, loads)


def _gauge(name: str, help: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, help, labels=["role"])
