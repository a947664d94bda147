"""The clusters of Mooncake's evaluation, simulated: what nodes of given roles make of a workload.
Equal runs are simulated once.

Runs in which tokens are decoded take long, and are cut to the first requests of a trace: caches are
then not as full as after an hour.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from experiments.figures import Mechanism, Row, fewest
from experiments.mooncake.cache_replay import NODE_TOKENS
from experiments.mooncake.figure import MooncakeSettings
from experiments.mooncake.node import CHUNK, SYSTEM, TRANSFER_BYTES_PER_S
from experiments.virtual_cluster.cluster import ClusterReport, ClusterSpec, run
from jaxserve.cluster.roles import Role
from jaxserve.lab.simulate.arrival import BLOCK
from jaxserve.settings.schema import CacheConfig, SchedulerConfig

FETCHES = "prompts with blocks that were fetched"
HANDED_ON = "prompts whose KV went to where they are decoded"
REFUSED = "requests that were refused"


def fetching(**where: str) -> Mechanism:
    """The mechanism of a figure with a cache that nodes share, in the rows that have one."""
    return Mechanism(FETCHES, fewest("fetches", **where))


NODES = 16
TTFT = 30.0  # seconds, the objective of 7.1
DECODE_CHUNK = 512  # tokens of a step of vLLM 0.5.1 with chunked prefill
DECODED_REQUESTS = 400  # of a run in which tokens are decoded

UNCACHED = CacheConfig(block_size=BLOCK, prefix_caching=False)


def chunks_of(tokens: int) -> SchedulerConfig:
    """Settings of a node whose prefill steps have this many tokens."""
    return SchedulerConfig(max_seqs=256, max_queue=10**6, chunk_tokens=tokens)


SPEC = ClusterSpec(
    SYSTEM,
    roles=(Role.PREFILL,),
    ttft=TTFT,
    cache=CacheConfig(block_size=BLOCK),
    cache_tokens=NODE_TOKENS,
    bytes_per_s=TRANSFER_BYTES_PER_S,
    scheduler=chunks_of(CHUNK),
)


def prefill_only(nodes: int, **changes: Any) -> ClusterSpec:
    """Nodes that prefill, of a cluster whose decoding is not looked at."""
    return replace(SPEC, roles=(Role.PREFILL,) * nodes, **changes)


def disaggregated(prefill: int = 8, decode: int = 8, **changes: Any) -> ClusterSpec:
    """Mooncake: nodes that prefill, with a cache of host memory each, and nodes that decode."""
    roles = (Role.PREFILL,) * prefill + (Role.DECODE,) * decode
    return replace(SPEC, roles=roles, **changes)


def coupled(**changes: Any) -> ClusterSpec:
    """vLLM: nodes that do both, and cache no more than fits on their devices."""
    kept: dict[str, Any] = dict(routing="load_balanced", cache_tokens=None, cache=UNCACHED)
    return replace(SPEC, roles=(Role.MIXED,) * NODES, **(kept | changes))


# vLLM 0.5.1 could not cache prefixes and prefill in chunks at once (7.1)
SYSTEMS: dict[str, ClusterSpec] = {
    "mooncake": disaggregated(),
    "vllm": coupled(),
    "vllm, prefix caching": coupled(cache=SPEC.cache),
    "vllm, chunked prefill": coupled(scheduler=chunks_of(DECODE_CHUNK)),
}


def simulated(
    spec: ClusterSpec,
    workload: str,
    settings: MooncakeSettings,
    speed: float = 1.0,
    most: int | None = None,
) -> ClusterReport:
    """Simulates a cluster with the first `most` requests of a workload, replayed at `speed` times
    its recorded rate."""
    system = replace(spec.system, noise=settings.step_noise)
    drawn = replace(spec, system=system, seed=settings.seed)
    return _simulated(drawn, workload, settings, speed, most)


@functools.cache
def _simulated(
    spec: ClusterSpec,
    workload: str,
    settings: MooncakeSettings,
    speed: float,
    most: int | None,
) -> ClusterReport:
    return run(spec, settings.arrivals(workload, speed)[:most])


def at_work(report: ClusterReport) -> Row:
    """Columns that count what a cluster did: prompts with fetched blocks, prompts whose KV went to
    where they are decoded, requests that were refused."""
    return {
        "fetches": sum(record.fetched > 0 for record in report.records),
        "handed_on": sum(record.transferred > 0 for record in report.records),
        "turned_away": sum(report.refused.values()),
    }


def gpu_seconds(report: ClusterReport) -> float:
    """Mean seconds of a node's devices per prefilled request, of nodes that only prefill."""
    return sum(report.busy) / max(sum(record.first > 0 for record in report.records), 1)
