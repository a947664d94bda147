"""Has members compute the prompts of requests that others decode: begins prefill jobs, follows them
to their end, and ends those that no request waits for."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Sequence

from jaxserve.api.events import Event, Finished, Token
from jaxserve.cluster.member import Member
from jaxserve.cluster.prefill_job import PrefillJob, job_for
from jaxserve.cluster.routed import RoutedRequest
from jaxserve.cluster.router import Placement

log = logging.getLogger(__name__)

DONE = ("length", "stop")  # reasons of ends after which all KV is there


class PrefillJobs:
    """The jobs of a dispatcher's requests. lock: under which these and members' work change; never
    held while a member is called. post: runs what may wait for a member on another thread."""

    def __init__(
        self,
        lock: threading.Lock,
        now: Callable[[], float],
        post: Callable[[Callable[[], object]], None],
    ):
        self._lock = lock
        self._now = now
        self._post = post

    def begin(self, routed: RoutedRequest, placement: Placement) -> None:
        """Has a member compute the request's prompt. One that refuses is not asked again for this
        request."""
        member = placement.prefill_on
        assert member is not None
        now = self._now()
        job = job_for(routed.request, member, placement.fetch)
        job.ready_at = now + placement.ttft
        with self._lock:
            routed.job = job
            member.work.begin_prefill(job.request.id, placement.prefill, now)
        refusal = member.submit(job.request, functools.partial(self._hear, job))
        with self._lock:
            if refusal is not None:
                self._fail(job)
            unwanted = routed.job is not job and not job.failed
        if unwanted:  # the request has ended meanwhile
            member.ask(lambda replica: replica.cancel(job.request.id))

    def end(self, routed: RoutedRequest) -> None:
        """Ends a request's job, as its KV is no longer waited for."""
        with self._lock:
            job = routed.job
            if job is None:
                return
            routed.job = None
            runs = not job.ended
            self._note_end(job)
        if runs:
            self._post(functools.partial(_cancel, job))

    def drop_failed(self, routed: RoutedRequest) -> None:
        """Ends a request's job whose KV will not come: another member may compute the prompt."""
        job = routed.job
        if job is not None and not job.useful:
            routed.spared.add(job.member)
            self.end(routed)

    def lost(self, member: Member, requests: Iterable[RoutedRequest]) -> None:
        """Notes that a member is lost, of these requests' jobs. The lock is held."""
        for routed in requests:
            if routed.job is not None and routed.job.member is member:
                self._fail(routed.job)

    def _hear(self, job: PrefillJob, events: Sequence[Event]) -> None:
        """Takes what a member says of a job."""
        with self._lock:
            for event in events:
                if isinstance(event, Token):
                    job.member.work.end_prefill(job.request.id, self._now())
                elif isinstance(event, Finished):
                    job.failed |= event.reason not in DONE
                    self._note_end(job)
                    job.member.learn(event)

    def _fail(self, job: PrefillJob) -> None:
        job.failed = True
        self._note_end(job)

    def _note_end(self, job: PrefillJob) -> None:
        job.ended = True
        job.member.work.end_prefill(job.request.id, self._now())


def _cancel(job: PrefillJob) -> None:
    job.member.ask(lambda replica: replica.cancel(job.request.id))
