"""Routes each request to the replica with the least to do, without regard to caches and roles. It
is a replica itself, so servers work over it as over one.

A replica that is lost has its requests redone elsewhere where no token was passed on; the others
end with UNAVAILABLE. One that is overloaded is passed over while another has room.
"""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Accepted, Event, Finished, Timing, Token, Usage
from jaxserve.api.request import Request
from jaxserve.cache.block_events import BlockEvents
from jaxserve.observe.metrics import PREFIX
from jaxserve.replica.info import ReplicaInfo
from jaxserve.replica.protocol import Sink
from jaxserve.scheduling import Load
from jaxserve.server.members import Members
from jaxserve.server.remote_replica import RemoteReplica

log = logging.getLogger(__name__)
THREADS = 64  # calls that wait for replicas' answers
PASSED_OVER = ("UNAVAILABLE", "RESOURCE_EXHAUSTED")  # refusals after which another replica is asked


class Route:
    """A request on its way: the replica that has it, None while one is looked for, and what its
    sink was told. Its lock is never held while anything is waited for."""

    def __init__(self, request: Request, sink: Sink):
        self.request = request
        self.sink = sink
        self.member: RemoteReplica | None = None
        self.accepted = False
        self.had_token = False
        self.unfinished = request.sampling.n
        self.cancelled: str | None = None  # the reason


