"""Has members of a live cluster change sides where one side is more loaded than the other
(Mooncake, section 5.1): `roles.RatioController` on what a conductor knows.

A role is what conductors do with a replica, so a change is one of routing alone: what a member has
goes on, and the next request is placed by its new role. Conductors agree by a `RoleBoard`: of
several that see the same imbalance one changes a role, and all wait before the next change.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping

from jaxserve.cluster.member import Member
from jaxserve.cluster.member_table import MemberTable
from jaxserve.cluster.role_board import RoleBoard
from jaxserve.cluster.role_loads import RoleLoads
from jaxserve.cluster.roles import RatioController, RatioLimits, Role

log = logging.getLogger(__name__)


class RoleChanges:
    """Gives members the roles of a board, and proposes changes for those that prefill or decode;
    mixed ones do both already. post: runs what may wait on another thread."""

    def __init__(
        self,
        table: MemberTable,
        board: RoleBoard,
        post: Callable[[Callable[[], object]], None],
        limits: RatioLimits | None = None,
    ):
        self._table = table
        self._board = board
        self._post = post
        self._controller = RatioController(limits or RatioLimits())
        self._load = RoleLoads(table)
        self._version = 0

    def follow(self, now: float) -> None:
        """Gives members the roles on which conductors agree. A change by any of them begins the
        time in which nothing changes."""
        agreed = self._board.read()
        if agreed.version != self._version:
            self._version = agreed.version
            self._controller.changed(now)
        for member in self._table.all:
            role = agreed.roles.get(member.name)
            if role is not member.assigned:
                log.warning("replica %s has the role %s now", member.name, _name(role))
                member.assigned = role

    def check(self, now: float) -> None:
        """Proposes that members change sides where that is called for, the least loaded ones
        first."""
        prefill = self._loads(Role.PREFILL, lambda member: self._load.prefill(member, now))
        decode = self._loads(Role.DECODE, self._load.decode)
        count = self._controller.change(list(prefill.values()), list(decode.values()), now)
        if not count:
            return
        givers, role = (prefill, Role.DECODE) if count > 0 else (decode, Role.PREFILL)
        chosen = sorted(givers, key=givers.__getitem__)[: abs(count)]
        roles = {m.name: m.assigned for m in self._table.all if m.assigned is not None}
        roles.update((member.name, role) for member in chosen)
        self._post(functools.partial(self._propose, roles, self._version))
        self.follow(now)

    def _propose(self, roles: Mapping[str, Role], version: int) -> None:
        if not self._board.propose(roles, version):
            log.info("roles stay as they are: another conductor has changed them")

    def _loads(self, role: Role, load: Callable[[Member], float]) -> dict[Member, float]:
        members = [member for member in self._table.all if member.usable and member.moves_kv]
        return {member: load(member) for member in members if member.role is role}


def _name(role: Role | None) -> str:
    """Returns the name of an assigned role; None: a replica has its own."""
    return "of its own" if role is None else role.value
