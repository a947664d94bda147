"""Decides again where prompts are computed that wait behind others for too long."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import NamedTuple

from jaxserve.cluster.member import Member
from jaxserve.cluster.prefill_job import PrefillJob
from jaxserve.cluster.prefill_jobs import PrefillJobs
from jaxserve.cluster.routed import RoutedRequest
from jaxserve.cluster.router import Router

MAX_REVIEWED = 32  # requests at one time, those that would be latest


class LatePrompt(NamedTuple):
    """A request that waits for a job which, as predicted, ends `seconds` from now, and `late`
    seconds after the request is due."""

    late: float
    seconds: float
    routed: RoutedRequest
    job: PrefillJob


class PrefillReview:
    """Moves prompts whose first tokens would be late where they wait, if they would be earlier
    elsewhere: to another member that prefills, or to one that decodes and computes them itself.
    Each request is moved once at most. lock: of `jobs`. go_on: places a request again."""

    def __init__(
        self,
        jobs: PrefillJobs,
        router: Router,
        lock: threading.Lock,
        go_on: Callable[[RoutedRequest], None],
    ):
        self._jobs = jobs
        self._router = router
        self._lock = lock
        self._go_on = go_on

    def review(self, requests: Iterable[RoutedRequest], now: float) -> None:
        """Looks at these requests at clock second `now`."""
        with self._lock:
            late = sorted(self._late(requests, now), key=attrgetter("late"), reverse=True)
        for prompt in late[:MAX_REVIEWED]:
            self._move(prompt, now)

    def _late(self, requests: Iterable[RoutedRequest], now: float) -> Iterable[LatePrompt]:
        """Yields requests that would be late. The lock is held."""
        ends: dict[Member, dict[str, float]] = {}
        for routed in requests:
            job = routed.waits_for
            if job is None or job.begun or routed.reviewed:
                continue
            if job.member not in ends:
                ends[job.member] = job.member.work.prefill_ends(now)
            seconds = ends[job.member].get(job.request.id, 0.0)
            late = now + seconds - self._due(routed, job.prefill)
            if late > 0:
                yield LatePrompt(late, seconds, routed, job)

    def _due(self, routed: RoutedRequest, prefill: float) -> float:
        """Returns the clock second at which the first token of a request should come. prefill:
        seconds that its prompt takes alone."""
        request = routed.request
        objectives = self._router.table.objectives.of(request.slo.class_name)
        return request.arrival + objectives.ttft_of(request, prefill)

    def _move(self, prompt: LatePrompt, now: float) -> None:
        routed = prompt.routed
        prefixes = self._router.prefixes(routed.request)
        without = {*routed.spared, prompt.job.member}
        with self._lock:
            other = self._router.place(routed.request, prefixes, now, routed.tried, without)
        if other is None or other.ttft >= prompt.seconds:
            return
        if self._jobs.claim(routed, prompt.job):
            routed.reviewed = True
            routed.spared.add(prompt.job.member)
            self._jobs.end(routed)
            self._go_on(routed)
