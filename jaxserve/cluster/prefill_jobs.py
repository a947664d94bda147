"""Has members compute the prompts of requests that others decode: begins prefill jobs, follows them
to their end, and ends those that no request waits for.

A request waits for the first blocks of its job before it is sent to the member that decodes it, so
that it takes neither a slot nor pages there before it can use them.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Sequence

from jaxserve.api.events import Event, Finished, Progress, Token
from jaxserve.cluster.member import Member
from jaxserve.cluster.prefill_job import PrefillJob, job_for
from jaxserve.cluster.routed import RoutedRequest
from jaxserve.cluster.router import Placement

log = logging.getLogger(__name__)

BEGUN = (Progress, Token, Finished)  # events of a job after which its request waits no longer
DONE = ("length", "stop")  # reasons of ends after which all KV is there


class PrefillJobs:
    """The jobs of a dispatcher's requests. lock: under which these and members' work change; never
    held while a member is called. post: runs what may wait for a member on another thread. go_on:
    sends a request on that waits for no job any more."""

    def __init__(
        self,
        lock: threading.Lock,
        now: Callable[[], float],
        post: Callable[[Callable[[], object]], None],
        go_on: Callable[[RoutedRequest], None],
    ):
        self._lock = lock
        self._now = now
        self._post = post
        self._go_on = go_on

    def begin(self, routed: RoutedRequest, placement: Placement) -> bool:
        """Has a member compute the request's prompt. One that refuses is not asked again for this
        request. Returns whether the request waits for the job, or has gone on already."""
        request = routed.request
        job = job_for(request, placement)
        member = job.member
        now = self._now()
        job.ready_at = now + placement.ttft
        job.prefill = placement.prefill
        tokens = len(request.prompt) + request.sampling.max_tokens
        with self._lock:
            job.expected_on.work.expect_decode(request.id, tokens, job.ready_at, sent=False)
            routed.job = routed.waits_for = job
            member.work.begin_prefill(job.request.id, placement.prefill, now)
        refusal = member.submit(job.request, functools.partial(self._hear, routed, job))
        with self._lock:
            if refusal is not None:
                self._fail(job)
            unwanted = routed.job is not job and not job.failed
        if unwanted:  # the request has ended meanwhile
            member.ask(lambda replica: replica.cancel(job.request.id))
        return refusal is None or not self.claim(routed, job)

    def claim(self, routed: RoutedRequest, job: PrefillJob | None) -> bool:
        """Ends a request's wait for this job. Returns whether it waited: then it is for the caller
        to send it on, or to end it."""
        with self._lock:
            return job is not None and self._stop_waiting(routed, job)

    @staticmethod
    def _stop_waiting(routed: RoutedRequest, job: PrefillJob) -> bool:
        """Ends a request's wait for a job. False where it does not wait. The lock is held."""
        if routed.waits_for is not job:
            return False
        routed.waits_for = None
        job.expected_on.work.end_decode(routed.request.id)
        return True

    def end(self, routed: RoutedRequest) -> bool:
        """Ends a request's job, as its KV is no longer waited for. Returns whether the request
        waited for it; see `claim`."""
        with self._lock:
            job = routed.job
            if job is None:
                return False
            waited = self._stop_waiting(routed, job)
            routed.job = None
            runs = not job.ended
            self._note_end(job)
        if runs:
            self._post(functools.partial(_cancel, job))
        return waited

    def drop_failed(self, routed: RoutedRequest) -> None:
        """Ends a request's job whose KV will not come: another member may compute the prompt."""
        job = routed.job
        if job is not None and not job.useful:
            routed.spared.add(job.member)
            self.end(routed)

    def lost(self, member: Member, requests: Iterable[RoutedRequest]) -> None:
        """Notes that a member is lost, of these requests' jobs, and sends those on that wait."""
        with self._lock:
            mine = [(routed, routed.job) for routed in requests if routed.job is not None]
            mine = [(routed, job) for routed, job in mine if job.member is member]
            for _, job in mine:
                self._fail(job)
        for routed, job in mine:
            self._post(functools.partial(self._wake, routed, job))

    def _wake(self, routed: RoutedRequest, job: PrefillJob) -> None:
        """Sends a request on that waits for this job."""
        if self.claim(routed, job):
            self._go_on(routed)

    def _hear(self, routed: RoutedRequest, job: PrefillJob, events: Sequence[Event]) -> None:
        """Takes what a member says of a job of a request."""
        with self._lock:
            wake = not job.begun and any(isinstance(event, BEGUN) for event in events)
            job.begun |= wake
            for event in events:
                if isinstance(event, Token):
                    job.member.work.end_prefill(job.request.id, self._now())
                elif isinstance(event, Finished):
                    job.failed |= event.reason not in DONE
                    self._note_end(job)
                    job.member.learn(event)
        if wake:  # a member's thread must not wait for another member
            self._post(functools.partial(self._wake, routed, job))

    def _fail(self, job: PrefillJob) -> None:
        job.failed = True
        self._note_end(job)

    def _note_end(self, job: PrefillJob) -> None:
        job.ended = True
        job.member.work.end_prefill(job.request.id, self._now())


def _cancel(job: PrefillJob) -> None:
    job.member.ask(lambda replica: replica.cancel(job.request.id))