class Balancer:
    """See the module. Implements `Replica` over members, of which one has answered at least."""

    def __init__(self, members: Members):
        self._members = members
        members.on_change = self._close_removed
        self._info = members.wait_for_one().info
        self._routes: dict[str, Route] = {}
        self._lock = threading.Lock()
        self._draining = False
        self._closed = False
        self._threads = concurrent.futures.ThreadPoolExecutor(THREADS, "balancer")
        self.block_events = BlockEvents()
        self._metrics = CollectorRegistry(auto_describe=False)
        self._metrics.register(_MembersMetrics(members))

    # --- what it is

    @property
    def info(self) -> ReplicaInfo:
        """That of the first replica that answered."""
        return self._info

    @property
    def alive(self) -> bool:
        return not self._closed

    @property
    def available(self) -> bool:
        """Whether a replica can take requests."""
        return bool(self._members.serving())

    def start(self) -> None:
        """Does nothing: the replicas run."""

    def now(self) -> float:
        return time.monotonic()

    # --- requests

    def submit(self, request: Request, sink: Sink) -> None:
        route = Route(request, sink)
        with self._lock:
            if self._draining or self._closed:
                raise RequestError("", "the cluster takes no requests", "UNAVAILABLE")
            if request.id in self._routes:
                raise RequestError("request_id", f"{request.id!r} is in use", "ALREADY_EXISTS")
            self._routes[request.id] = route
        try:
            self._place(route)
        except BaseException:
            self._forget(route)
            raise

    def _place(self, route: Route) -> None:
        """Hands a request to the least loaded replica that takes it. Errors: RequestError, the last
        refusal."""
        refusal = RequestError("", "no replica can take requests just now", "UNAVAILABLE")
        for member in sorted(self._members.serving(), key=self._busy):
            if route.cancelled is not None:
                raise RequestError("", "the request was cancelled", "CANCELLED")
            route.member = member
            try:
                member.submit(route.request, functools.partial(self._hear, route, member))
                break
            except RequestError as error:
                refusal = error
                if error.status not in PASSED_OVER:
                    raise
        else:
            raise refusal
        if route.cancelled is not None:  # meanwhile
            member.cancel(route.request.id, route.cancelled)

    def _busy(self, member: RemoteReplica) -> tuple[float, int]:
        """How much a replica has to do: seconds of prefill that wait there, then requests of ours,
        for what it last told of itself is a little old."""
        load = member.recent_load
        ours = sum(route.member is member for route in list(self._routes.values()))
        return (0.0 if load is None else load.queued_prefill_seconds), ours

    def _hear(self, route: Route, member: RemoteReplica, events: Sequence[Event]) -> None:
        """Passes events on, on the thread of the replica that has the request."""
        if route.member is not member:
            return
        if not route.had_token and any(_lost(event) for event in events) and not self._closed:
            route.member = None
            self._threads.submit(self._redo, route)
            return
        told = [event for event in events if not (route.accepted and isinstance(event, Accepted))]
        route.accepted = True
        route.had_token |= any(isinstance(event, Token) for event in events)
        route.unfinished -= sum(isinstance(event, Finished) for event in events)
        if not route.unfinished:
            self._forget(route)
        try:
            route.sink(told)
        except BaseException:  # it hears no more: the member cancels the request
            self._forget(route)
            raise

    def _redo(self, route: Route) -> None:
        """Places a request anew whose replica was lost before it had passed on a token."""
        try:
            self._place(route)
            log.warning("request %r begins anew on another replica", route.request.id)
        except RequestError as error:
            self._fail(route, error)
        except Exception:
            log.exception("a request could not begin anew")
            self._fail(route, RequestError("", "its replica was lost", "UNAVAILABLE"))

    def _fail(self, route: Route, error: RequestError) -> None:
        self._forget(route)
        total = self.now() - route.request.arrival
        timing = Timing(queued=total, first_token=total, total=total)
        usage = Usage(prompt=len(route.request.prompt), cached=0, completion=0)
        reason, why = ("error", error) if route.cancelled is None else (route.cancelled, None)
        completions = range(route.request.sampling.n)
        try:
            route.sink([Finished(index, reason, usage, timing, error=why) for index in completions])
        except Exception:
            log.exception("the sink of request %r failed", route.request.id)

    def _forget(self, route: Route) -> None:
        with self._lock:
            if self._routes.get(route.request.id) is route:
                del self._routes[route.request.id]

    def cancel(self, request_id: str, reason: str = "cancelled") -> bool:
        route = self._routes.get(request_id)
        if route is None:
            return False
        route.cancelled = reason
        member = route.member
        return True if member is None else member.cancel(request_id, reason)

    def stop(self, request_id: str, index: int) -> bool:
        route = self._routes.get(request_id)
        member = None if route is None else route.member
        return False if member is None else member.stop(request_id, index)

    def post(self, command: Callable[[], object]) -> None:
        """Runs a command on one of several threads, for it may wait for a replica's answer; at once
        where this was closed."""
        try:
            self._threads.submit(command)
        except RuntimeError:
            command()

    # --- questions

    def load(self) -> Load:
        """The sum of what the replicas told last."""
        loads = [load for member in self._members.serving() if (load := member.recent_load)]
        names = Load.__dataclass_fields__
        return Load(**{name: sum(getattr(load, name) for load in loads) for name in names})

    def overdue(self) -> float | None:
        """None: a replica with a step that hangs is one of several."""
        return None

    def view(self, since: int = 0) -> dict[str, Any]:
        """That of the first replica which can be asked, and what there is of all."""
        serving = self._members.serving()
        if not serving:
            raise RequestError("", "no replica can be asked just now", "UNAVAILABLE")
        return {**serving[0].view(since), "replicas": list(map(_row, self._members.all))}

    def count_rejected(self, reason: str) -> None:
        for member in self._members.serving()[:1]:
            member.count_rejected(reason)

    @property
    def metrics_registry(self) -> CollectorRegistry:
        """The metrics of all replicas, with the label `replica`."""
        return self._metrics

    def flush_cache(self) -> int:
        return sum(member.flush_cache() for member in self._members.serving())

    # --- the end

    def drain(self) -> None:
        self._draining = True

    def close(self) -> None:
        """Ends what runs with UNAVAILABLE; the replicas themselves go on."""
        self._closed = True
        self._members.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for route in list(self._routes.values()):
            self._fail(route, RequestError("", "the cluster was closed", "UNAVAILABLE"))

    def _close_removed(self, left: list[RemoteReplica], removed: list[RemoteReplica]) -> None:
        """Ends the sessions with replicas that are no longer members, once their requests have
        ended."""
        for member in removed:
            member.drain()
            self._threads.submit(self._close_when_idle, member)

    def _close_when_idle(self, member: RemoteReplica) -> None:
        while any(route.member is member for route in list(self._routes.values())):
            time.sleep(0.1)
        member.close()


class _MembersMetrics(Collector):
    """The metrics of all replicas under their names, with the label `replica`."""

    def __init__(self, members: Members):
        self._members = members

    def collect(self) -> Iterable[Metric]:
        alive = GaugeMetricFamily(f"{PREFIX}replica_alive", "1: it answers", labels=["replica"])
        merged: dict[str, Metric] = {}
        for member in self._members.all:
            alive.add_metric([member.target], float(member.alive))
            for metric in member.metrics_registry.collect() if member.alive else ():
                whole = merged.setdefault(
                    metric.name, Metric(metric.name, metric.documentation, metric.type)
                )
                for name, labels, value, *_ in metric.samples:
                    whole.add_sample(name, {**labels, "replica": member.target}, value)
        return [alive, *merged.values()]


def _lost(event: Event) -> bool:
    if not isinstance(event, Finished) or event.error is None:
        return False
    return event.error.status == "UNAVAILABLE"


def _row(member: RemoteReplica) -> dict[str, Any]:
    """What is shown of a replica."""
    load = member.recent_load
    return {
        "address": member.target,
        "alive": member.alive,
        "fault": "" if member.alive else member.fault,
        "role": member.info.role if member.alive else "",
        "running": load.running if load else 0,
        "waiting": load.waiting if load else 0,
    }
