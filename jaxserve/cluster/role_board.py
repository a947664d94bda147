"""Roles that members were changed to, as all conductors of a cluster agree on them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

from jaxserve.cluster.roles import Role


class AssignedRoles(NamedTuple):
    """Roles in place of members' own, by the members' names. version: of this agreement; 0: there
    was none yet."""

    roles: Mapping[str, Role] = MappingProxyType({})
    version: int = 0


class RoleBoard(Protocol):
    """Holds the roles on which conductors agree. Calls may come from any thread."""

    def read(self) -> AssignedRoles:
        """Returns the newest agreement that is known. Never waits."""

    def propose(self, roles: Mapping[str, Role], version: int) -> bool:
        """Replaces the agreement with this version; may wait. False if there is a newer one
        already, or it cannot be reached."""


class OwnRoles:
    """The board of a conductor that shares its decisions with no other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._agreed = AssignedRoles()

    def read(self) -> AssignedRoles:
        return self._agreed

    def propose(self, roles: Mapping[str, Role], version: int) -> bool:
        with self._lock:
            if version != self._agreed.version:
                return False
            self._agreed = AssignedRoles(MappingProxyType(dict(roles)), version + 1)
        return True
