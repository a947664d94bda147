"""The adapters of a cluster: loaded on all its replicas, and served by those that have them."""

from __future__ import annotations

from collections.abc import Mapping

from jaxserve.api.errors import RequestError
from jaxserve.cluster.member import Member
from jaxserve.cluster.member_table import MemberTable
from jaxserve.replica.adapters import Adapter, not_loaded


class ClusterAdapters:
    """Adapters of the members of a table; see `replica.adapters.Adapters`. A name that stands for
    different weights on some of them is served by those that agree with the first."""

    def __init__(self, table: MemberTable):
        self._table = table

    @property
    def by_name(self) -> Mapping[str, Adapter]:
        found: dict[str, Adapter] = {}
        for member in self._table.reachable:
            for adapter in member.replica.adapters.by_name.values():
                found.setdefault(adapter.name, adapter)
        return found

    def load(self, name: str, folder: str, in_place: bool = False) -> Adapter:
        """Has all members that can be asked load an adapter. One that only some have, as others
        have joined since, is loaded on all of them. Where a member refuses, those that had begun
        to serve it go back to what they had. Errors: RequestError, the first refusal."""
        members = self._table.reachable
        if not members:
            raise RequestError("", "no replica can be asked", "UNAVAILABLE")
        before = {member: member.replica.adapters.by_name.get(name) for member in members}
        in_place = in_place or not all(before.values())
        loaded: list[tuple[Member, Adapter]] = []
        try:
            for member in members:
                adapter = member.replica.adapters.load(name, folder, in_place)
                loaded.append((member, adapter))
                if adapter.identity != loaded[0][1].identity:
                    fault = f"the files of {folder[:200]!r} differ between replicas"
                    raise RequestError("lora_path", fault)
        except RequestError:
            for member, _ in loaded:
                _go_back(member, name, before[member])
            raise
        return loaded[0][1]

    def unload(self, name: str) -> None:
        members = self._table.reachable
        if name not in self.by_name:
            raise not_loaded(name)
        faults = []
        for member in members:
            try:
                member.replica.adapters.unload(name)
            except RequestError as error:
                if error.status != "NOT_FOUND":
                    faults.append(error)
        if faults:
            raise faults[0]


def _go_back(member: Member, name: str, before: Adapter | None) -> None:
    """Has a member serve what it had by a name before."""
    if before is None:
        member.ask(lambda replica: replica.adapters.unload(name))
        return
    folder = before.folder
    member.ask(lambda replica: replica.adapters.load(name, folder, in_place=True))
