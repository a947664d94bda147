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
        for member in self._members():
            for adapter in member.replica.adapters.by_name.values():
                found.setdefault(adapter.name, adapter)
        return found

    def load(self, name: str, folder: str, in_place: bool = False) -> Adapter:
        """Has all members that can be asked load an adapter; where one refuses, it is unloaded from
        those that had begun to serve it. Errors: RequestError, the first refusal."""
        members = self._members()
        if not members:
            raise RequestError("", "no replica can be asked", "UNAVAILABLE")
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
                member.ask(lambda replica: replica.adapters.unload(name))
            raise
        return loaded[0][1]

    def unload(self, name: str) -> None:
        having = [one for one in self._members() if name in one.replica.adapters.by_name]
        if not having:
            raise not_loaded(name)
        for member in having:
            member.replica.adapters.unload(name)

    def _members(self) -> list[Member]:
        return [member for member in self._table.all if member.joined and member.alive]
