"""The conductor: a `Replica` made of replicas, so that every caller of one works through it.

A `Router` chooses who serves a request and who computes its prompt, a `Dispatcher` sends it there
and passes on its events. Members come and go while the conductor serves: one that is taken
out goes on with the requests that it has until they end or it is lost. Nothing is waited for
without a bound.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry

from jaxserve.api.request import Request
from jaxserve.cache.block_events import BlockEvents
from jaxserve.clock import Clock, WallClock
from jaxserve.cluster.adapters import ClusterAdapters
from jaxserve.cluster.arrivals import ArrivalCheck
from jaxserve.cluster.counts import ConductorCounts
from jaxserve.cluster.dispatcher import MIGRATIONS, Dispatcher
from jaxserve.cluster.kv_pool import ClusterKvPool
from jaxserve.cluster.member import Member
from jaxserve.cluster.member_table import MemberTable
from jaxserve.cluster.merge import member_view, merged_load, merged_view
from jaxserve.cluster.merged_metrics import MergedMetrics
from jaxserve.cluster.role_board import OwnRoles, RoleBoard
from jaxserve.cluster.role_changes import RoleChanges
from jaxserve.cluster.role_loads import RoleSignals
from jaxserve.cluster.router import Router
from jaxserve.cluster.routing import KV_BANDWIDTH
from jaxserve.cluster.weights import ClusterWeights
from jaxserve.replica.info import ReplicaInfo
from jaxserve.replica.kv_pool import KvPool
from jaxserve.replica.protocol import Sink
from jaxserve.scheduling import Load

log = logging.getLogger(__name__)

CHECK_SECONDS = 0.25  # between looks at whether members are alive
CLOSE_SECONDS = 5.0  # that members are given to end what runs, at the close
THREADS = 64  # that wait for members' answers


@dataclasses.dataclass(frozen=True, slots=True)
class ConductorSettings:
    """Settings of a conductor. routing, kv_bandwidth: see `Router`. overload: see `ArrivalCheck`.
    change_roles: whether it proposes `RoleChanges`. migrations: see `Dispatcher`."""

    routing: str = "local_cache_aware"
    kv_bandwidth: float = KV_BANDWIDTH
    overload: str = "none"
    change_roles: bool = False
    migrations: int = MIGRATIONS


class Conductor:
    """Routes requests to `members` and passes their events through; see `Replica` and the module.

    All members must serve the same model and tell time by `clock`; those that cannot be asked yet
    join when they can. roles: which others share; None: no other conductor has these members.
    threaded: has threads of its own, from `start` on, for posted commands,
    retries and checks; without them commands run at once and `check` is to be called. owns_members:
    whether they are started and closed with it. Errors: ConfigError for members that cannot serve
    together, or where none can be asked.
    """

    def __init__(
        self,
        members: Sequence[Member],
        settings: ConductorSettings = ConductorSettings(),
        *,
        roles: RoleBoard | None = None,
        clock: Clock | None = None,
        threaded: bool = True,
        owns_members: bool = False,
    ):
        self.table = MemberTable(members)
        self._clock = clock or WallClock()
        self.router = Router(self.table, settings.routing, settings.kv_bandwidth)
        for member in members:
            self.router.cached.follow(member)
        self.metrics_registry = CollectorRegistry(auto_describe=False)
        self.metrics_registry.register(MergedMetrics(lambda: self.members))
        self.metrics_registry.register(RoleSignals(self.table, self.now))
        self.adapters = ClusterAdapters(self.table)
        self.weights = ClusterWeights(self.table)
        self._dispatcher = Dispatcher(
            self.router,
            ArrivalCheck(self.table, settings.overload),
            self.now,
            self.post,
            ConductorCounts(self.metrics_registry),
            settings.migrations,
        )
        self._role_changes = RoleChanges(self.table, roles or OwnRoles(), self.post)
        self._changes_roles = settings.change_roles
        self._owns = owns_members
        self._threaded = threaded
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._closing = threading.Event()
        self.block_events = BlockEvents()

    # --- what it is

    @property
    def info(self) -> ReplicaInfo:
        """The merged facts of all members that have joined."""
        return self.table.info

    @property
    def members(self) -> tuple[Member, ...]:
        """The members, also those that leave."""
        return self.table.all

    @property
    def requests(self) -> int:
        """Requests that have not ended."""
        return len(self._dispatcher)

    @property
    def alive(self) -> bool:
        """Always: members that are lost may come back."""
        return True

    @property
    def available(self) -> bool:
        """True while any member can take requests."""
        return any(member.usable for member in self.members)

    @property
    def kv_pool(self) -> KvPool:
        """The cached blocks of its members."""
        return ClusterKvPool(self.router, self.now)

    def now(self) -> float:
        return self._clock.now()

    def start(self) -> None:
        if self._owns:
            for member in self.members:
                member.replica.start()
        if self._threaded:
            self._pool = concurrent.futures.ThreadPoolExecutor(THREADS, "conductor")
            threading.Thread(target=self._keep_checking, name="conductor", daemon=True).start()

    # --- threads

    def post(self, command: Callable[[], object]) -> None:
        """Runs a command on one of several threads, for it may wait for a member's answer; at once
        where there are none."""
        pool = self._pool
        if pool is not None:
            try:
                pool.submit(_logged, command)
                return
            except RuntimeError:  # it was closed
                pass
        command()

    def _keep_checking(self) -> None:
        while not self._closing.wait(CHECK_SECONDS):
            _logged(self.check)

    def check(self) -> None:
        """Looks which members have come to life, are lost, or have ended the last request before
        they leave, and which requests wait too long for their prompts."""
        for member in self.members:
            if member.replica.alive:
                if member.lost:
                    self._dispatcher.returned(member)
                member.suspect = member.lost = False
                if not member.joined:
                    self.table.join(member)
            elif not member.lost:
                self._lose(member)
            if member.leaving and not self._dispatcher.serves_on(member):
                self._let_go(member)
        self._dispatcher.review()
        self._role_changes.follow(self.now())
        if self._changes_roles:
            self._role_changes.check(self.now())

    def _lose(self, member: Member) -> None:
        if member.joined:
            log.warning("replica %s is lost", member.name)
        member.lost = True
        self.router.cached.forget(member)
        self._dispatcher.lost(member)

    # --- members that come and go

    def add(self, member: Member) -> None:
        """Takes a member in. One that cannot be asked yet, or serves another model, gets no
        requests until that has changed."""
        self.table.add(member)
        self.router.cached.follow(member)

    def remove(self, member: Member) -> None:
        """Takes a member out: it gets no new requests, and is closed once it has none."""
        member.leaving = True

    def _let_go(self, member: Member) -> None:
        self.table.remove(member)
        self.router.cached.unfollow(member)
        self.post(lambda: member.ask(lambda replica: replica.close()))

    # --- requests

    def submit(self, request: Request, sink: Sink) -> None:
        self._dispatcher.submit(request, sink)

    def cancel(self, request_id: str, reason: str = "cancelled") -> bool:
        return self._dispatcher.cancel(request_id, reason)

    def stop(self, request_id: str, index: int) -> bool:
        return self._dispatcher.stop(request_id, index)

    # --- questions

    def load(self) -> Load:
        """Returns the sum of the members' loads, as they were reported last."""
        loads = [member.load() for member in self.members if member.joined]
        return merged_load(load for load in loads if load is not None)

    def overdue(self) -> float | None:
        """Seconds by which all members' steps are overdue; None where one goes on."""
        delays = [member.ask(lambda replica: replica.overdue()) for member in self.members]
        known = [delay for delay in delays if delay is not None]
        if len(known) < len(delays):
            return None
        return min(known, default=None)

    def view(self, since: int = 0) -> dict[str, Any]:
        members = self.members
        shown = self.table.reachable
        views = {member: member.ask(lambda replica: replica.view()) for member in shown}
        cached = self.router.cached
        rows = [member_view(one, cached.blocks(one), views.get(one)) for one in members]
        return merged_view(self.info, rows, [view for view in views.values() if view])

    def count_rejected(self, reason: str) -> None:
        """Counted by a member, as the metrics are theirs."""
        for member in self.members:
            if member.alive:
                member.ask(lambda replica: replica.count_rejected(reason))
                return

    def flush_cache(self) -> int:
        alive = [member for member in self.members if member.alive]
        return sum(m.ask(lambda replica: replica.flush_cache()) or 0 for m in alive)

    # --- the end

    def drain(self) -> None:
        """Takes no new requests; members may take those of others."""
        self._dispatcher.drain()

    def close(self) -> None:
        """Ends what runs with UNAVAILABLE. Members have CLOSE_SECONDS to say what was used. Those
        that it does not own go on, but for those that were taken out."""
        if self._closing.is_set():
            return
        self._dispatcher.close(CLOSE_SECONDS if self._threaded else 0.0)
        self._closing.set()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        for member in self.members:
            if self._owns or member.leaving:
                member.ask(lambda replica: replica.close())


def _logged(command: Callable[[], object]) -> None:
    try:
        command()
    except Exception:
        log.exception("a command of the conductor failed")
