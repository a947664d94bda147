"""Has members of a live cluster change sides where one side is more loaded than the other
(Mooncake, section 5.1): `roles.RatioController` on what a conductor knows.

A role is what a conductor does with a replica, so a change is one of routing alone: what a member
has goes on, and the next request is placed by its new role. Each conductor decides for itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from jaxserve.cluster.member import Member
from jaxserve.cluster.member_table import MemberTable
from jaxserve.cluster.roles import RatioController, RatioLimits, Role

log = logging.getLogger(__name__)


class RoleChanges:
    """Changes roles of members that prefill or decode; mixed ones do both already."""

    def __init__(self, table: MemberTable, limits: RatioLimits | None = None):
        self._table = table
        self._controller = RatioController(limits or RatioLimits())

    def check(self, now: float) -> None:
        """Has members change sides where that is called for, the least loaded ones first."""
        prefill = self._loads(Role.PREFILL, lambda member: self._prefill_load(member, now))
        decode = self._loads(Role.DECODE, self._decode_load)
        count = self._controller.change(list(prefill.values()), list(decode.values()), now)
        givers, role = (prefill, Role.DECODE) if count > 0 else (decode, Role.PREFILL)
        for member in sorted(givers, key=givers.__getitem__)[: abs(count)]:
            log.warning("replica %s changes its role to %s", member.name, role.value)
            member.assigned = role

    def _loads(self, role: Role, load: Callable[[Member], float]) -> dict[Member, float]:
        members = [member for member in self._table.all if member.usable and member.moves_kv]
        return {member: load(member) for member in members if member.role is role}

    def _prefill_load(self, member: Member, now: float) -> float:
        """Its queue over the objective for the first token."""
        return member.queue(now) / self._table.objectives.of().ttft

    def _decode_load(self, member: Member) -> float:
        """Its seconds per token over the objective, or its share of slots, if that is more."""
        decodes = member.decodes
        if not decodes:
            return 0.0
        pace = member.decode_rate.seconds(decodes) / self._table.objectives.of().tpot
        return max(pace, decodes / member.replica.info.max_seqs)
