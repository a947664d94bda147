"""The conductor: a `Replica` made of replicas, so that every caller of one works through it.

A request goes to the member that should have its first token soonest (`routing`), from what each
has cached (`directory`, fed by the members' block events) and what was routed to it. A member that
refuses it, for its queue is full, is passed over for the next one.

Members fail: one that is not alive any more, ends requests with UNAVAILABLE or cannot be reached
has its requests taken from it. Those of which the caller has heard no token are tried on another
member, each at most once on each; the others end with UNAVAILABLE. What a lost member says of them
later is dropped. Nothing is waited for without a bound, and no member and no sink is called while
the lock is held.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Event, Finished, Token
from jaxserve.api.request import Request
from jaxserve.cache.block_events import BlockEvents
from jaxserve.clock import Clock, WallClock
from jaxserve.cluster.member import Member
from jaxserve.cluster.merge import MergedMetrics, merged_info, merged_load, merged_view
from jaxserve.cluster.routed import RoutedRequest
from jaxserve.cluster.router import Router
from jaxserve.replica.protocol import Sink
from jaxserve.scheduling import Load
from jaxserve.settings.schema import ConfigError

log = logging.getLogger(__name__)

CHECK_SECONDS = 0.25  # between looks at whether members are alive
CLOSE_SECONDS = 5.0  # that members are given to end what runs, at the close
PASSED_ON = ("RESOURCE_EXHAUSTED", "UNAVAILABLE")  # refusals after which another member is asked


class Conductor:
    """Routes requests to `members` and passes their events through; see `Replica` and the module.

    All members must serve the same model and tell time by `clock`. routing: see `Router`. threaded:
    has a thread of its own, from `start` on, for posted commands, retries and checks; without one
    commands run at once and `check` is to be called. owns_members: whether they are started and
    closed with it. Errors: ConfigError for members that cannot serve together.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        routing: str = "local_cache_aware",
        clock: Clock | None = None,
        threaded: bool = True,
        owns_members: bool = False,
    ):
        if not members:
            raise ConfigError("replicas", "there are none")
        self.members = list(members)
        self.info = merged_info([member.replica.info for member in members])
        self.block_events = BlockEvents()
        self._router = Router(self.members, self.info, routing)
        self._clock = WallClock() if clock is None else clock
        self._owns = owns_members
        self._lock = threading.Lock()
        self._live: dict[str, RoutedRequest] = {}
        self._draining = self._closed = False
        self._idle = threading.Condition(self._lock)
        self._commands: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="conductor", daemon=True)
        self._threaded = threaded
        self.metrics_registry = CollectorRegistry()
        self.metrics_registry.register(MergedMetrics(lambda: self.members))

    # --- what it is

    @property
    def alive(self) -> bool:
        """Always: members that are lost may come back."""
        return True

    @property
    def available(self) -> bool:
        """Whether any member can take requests."""
        return any(member.usable for member in self.members)

    def now(self) -> float:
        return self._clock.now()

    def start(self) -> None:
        if self._owns:
            for member in self.members:
                member.replica.start()
        if self._threaded:
            self._thread.start()

    # --- the thread

    def post(self, command: Callable[[], object]) -> None:
        if self._threaded and self._thread.is_alive():
            self._commands.put(command)
        else:
            command()

    def _run(self) -> None:
        due = self.now()
        while True:
            command: Callable[[], object] | None = self.check
            if (left := due - self.now()) > 0:
                try:
                    command = self._commands.get(timeout=left)
                except queue.Empty:
                    continue
            else:
                due = self.now() + CHECK_SECONDS
            if command is None:
                return
            try:
                command()
            except Exception:
                log.exception("a command of the conductor failed")

    def check(self) -> None:
        """Looks which members are alive, and takes their requests from those that are not."""
        for number, member in enumerate(self.members):
            if member.replica.alive:
                member.suspect = member.lost = False
            elif not member.lost:
                log.warning("replica %s is lost", member.name)
                member.lost = True
                self._router.forget(number)
                with self._lock:
                    mine = [(r, r.attempt) for r in self._live.values() if r.member == number]
                for routed, attempt in mine:
                    self._failed(routed, attempt, _lost(member))

    # --- requests

    def submit(self, request: Request, sink: Sink) -> None:
        routed = RoutedRequest(request, sink)
        with self._lock:
            if self._draining or self._closed:
                raise RequestError("", "the conductor takes no requests", "UNAVAILABLE")
            if request.id in self._live:
                raise RequestError("request_id", f"{request.id!r} is in use", "ALREADY_EXISTS")
            self._live[request.id] = routed
        try:
            self._place(routed)
        except BaseException:
            with self._lock:
                self._forget(routed)
            raise

    def _place(self, routed: RoutedRequest) -> None:
        """Submits a request to the best member that takes it. Errors: RequestError where none
        does: the first refusal."""
        refusal: RequestError | None = None
        prefixes = self._router.prefixes(routed.request)
        while True:
            number = self._choose(routed, prefixes)
            if number is None:
                raise refusal or RequestError(
                    "", "no replica can take requests now", "UNAVAILABLE", retry_after=1.0
                )
            member = self.members[number]
            with self._lock:
                attempt = routed.attempt
            try:
                member.replica.submit(
                    routed.request, functools.partial(self._hear, routed, attempt, member)
                )
            except RequestError as error:
                self._withdraw(routed, attempt, number)
                if error.status not in PASSED_ON:
                    raise
                refusal = refusal or error
            except Exception as error:
                log.warning("replica %s cannot be reached: %s", member.name, error)
                member.suspect = True
                self._withdraw(routed, attempt, number)
            else:
                self._end_if_wanted(routed, attempt, member)
                return

    def _withdraw(self, routed: RoutedRequest, attempt: int, number: int) -> None:
        """Takes a request back from a member that did not take it."""
        with self._lock:
            routed.tried.add(number)
            if routed.attempt == attempt:
                routed.attempt += 1
                routed.member = None
            self.members[number].work.end_prefill(routed.request.id, self.now())

    def _end_if_wanted(self, routed: RoutedRequest, attempt: int, member: Member) -> None:
        """Ends a request that was to end while it was on its way to a member."""
        with self._lock:
            wanted = routed.ending is not None and routed.attempt == attempt
        if wanted:
            member.ask(lambda replica: replica.cancel(routed.request.id))

    def _choose(self, routed: RoutedRequest, prefixes: Sequence[int]) -> int | None:
        """The member that should have the request's first token soonest, of those that were not
        tried, and notes the request as routed there; None where there is none."""
        usable = self._router.usable(routed.tried)
        if not usable:
            return None
        request = routed.request
        now = self.now()
        with self._lock:
            held = Counter(other.member for other in self._live.values())
            choice = self._router.choose(len(request.prompt), prefixes, usable, held, now)
            self.members[choice.member].work.begin_prefill(request.id, choice.prefill, now)
            routed.member = choice.member
        return choice.member

    # --- events

    def _hear(
        self, routed: RoutedRequest, attempt: int, member: Member, events: Sequence[Event]
    ) -> None:
        """Takes what a member says of one try of a request."""
        lost = not member.replica.alive
        with self._lock:
            if routed.attempt != attempt:
                return
            failure = self._failure(routed, lost, events)
            if failure is None:
                self._note(routed, member, events)
                routed.outbox.append(routed.take(events, self.now()))
                if not routed.unfinished:
                    self._forget(routed)
        if failure is not None:
            self._post_failed(routed, attempt, failure)
            return
        self._deliver(routed)

    def _failure(
        self, routed: RoutedRequest, lost: bool, events: Sequence[Event]
    ) -> RequestError | None:
        """Why it can be tried anew: its member failed it before the caller got anything."""
        if routed.ending is not None or not routed.sent_nothing or self._closed:
            return None
        for event in events:
            if isinstance(event, Token):
                return None
            if isinstance(event, Finished) and event.error is not None:
                return event.error if lost or event.error.status == "UNAVAILABLE" else None
        return None

    def _note(self, routed: RoutedRequest, member: Member, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Token) and not routed.tokens:
                member.work.end_prefill(routed.request.id, self.now())
            elif isinstance(event, Finished):
                member.learn(event)

    def _post_failed(self, routed: RoutedRequest, attempt: int, error: RequestError) -> None:
        """A member's thread must not wait for another member: the conductor's own goes on."""
        self.post(lambda: self._failed(routed, attempt, error))

    def _failed(self, routed: RoutedRequest, attempt: int, error: RequestError) -> None:
        """Tries a request anew that its member has failed, or ends it."""
        with self._lock:
            if routed.attempt != attempt or routed.member is None:
                return
            number = routed.member
            again = routed.sent_nothing and routed.ending is None and not self._closed
        self._withdraw(routed, attempt, number)
        if again:
            try:
                self._place(routed)
                return
            except RequestError as refusal:
                error = refusal if refusal.status == "RESOURCE_EXHAUSTED" else error
        reason, wanted = routed.ending or ("error", error)
        self._end_now(routed, reason, wanted)

    def _end_now(self, routed: RoutedRequest, reason: str, error: RequestError | None) -> bool:
        """Ends a request without its member. False where it has ended."""
        with self._lock:
            if self._live.get(routed.request.id) is not routed:
                return False
            routed.attempt += 1
            routed.outbox.append(routed.end(reason, error, self.now()))
            self._forget(routed)
        self._deliver(routed)
        return True

    def _forget(self, routed: RoutedRequest) -> None:
        """Lets go of a request that has ended. The lock is held."""
        if self._live.get(routed.request.id) is routed:
            del self._live[routed.request.id]
        if routed.member is not None:
            self.members[routed.member].work.end_prefill(routed.request.id, self.now())
        if not self._live:
            self._idle.notify_all()

    def _deliver(self, routed: RoutedRequest) -> None:
        """Hands its caller what is to be heard, unless another thread is at it, or a call of this
        one further up."""
        while True:
            with self._lock:
                if routed.delivering or not routed.outbox:
                    return
                events = routed.outbox.popleft()
                if routed.silent or not events:
                    continue
                routed.delivering = True
            try:
                routed.sink(events)
            except Exception:
                log.exception("the sink of request %r failed", routed.request.id)
                self._silence(routed)
            finally:
                with self._lock:
                    routed.delivering = False

    def _silence(self, routed: RoutedRequest) -> None:
        """A sink that raised hears no more, and its request is cancelled."""
        with self._lock:
            routed.silent = True
            routed.ending = ("cancelled", None)
            member = routed.member
        if member is not None:
            self.members[member].ask(lambda replica: replica.cancel(routed.request.id))

    # --- ends that are asked for

    def cancel(self, request_id: str, reason: str = "cancelled") -> bool:
        with self._lock:
            routed = self._live.get(request_id)
            if routed is None:
                return False
            member = None if routed.member is None else self.members[routed.member]
            if member is None:
                routed.ending = (reason, None)
        if member is not None and member.ask(lambda replica: replica.cancel(request_id, reason)):
            return True
        if member is not None and member.alive:
            return False  # it has just ended: what its member said is on its way
        return self._end_now(routed, reason, None)

    def stop(self, request_id: str, index: int) -> bool:
        with self._lock:
            routed = self._live.get(request_id)
            if routed is None or routed.member is None or index not in routed.unfinished:
                return False
            member = self.members[routed.member]
        return bool(member.ask(lambda replica: replica.stop(request_id, index)))

    def drain(self) -> None:
        """Takes no new requests; members may take those of others."""
        with self._lock:
            self._draining = True

    def close(self) -> None:
        """Ends what runs with UNAVAILABLE. Members have CLOSE_SECONDS to say what was used."""
        error = RequestError("", "the conductor was closed", "UNAVAILABLE")
        with self._lock:
            if self._closed:
                return
            self._closed = True
            live = list(self._live.values())
            for routed in live:
                routed.ending = ("error", error)
        for routed in live:
            if routed.member is not None:
                member = self.members[routed.member]
                member.ask(functools.partial(_cancel, routed.request.id))
        with self._lock:
            self._idle.wait_for(lambda: not self._live, CLOSE_SECONDS if self._threaded else 0)
        for routed in live:
            self._end_now(routed, "error", error)
        if self._threaded and self._thread.is_alive():
            self._commands.put(None)
            if threading.current_thread() is not self._thread:
                self._thread.join(CLOSE_SECONDS)
        if self._owns:
            for member in self.members:
                member.ask(lambda replica: replica.close())

    # --- questions

    def load(self) -> Load:
        """The sum of the members' that answer."""
        loads = [member.ask(lambda replica: replica.load()) for member in self.members]
        return merged_load(load for load in loads if load is not None)

    def overdue(self) -> float | None:
        """Seconds by which all members' steps are overdue; None where one goes on."""
        delays = [member.ask(lambda replica: replica.overdue()) for member in self.members]
        known = [delay for delay in delays if delay is not None]
        return min(known) if len(known) == len(delays) else None

    def view(self, since: int = 0) -> dict[str, Any]:
        views = [member.ask(lambda replica: replica.view()) for member in self.members]
        return merged_view(self.info, self.members, [view for view in views if view])

    def count_rejected(self, reason: str) -> None:
        """Counted by a member, as the metrics are theirs."""
        for member in self.members:
            if member.alive:
                member.ask(lambda replica: replica.count_rejected(reason))
                return

    def flush_cache(self) -> int:
        return sum(m.ask(lambda replica: replica.flush_cache()) or 0 for m in self.members)


def _cancel(request_id: str, replica: Any) -> None:
    replica.cancel(request_id)


def _lost(member: Member) -> RequestError:
    return RequestError("", f"the replica {member.name} was lost", "UNAVAILABLE")
