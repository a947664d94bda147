"""The weights of a cluster: changed on all its replicas at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

from jaxserve.api.errors import RequestError
from jaxserve.cluster.member import Member
from jaxserve.cluster.member_table import MemberTable
from jaxserve.replica.weights import (
    ASLEEP,
    PARTS,
    PAUSED,
    RUNNING,
    Mode,
    ReplicaWeights,
    WeightSource,
)
from jaxserve.scheduling.request_table import FIRST_VERSION


class ClusterWeights:
    """Weights of the members of a table; see `replica.weights.ReplicaWeights`. Each member
    exchanges its own when what it runs allows; meanwhile answers may be of either version, but none
    is of two. Where a member refuses, the others have changed all the same: the error says which.
    """

    def __init__(self, table: MemberTable):
        self._table = table

    @property
    def version(self) -> str:
        """The version of the first member."""
        members = self._table.reachable
        return members[0].replica.weights.version if members else FIRST_VERSION

    @property
    def state(self) -> str:
        """RUNNING where any member is."""
        states = {member.replica.weights.state for member in self._table.reachable}
        return next((one for one in (RUNNING, PAUSED, ASLEEP) if one in states), RUNNING)

    def pause(self, mode: Mode = "abort") -> None:
        self._on_all(lambda weights: weights.pause(mode))

    def resume(self) -> None:
        self._on_all(lambda weights: weights.resume())

    def update(
        self, source: WeightSource, version: str | None = None, mode: Mode = "finish"
    ) -> str:
        """Replaces the weights of all members, but for those that have the given version already
        where some do not. Errors: RequestError, a member's own."""
        has = [member.replica.weights.version for member in self._table.reachable]
        if version is None:
            version = str(1 + max((int(one) for one in has if one.isdecimal()), default=0))
        wanted = version if set(has) != {version} else None  # else all refuse

        def update(weights: ReplicaWeights) -> None:
            if weights.version != wanted:
                weights.update(source, version, mode)

        self._on_all(update)
        return version

    def sleep(self, level: int = 1, mode: Mode = "abort") -> None:
        self._on_all(lambda weights: weights.sleep(level, mode))

    def wake_up(self, parts: Collection[str] = PARTS) -> None:
        self._on_all(lambda weights: weights.wake_up(parts))

    def _on_all(self, change: Callable[[ReplicaWeights], None]) -> None:
        """Changes all members that can be asked, at the same time. Errors: RequestError, the first
        refusal."""
        members = self._table.reachable
        if not members:
            raise RequestError("", "no replica can be asked", "UNAVAILABLE")
        with ThreadPoolExecutor(len(members), "weights") as threads:
            errors = list(threads.map(functools.partial(_refusal, change), members))
        refused = {member.name: error for member, error in zip(members, errors) if error}
        if not refused:
            return
        name, error = next(iter(refused.items()))
        message = error.message
        if len(members) > 1:
            message = f"replica {name} ({len(refused)} of {len(members)} refused): {message}"
        raise RequestError(error.field, message, error.status)


def _refusal(change: Callable[[ReplicaWeights], None], member: Member) -> RequestError | None:
    try:
        change(member.replica.weights)
    except RequestError as error:
        return error
    return None
