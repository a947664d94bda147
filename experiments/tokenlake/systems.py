"""The systems of TokenLake's evaluation, simulated: Llama-2-7B on instances of two A100, as one
replica whose lanes are a pool of KV, and as clusters of replicas behind a router or with roles.

All run the same scheduler and cache, and steps take what the same coefficients say. Equal runs are
simulated once. The first third of the requests warms caches up and is not counted.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from experiments.tokenlake.figure import WORKLOADS, TokenLakeSettings
from experiments.virtual_cluster.admission import tbt
from experiments.virtual_cluster.cluster import ClusterRecord, ClusterSpec, VirtualCluster
from jaxserve.api.request import Slo
from jaxserve.cluster.roles import Role
from jaxserve.costs.predictor import Predictor
from jaxserve.lab.simulate.lane_reads import LaneReads, variation
from jaxserve.lab.simulate.run import System, shape_of
from jaxserve.settings.schema import CacheConfig, MeshConfig, SchedulerConfig

SHAPE = shape_of("llama2-7b")  # LWM-1M-Text is one
INSTANCE = System(SHAPE, "a100", MeshConfig(tp=2))
INSTANCES = 4  # of one server
BLOCK = 128  # tokens
SEGMENT = 512  # tokens; the paper's rule gives 568 for its GPUs (4.2)
CHUNK = 2048  # tokens of a prefill step of an instance
NVLINK = 400e9  # bytes per second between instances of a server (7, Experimental Setup)
STRETCH = 10.0  # the objectives are this many times the seconds of a request alone
MARGIN = 0.9  # of the objective, to which chunks are adapted
ATTAINED = 0.9  # share of requests in time at the P90 goodput
WINDOW = 10.0  # seconds in which accesses are counted
WARM_UP = 1 / 3  # of the arrivals

POOL = "pool"  # with which the names of pools begin
HASHED = f"{POOL}, hashed"
STRIPED = f"{POOL}, striped"
DEFAULT_CHUNKS = "router, chunks of 8192"  # SGLang's default on GPUs of 80 GB
ROUTER = "router, chunks of 2048"
SMALL_CHUNKS = "router, chunks of 512"
ADAPTIVE = "router, adaptive"
LEAST_TTFT = "least TTFT, adaptive"
TWO_HASHES = "two hashes, adaptive"
BY_LOAD = "by load, adaptive"
P1D3 = "1P3D"
P3D1 = "3P1D"


def alone() -> Predictor:
    """Predicts times of a request alone on one instance."""
    return predictor_of(1)


@functools.cache
def predictor_of(lanes: int) -> Predictor:
    """Predicts times of a replica with this many instances as lanes."""
    cache = CacheConfig(block_size=BLOCK, pages=2)
    system = replace(INSTANCE, mesh=MeshConfig(kvp=lanes, tp=INSTANCE.mesh.tp))
    return system.replica(SchedulerConfig(chunk_tokens=CHUNK), cache).scheduler.predictor


@functools.cache
def objectives(prompt: int) -> Slo:
    """Returns 10 times the seconds of a prompt, and of each token behind it, alone (section 7,
    Metrics)."""
    return Slo(
        STRETCH * alone().prefill(0, prompt, CHUNK),
        STRETCH * tbt(alone(), 1, prompt),
    )


def adapted(prompt: int) -> Slo:
    """Returns what schedulers are given: objectives with a margin."""
    slo = objectives(prompt)
    return Slo(slo.ttft, MARGIN * slo.tpot if slo.tpot else None)


# --- what is simulated


def scheduler(chunking: str = "adaptive", chunk: int = CHUNK) -> SchedulerConfig:
    return SchedulerConfig(
        max_seqs=256, max_queue=10**6, chunk_tokens=chunk, chunking=chunking, step_time=0.5
    )


BASE = ClusterSpec(
    INSTANCE,
    (Role.MIXED,),
    CacheConfig(block_size=BLOCK),
    scheduler(),
    slo=adapted,
    cache_tokens=None,
    bytes_per_s=NVLINK,
)


def pool(placement: str, instances: int = INSTANCES, **cache: Any) -> ClusterSpec:
    """One replica of as many lanes as instances, whose KV is one pool. cache: its settings."""
    mesh = MeshConfig(kvp=instances, tp=INSTANCE.mesh.tp)
    settings = replace(BASE.cache, placement=placement, **cache)
    return replace(BASE, system=replace(INSTANCE, mesh=mesh), cache=settings)


def hashed(
    segment: int = SEGMENT, instances: int = INSTANCES, group: int | None = None
) -> ClusterSpec:
    """The pool as TokenLake has it: segments by hash, and copies of hot prefixes. group: lanes over
    which a prompt is spread; default: those of a node."""
    return pool("hashed", instances, segment_tokens=segment, prefix_copies=True, pool_lanes=group)


def striped(instances: int = INSTANCES) -> ClusterSpec:
    return pool("striped", instances, lane_tokens=2 * BLOCK)


def routed(routing: str, instances: int = INSTANCES, chunk: int | None = None) -> ClusterSpec:
    """Replicas behind a router. chunk: of fixed tokens; None: adaptive."""
    settings = scheduler("static", chunk) if chunk else scheduler()
    return replace(BASE, roles=(Role.MIXED,) * instances, routing=routing, scheduler=settings)


def split(prefill: int, decode: int) -> ClusterSpec:
    """Replicas that prefill, with SGLang's router, and replicas that decode; all cache prefixes.
    No decodes run where prompts are prefilled, so chunks have a fixed number of tokens."""
    roles = (Role.PREFILL,) * prefill + (Role.DECODE,) * decode
    return replace(
        BASE,
        roles=roles,
        routing="sglang",
        scheduler=scheduler("static"),
        decode_caching=True,
    )


SYSTEMS: dict[str, ClusterSpec] = {
    HASHED: hashed(),
    STRIPED: striped(),
    DEFAULT_CHUNKS: routed("sglang", chunk=8192),
    ROUTER: routed("sglang", chunk=CHUNK),
    SMALL_CHUNKS: routed("sglang", chunk=512),
    ADAPTIVE: routed("sglang"),
    LEAST_TTFT: routed("local_cache_aware"),
    TWO_HASHES: routed("dualmap"),
    BY_LOAD: routed("by_load"),
    P1D3: split(1, 3),
    P3D1: split(3, 1),
}


# --- what comes out


@dataclass(frozen=True)
class Result:
    """Results of a run, of the requests after the warm-up. in_time: share that met both objectives;
    ended: share that ended. hit: share of their prompts' tokens that was cached. input_s: mean
    seconds to the first token per token of the prompt; output_s: mean seconds per output token;
    gap_s: 90th percentile of a request's longest gap. accesses: of each instance by window [n,
    instances]. spread: share of steps in which sequences lie on several lanes. copies:
    pages that were copied."""

    in_time: float
    ended: float
    hit: float
    input_s: float
    output_s: float
    gap_s: float
    accesses: np.ndarray
    spread: float
    copies: int

    @property
    def variation(self) -> np.ndarray:
        """Coefficients of variation over the instances, of each window in which KV was read."""
        return variation(self.accesses)


def simulated(
    spec: ClusterSpec,
    workload: str,
    qps: float,
    settings: TokenLakeSettings,
    tokens: int | None = None,
    zipf: float | None = None,
) -> Result:
    """Simulates a system under a workload. tokens: of KV of each instance; default: what fits.
    zipf: see TokenLakeSettings.arrivals."""
    return _simulated(spec, workload, qps, settings, tokens, zipf)


@functools.cache
def _simulated(
    spec: ClusterSpec,
    workload: str,
    qps: float,
    settings: TokenLakeSettings,
    tokens: int | None,
    zipf: float | None,
) -> Result:
    lanes = spec.system.mesh.kvp
    if tokens is not None:
        spec = replace(spec, cache_tokens=tokens * lanes, decode_tokens=tokens)
    cluster = VirtualCluster(replace(spec, name_tokens=WORKLOADS[workload].name_tokens))
    listeners = [LaneReads(lanes, BLOCK, WINDOW) for _ in cluster.nodes]
    for node, reads in zip(cluster.nodes, listeners):
        node.replica.listeners.append(reads)
    arrivals = settings.arrivals(workload, qps, zipf)
    last = arrivals[-1].time
    report = cluster.run(arrivals, last + WORKLOADS[workload].drain)
    first = arrivals[int(WARM_UP * len(arrivals))].time
    records = [record for record in report.records if record.arrival >= first]
    steps = sum(one.steps for one in listeners)
    spread = sum(one.spread for one in listeners) / max(steps, 1)
    copies = sum(one.moves for one in listeners)
    accesses = np.concatenate([one.between(first, last) for one in listeners], axis=1)
    return _result(records, accesses, spread, copies)


def _result(
    records: Sequence[ClusterRecord], accesses: np.ndarray, spread: float, copies: int
) -> Result:
    begun = [record for record in records if record.first]
    served = [record for record in begun if record.reason == "length"]
    several = [record for record in served if record.output > 1]
    mean = lambda values: float(np.mean(values)) if len(values) else float("nan")
    asked = sum(record.prompt for record in begun)
    return Result(
        in_time=sum(map(in_time, served)) / len(records),
        ended=len(served) / len(records),
        hit=sum(record.cached for record in begun) / asked if asked else 0.0,
        input_s=mean([record.ttft / record.prompt for record in begun]),
        output_s=mean([(r.end - r.first) / (r.output - 1) for r in several]),
        gap_s=float(np.percentile([r.longest_gap for r in several] or [np.nan], 90)),
        accesses=accesses,
        spread=spread,
        copies=copies,
    )


def check_pooled(results: Iterable[Result], settings: TokenLakeSettings, copies: bool) -> None:
    """Checks that a pool was one: sequences lay on several lanes, and in whole runs hot prefixes
    were copied where `copies` says so. Errors: AssertionError."""
    found = list(results)
    assert all(result.spread > 0 for result in found), "no sequence lay on several lanes"
    copied = copies and settings.requests is None
    assert not copied or any(result.copies for result in found), "nothing was copied"


def in_time(record: ClusterRecord) -> bool:
    """Returns whether a request's first token and every later one met the objective."""
    slo = objectives(record.prompt)
    assert slo.ttft and slo.tpot
    return record.ttft <= slo.ttft and record.longest_gap <= slo.tpot
