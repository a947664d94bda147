"""Routers of other systems, as baselines for a simulated cluster: SGLang's by cache and load,
DualMap's by two hashes, and one that sees load alone.

Unlike those of `jaxserve.cluster.routing` they fetch nothing, and see what replicas run and keep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple
from zlib import crc32

from jaxserve.cluster.routing import PrefillChoice, PrefillView, RoutingQuery

# SGLang's router, defaults of its command line
MATCHED_SHARE = 0.5  # of a prompt, above which the replica with that prefix is chosen
IMBALANCE = 32  # requests that the most loaded replica has more than the least loaded one
IMBALANCE_RATIO = 1.0001
SEEDS = (0, 0x9E3779B9)  # of DualMap's two hashes


class RouterQuery(NamedTuple):
    """A request to be routed. routing: what routing of a cluster sees. active: requests of each
    replica that have not ended. kept: tokens of KV that each has. name: key of the prompt's first
    tokens. ttft: objective for the first token, in seconds."""

    routing: RoutingQuery
    active: Sequence[int]
    kept: Sequence[int]
    name: bytes
    ttft: float


def sglang(query: RouterQuery) -> PrefillChoice:
    """Chooses the replica with the longest prefix if that is more than half of the prompt, else the
    one that keeps least; where loads differ much, the one with the fewest requests."""
    views = query.routing.views
    numbers = range(len(views))
    most, least = max(query.active), min(query.active)
    if most - least > IMBALANCE and most > IMBALANCE_RATIO * least:
        chosen = min(numbers, key=query.active.__getitem__)
    else:
        chosen = max(numbers, key=lambda n: (views[n].prefix, -query.active[n]))
        if views[chosen].prefix <= MATCHED_SHARE * query.routing.total:
            chosen = min(numbers, key=lambda n: (query.kept[n], query.active[n]))
    return _choice(query, views[chosen])


def dualmap(query: RouterQuery) -> PrefillChoice:
    """Chooses between the two replicas that two hashes of the prefix give: the one with more of it,
    unless it would miss the objective; then the one with the least time to the first token
    (DualMap, arXiv 2602.06502)."""
    views = query.routing.views
    places = dict.fromkeys(_mixed(crc32(query.name, seed)) % len(views) for seed in SEEDS)
    choices = [_choice(query, views[place]) for place in places]
    near = max(choices, key=lambda choice: (choice.prefix, -choice.ttft))
    if near.ttft <= query.ttft:
        return near
    return min(choices, key=lambda choice: choice.ttft)


def by_load(query: RouterQuery) -> PrefillChoice:
    """Chooses the replica with the least work; no cache is looked at."""
    views = query.routing.views
    active = dict(zip((view.member for view in views), query.active))
    return _choice(query, min(views, key=lambda view: (view.queue, active[view.member])))


ROUTERS: dict[str, Callable[[RouterQuery], PrefillChoice]] = {
    "sglang": sglang,
    "dualmap": dualmap,
    "by_load": by_load,
}


def _choice(query: RouterQuery, view: PrefillView) -> PrefillChoice:
    routing = query.routing
    prefill = routing.costs.prefill(view.member, view.prefix, routing.total)
    return PrefillChoice(view.member, view.prefix, 0.0, prefill, view.queue + prefill)


def _mixed(value: int) -> int:
    """Mixes the bits of a hash of 32: crc32 of similar texts differs in few of them."""
    value = (value ^ value >> 16) * 0x45D9F3B & 0xFFFFFFFF
    return value ^ value >> 16
