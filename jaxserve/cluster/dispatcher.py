"""Sends requests to members, passes on what these say, and sends requests of members that fail
elsewhere.

A member that refuses a request, for its queue is full, is passed over for the next one. One that is
not alive any more, ends requests with UNAVAILABLE or cannot be reached has its requests taken from
it: another member begins them, or goes on with the tokens that there are. Those whose callers have
tokens move at most `migrations` times, all others at most MAX_LOSSES times, and to no member a
second time unless it was lost in between; then they end with UNAVAILABLE. What a lost member says
of them later is dropped. No member and no sink is called while the lock is held.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Sequence

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Event, Finished, Token
from jaxserve.api.request import UNKNOWN_MODEL, Request
from jaxserve.cluster.arrivals import ArrivalCheck
from jaxserve.cluster.counts import ENDED, LOST, ConductorCounts
from jaxserve.cluster.delivery import Delivery
from jaxserve.cluster.member import RETRY_SECONDS, Member
from jaxserve.cluster.prefill_jobs import PrefillJobs
from jaxserve.cluster.prefill_review import PrefillReview
from jaxserve.cluster.routed import RoutedRequest
from jaxserve.cluster.router import Placement, Router
from jaxserve.replica.protocol import Replica, Sink

log = logging.getLogger(__name__)

PASSED_ON = ("RESOURCE_EXHAUSTED", "UNAVAILABLE")  # refusals after which another member is asked
MAX_LOSSES = 8  # members that may fail a request: it may be what they fail of
MIGRATIONS = 3


class Dispatcher:
    """The requests of a conductor that have not ended. arrivals: refuses some before they are sent
    anywhere. post: runs what may wait for a member on another thread. migrations: most times that a
    request moves whose caller has tokens."""

    def __init__(
        self,
        router: Router,
        arrivals: ArrivalCheck,
        now: Callable[[], float],
        post: Callable[[Callable[[], object]], None],
        counts: ConductorCounts,
        migrations: int = MIGRATIONS,
    ):
        self._counts = counts
        self._migrations = migrations
        self._router = router
        self._arrivals = arrivals
        self._now = now
        self._post = post
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._live: dict[str, RoutedRequest] = {}
        self._delivery = Delivery(self._lock)
        self._jobs = PrefillJobs(self._lock, now, post, self._go_on)
        self._review = PrefillReview(self._jobs, router, self._lock, self._go_on)
        self._draining = self._closed = False

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def serves_on(self, member: Member) -> bool:
        """Returns whether a member has a request, or computes the prompt of one."""
        with self._lock:
            return any(
                routed.member is member or (routed.job is not None and routed.job.member is member)
                for routed in self._live.values()
            )

    # --- placing requests

    def submit(self, request: Request, sink: Sink) -> None:
        """Takes a request. Errors: RequestError, as of `Replica`."""
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
                forgotten = self._forget(routed)
            self._jobs.end(routed)
            if forgotten:
                raise

    def _place(self, routed: RoutedRequest) -> None:
        """Submits a request to the best member that takes it, after its prefill job, if it is to
        have one. Errors: RequestError where no member takes it: the first refusal."""
        refusal: RequestError | None = None
        prefixes = self._router.prefixes(routed.request)
        while routed.ending is None:
            self._jobs.drop_failed(routed)
            placement = self._choose(routed, prefixes)
            if placement is None:
                raise refusal or RequestError(
                    "", "no replica can take requests now", "UNAVAILABLE", RETRY_SECONDS
                )
            if placement.prefill_on is not None:
                if self._jobs.begin(routed, placement):
                    return
                continue
            error = self._send(routed, placement)
            if error is None:
                return
            # its adapter may have just been unloaded there
            if error.status not in PASSED_ON and error.reason != UNKNOWN_MODEL:
                raise error
            self._counts.count_refusal(error)
            if refusal is None or refusal.status == "UNAVAILABLE":
                refusal = error
        self._end_now(routed, *routed.ending)

    def _choose(self, routed: RoutedRequest, prefixes: Sequence[int]) -> Placement | None:
        """Places a request on a member that was not tried. Notes it as routed there, but
        for one whose prompt is to be computed elsewhere first. Errors: RequestError for one that is
        refused on arrival."""
        request = routed.request
        with self._lock:
            now = self._now()
            if routed.job is None:
                placement = self._router.place(request, prefixes, now, routed.tried, routed.spared)
            else:
                placement = self._decode_placement(routed, prefixes, now)
            if placement is not None and not routed.admitted:
                self._arrivals.check(request, placement, now)
                routed.admitted = True
            if placement is None or placement.prefill_on is not None:
                return placement
            member = placement.member
            routed.member = member
            if placement.prefill:
                member.work.begin_prefill(request.id, placement.prefill, now)
            tokens = len(request.prompt) + request.sampling.max_tokens
            member.work.expect_decode(request.id, tokens, now + placement.ttft)
        return placement

    def _decode_placement(
        self, routed: RoutedRequest, prefixes: Sequence[int], now: float
    ) -> Placement | None:
        """Places a request whose prompt is being computed elsewhere."""
        assert routed.job is not None
        member = self._router.place_decode(routed.request, prefixes, routed.tried)
        if member is None:
            return None
        ttft = max(routed.job.ready_at - now, 0.0)
        return Placement(member, None, routed.job.source, 0.0, ttft)

    def _send(self, routed: RoutedRequest, placement: Placement) -> RequestError | None:
        """Has the chosen member take a request. Returns why it does not."""
        member = placement.member
        attempt = routed.attempt  # changed by this thread alone, while the request is on its way
        request = routed.next_request()
        if placement.fetch is not None:
            request = dataclasses.replace(request, kv_source=placement.fetch)
        refusal = member.known_refusal(request, placement.prefill, self._now())
        if refusal is None:
            sink = functools.partial(self._hear, routed, attempt, member)
            refusal = member.submit(request, sink)
            if refusal is not None:
                member.note_refusal(request, placement.prefill, refusal, self._now())
        with self._lock:
            current = routed.attempt == attempt
            if refusal is None:
                routed.placed = routed.placed or current
                unwanted = routed.ending is not None or not current
                stops = sorted(routed.stops) if current else ()
            elif current:
                self._take_back(routed, member)
        if refusal is not None:
            return refusal
        if unwanted:
            member.ask(lambda replica: replica.cancel(request.id))
        for index in stops:  # what was asked for while no member had it
            member.ask(functools.partial(_stop, request.id, index))
        return None

    def _take_back(self, routed: RoutedRequest, member: Member) -> None:
        """Takes a request from a member. The lock is held."""
        self._end_work(routed)
        routed.take_back(member)

    # --- members that fail

    def lost(self, member: Member) -> None:
        """Takes the requests of a member that is lost from it."""
        error = RequestError("", f"the replica {member.name} was lost", "UNAVAILABLE")
        with self._lock:
            live = list(self._live.values())
            mine = [r for r in live if r.member is member and r.placed]
            for routed in mine:
                self._fail(routed, member)
        self._jobs.lost(member, live)
        for routed in mine:
            self._post(functools.partial(self._redo, routed, error, LOST))

    def returned(self, member: Member) -> None:
        """Has a member that was lost take requests again that it has failed."""
        with self._lock:
            for routed in self._live.values():
                routed.tried.discard(member)
                routed.spared.discard(member)

    def _fail(self, routed: RoutedRequest, member: Member) -> None:
        """Takes a request from a member that had taken it. The lock is held."""
        routed.losses += 1
        self._take_back(routed, member)

    def _movable(self, routed: RoutedRequest) -> bool:
        """Returns whether another member may take a request once more."""
        if routed.ending is not None or self._closed:
            return False
        held_by_caller = routed.begun and routed.request.streamed
        return routed.losses <= (self._migrations if held_by_caller else MAX_LOSSES)

    def _redo(self, routed: RoutedRequest, error: RequestError, cause: str) -> None:
        """Tries a request again that its member has failed with `error`, or ends it."""
        if self._movable(routed):
            self._counts.count_resent(cause, routed.begun)
            try:
                self._place(routed)
                return
            except RequestError as refusal:
                if refusal.status == "RESOURCE_EXHAUSTED":
                    error = refusal
            except Exception:
                log.exception("request %r could not be tried again", routed.request.id)
        reason, wanted = routed.ending or ("error", error)
        self._end_now(routed, reason, wanted)

    def review(self) -> None:
        """Decides again where prompts of requests are computed that would be late. To be called now
        and then, by one thread."""
        with self._lock:
            live = list(self._live.values())
        self._review.review(live, self._now())

    def _go_on(self, routed: RoutedRequest) -> None:
        """Places a request that waits for its prefill job no longer, or ends it."""
        deadline = routed.request.deadline
        if deadline is not None and deadline <= self._now():
            self._end_now(routed, "deadline", None)
            return
        error = RequestError("", "it could not be placed", "UNAVAILABLE")
        try:
            self._place(routed)
            return
        except RequestError as refusal:
            error = refusal
        except Exception:
            log.exception("request %r could not go on", routed.request.id)
        self._end_now(routed, "error", error)

    def _failure(
        self, routed: RoutedRequest, lost: bool, events: Sequence[Event]
    ) -> RequestError | None:
        """Returns the error for which a request is tried on another member."""
        if routed.ending is not None or self._closed:
            return None
        errors = [one.error for one in events if isinstance(one, Finished) and one.error]
        return next((one for one in errors if lost or one.status == "UNAVAILABLE"), None)

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
            if failure is not None:
                events = [one for one in events if not isinstance(one, Finished) or not one.error]
            self._note(routed, member, events)
            routed.outbox.append(routed.take(events, self._now()))
            if not routed.unfinished:
                self._forget(routed)
            decoding = routed.decoding
            if failure is not None:
                self._fail(routed, member)
        if decoding or not routed.unfinished:
            self._jobs.end(routed)
        self._delivery.deliver(routed)
        if failure is not None:  # a member's thread must not wait for another member
            cause = LOST if lost else ENDED
            self._post(functools.partial(self._redo, routed, failure, cause))

    def _note(self, routed: RoutedRequest, member: Member, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Token) and not routed.decoding:
                routed.decoding = True
                member.work.end_prefill(routed.request.id, self._now())
                member.work.begin_decode(routed.request.id, self._now())
            elif isinstance(event, Finished) and not routed.losses:  # else others took part
                member.learn(event)

    def _end_now(self, routed: RoutedRequest, reason: str, error: RequestError | None) -> bool:
        """Ends a request without its member. False where it has ended."""
        with self._lock:
            if not self._forget(routed):
                return False
            routed.attempt += 1
            routed.outbox.append(routed.end(reason, error, self._now()))
        self._jobs.end(routed)
        self._delivery.deliver(routed)
        return True

    def _forget(self, routed: RoutedRequest) -> bool:
        """Lets go of a request that has ended; False where that was done. The lock is held."""
        if self._live.get(routed.request.id) is not routed:
            return False
        del self._live[routed.request.id]
        self._end_work(routed)
        if not self._live:
            self._idle.notify_all()
        return True

    def _end_work(self, routed: RoutedRequest) -> None:
        if routed.member is not None:
            routed.member.work.end_prefill(routed.request.id, self._now())
            routed.member.work.end_decode(routed.request.id)

    # --- ends that are asked for

    def cancel(self, request_id: str, reason: str) -> bool:
        """Ends a request; as of `Replica`."""
        routed = self._live.get(request_id)
        if routed is None:
            return False
        if self._jobs.end(routed):
            return self._end_now(routed, reason, None)
        while True:
            with self._lock:
                if self._live.get(request_id) is not routed:
                    return False
                if not routed.placed:  # the thread that places it ends it
                    routed.ending = routed.ending or (reason, None)
                    return True
                member = routed.member
                attempt = routed.attempt
            assert member is not None
            if member.ask(lambda replica: replica.cancel(request_id, reason)):
                return True
            with self._lock:
                if routed.attempt == attempt:
                    break
        if member.alive:
            return False  # it has just ended: what its member said is on its way
        return self._end_now(routed, reason, None)

    def stop(self, request_id: str, index: int) -> bool:
        """Ends one completion; as of `Replica`."""
        with self._lock:
            routed = self._live.get(request_id)
            if routed is None or index not in routed.unfinished:
                return False
            routed.stops.add(index)
            member = routed.member if routed.placed else None
        if member is None:  # the one that takes it will be asked
            return True
        return bool(member.ask(functools.partial(_stop, request_id, index)))

    def drain(self) -> None:
        """Takes no new requests; members may take those of others."""
        self._draining = True

    def close(self, seconds: float) -> None:
        """Ends what runs with UNAVAILABLE. Members have so long to say what was used."""
        error = RequestError("", "the conductor was closed", "UNAVAILABLE")
        with self._lock:
            self._closed = True
            live = list(self._live.values())
            for routed in live:
                routed.ending = ("error", error)
        for routed in live:
            if self._jobs.end(routed):
                self._end_now(routed, "error", error)
            if routed.placed and routed.member is not None:
                self._post(functools.partial(_cancel, routed.member, routed.request.id))
        with self._lock:
            self._idle.wait_for(lambda: not self._live, seconds)
        for routed in live:
            self._end_now(routed, "error", error)


def _cancel(member: Member, request_id: str) -> None:
    member.ask(lambda replica: replica.cancel(request_id))


def _stop(request_id: str, index: int, replica: Replica) -> bool:
    return replica.stop(request_id, index)
