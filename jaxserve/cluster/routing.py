"""Chooses the replica that prefills a request and the one that decodes it, from frozen views of
replicas: Algorithm 1 of Mooncake (section 4.1) and the baselines it is compared with (Fig. 5).

Replicas are known by their numbers. Times are predicted seconds from now, lengths are tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

BALANCING_THRESHOLD = 1.25  # best prefix over own prefix, above which the missing part is fetched
KV_BANDWIDTH = 1.0  # GB/s between live replicas, where nothing else was configured


class PrefillView(NamedTuple):
    """A replica that prefills, as routing sees it.

    prefix: tokens at the prompt's beginning whose KV it has. queue: seconds of prefill before a
    request that comes now. requests: those that were routed to it and have not ended.
    """

    member: int
    prefix: int
    queue: float
    requests: int


class DecodeView(NamedTuple):
    """A replica that decodes, as routing sees it.

    free: tokens for whose KV it has room. promised: tokens of requests that were routed to it and
    are not there yet. active: sequences that decode. tbt: predicted seconds per token with the
    request among them.
    """

    member: int
    free: int
    promised: int
    active: int
    tbt: float


class RoutingCosts(Protocol):
    """Predicts what routing compares."""

    def prefill(self, member: int, cached: int, total: int) -> float:
        """Seconds in which a replica computes tokens `cached` to before `total`."""

    def transfer(self, source: int, target: int, tokens: int) -> float:
        """Seconds until the KV of `tokens` tokens has come from one replica to another, if it were
        sent now."""


class Fetch(NamedTuple):
    """KV of a prompt's first tokens, `start` to before `stop`, that comes from another replica."""

    source: int
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start


class PrefillChoice(NamedTuple):
    """The replica that prefills a request. prefix: tokens that need no computing, what is fetched
    among them. transfer, prefill, ttft: predicted seconds of the fetch, of computing the rest, and
    to the first token."""

    member: int
    prefix: int
    transfer: float
    prefill: float
    ttft: float
    fetch: Fetch | None = None


class RoutingQuery(NamedTuple):
    """A request to be routed. views: of the replicas that prefill, at least one. total: tokens of
    its prompt. threshold: see BALANCING_THRESHOLD. draw: a random number from 0 to below 1, for
    those that choose by chance."""

    views: Sequence[PrefillView]
    total: int
    costs: RoutingCosts
    threshold: float = BALANCING_THRESHOLD
    draw: float = 0.0


# --- choosing the replica that prefills


def random(query: RoutingQuery) -> PrefillChoice:
    """Any replica, each as likely."""
    return _computed(query, query.views[int(query.draw * len(query.views))])


def load_balanced(query: RoutingQuery) -> PrefillChoice:
    """The replica with the fewest requests; of several, the one with the shortest queue."""
    return _computed(query, min(query.views, key=lambda view: (view.requests, view.queue)))


def local_cache_aware(query: RoutingQuery) -> PrefillChoice:
    """The replica with the least TTFT where each uses what it has cached itself (section 4.1)."""
    return _earliest([_computed(query, view) for view in query.views])


def cache_aware(query: RoutingQuery) -> PrefillChoice:
    """The replica with the least TTFT where a prefix that another has is fetched from there, if
    that prefix is long beside its own and fetching beats computing. What was fetched is cached: so
    hot prefixes come to be on many replicas (section 4.2)."""
    best = max(view.prefix for view in query.views)
    sources = [view.member for view in query.views if view.prefix == best]
    choices = []
    for view in query.views:
        choices.append(_computed(query, view))
        if best > query.threshold * view.prefix:
            choices.append(_fetched(query, view, best, sources))
    return _earliest(choices)


ROUTING: dict[str, Callable[[RoutingQuery], PrefillChoice]] = {
    "random": random,
    "load_balanced": load_balanced,
    "local_cache_aware": local_cache_aware,
    "cache_aware": cache_aware,
}


def _earliest(choices: Sequence[PrefillChoice]) -> PrefillChoice:
    return min(choices, key=lambda choice: choice.ttft)


def _computed(query: RoutingQuery, view: PrefillView) -> PrefillChoice:
    """A replica that computes all that it has not cached itself."""
    prefill = query.costs.prefill(view.member, view.prefix, query.total)
    return PrefillChoice(view.member, view.prefix, 0.0, prefill, view.queue + prefill)


def _fetched(
    query: RoutingQuery, view: PrefillView, best: int, sources: Sequence[int]
) -> PrefillChoice:
    """A replica that fetches what it lacks of the longest prefix, from where that is quickest."""
    costs = query.costs
    missing = best - view.prefix
    transfer, source = min(
        (costs.transfer(source, view.member, missing), source) for source in sources
    )
    prefill = costs.prefill(view.member, best, query.total)
    ttft = transfer + view.queue + prefill
    fetch = Fetch(source, view.prefix, best)
    return PrefillChoice(view.member, best, transfer, prefill, ttft, fetch)


# --- choosing the replica that decodes


def freeness(view: DecodeView) -> float:
    """Tokens of KV that are free, less those of transfers under way, per active sequence (Tetris,
    section 5.2)."""
    return (view.free - view.promised) / max(view.active, 1)


def choose_decode(views: Sequence[DecodeView], tokens: int, tpot: float) -> DecodeView | None:
    """The freest replica of those that have room for a sequence of `tokens` and would decode
    it within `tpot` seconds per token; where none would, the quickest that has room. None where
    none has room."""
    fitting = [view for view in views if view.free - view.promised >= tokens]
    in_time = [view for view in fitting if view.tbt <= tpot]
    if in_time:
        return max(in_time, key=freeness)
    return min(fitting, key=lambda view: view.tbt, default=None)
