"""The members of a conductor, which come and go while it serves."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence

from jaxserve.api.errors import RequestError
from jaxserve.cluster.member import Member
from jaxserve.cluster.merge import merged_info
from jaxserve.cluster.objectives import ClusterObjectives
from jaxserve.cluster.roles import Role
from jaxserve.replica.info import ReplicaInfo
from jaxserve.settings.schema import ConfigError

log = logging.getLogger(__name__)


class MemberTable:
    """Members, each with a number that no other has; those of members that left are used again.

    A member joins once it has said what it is, if it serves the same model as those that have
    joined. Calls may come from any thread; `all` never changes, there is a new one instead.

    Errors: ConfigError where members that can be asked do not serve the same model, or none can.
    """

    def __init__(self, members: Sequence[Member]):
        self._lock = threading.Lock()
        self.all: tuple[Member, ...] = ()
        self._set_info(_infos(members))
        for member in members:
            self.add(member)

    @property
    def numbers(self) -> int:
        """All members' numbers are below this."""
        return max((member.number for member in self.all), default=-1) + 1

    @property
    def reachable(self) -> list[Member]:
        """The members that have joined and can be asked."""
        return [member for member in self.all if member.joined and member.alive]

    def add(self, member: Member) -> None:
        """Gives a member the lowest number that is free, and has it join where it can."""
        with self._lock:
            taken = {other.number for other in self.all}
            member.number = next(n for n in range(len(taken) + 1) if n not in taken)
            self.all = (*self.all, member)
        self.join(member)

    def join(self, member: Member) -> None:
        """Has a member join if it has said what it is, and that fits."""
        infos = _infos([member])
        if not infos or member.joined:
            return
        with self._lock:
            joined = [other for other in self.all if other.joined and other is not member]
            try:
                self._set_info([*_infos(joined), *infos])
            except ConfigError as error:
                if member.fault != str(error):
                    log.error("replica %s is not used: %s", member.name, error)
                member.fault = str(error)
                return
            member.joined = True
            member.fault = ""
        if member.role is not Role.MIXED and not member.moves_kv:
            log.warning(
                "replica %s has the role %s and moves no KV, for which it needs --host_cache_gib",
                member.name,
                member.role.value,
            )

    def remove(self, member: Member) -> None:
        """Takes a member out; unknown ones are ignored."""
        with self._lock:
            self.all = tuple(other for other in self.all if other is not member)
            left = [other for other in self.all if other.joined]
            if left:
                with contextlib.suppress(ConfigError):  # their weights are just being replaced
                    self._set_info(_infos(left))

    def _set_info(self, infos: Sequence[ReplicaInfo]) -> None:
        """Merges the facts of the members. Errors: ConfigError."""
        self.info = merged_info(infos)
        self.objectives = ClusterObjectives(self.info)


def _infos(members: Sequence[Member]) -> list[ReplicaInfo]:
    """Returns the facts of the members that have reported them."""
    infos = []
    for member in members:
        try:
            infos.append(member.replica.info)
        except RequestError:
            continue
    return infos
