"""Puts a simulated system together from a model's shape, a kind of device and a mesh, drives
requests through it, and sums up what came of them.

Lanes, their placements, exchanges and plans are those of an engine. Links between lanes are those
of the device's table (`costs/profiles.json`): inside a node for groups of lanes that fit one with
their ranks, the adapters between nodes for larger ones.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.api.errors import RequestError
from jaxserve.api.request import Request, Slo
from jaxserve.checkpoint.model import ModelConfig, layers_of, split
from jaxserve.checkpoint.page_groups import ONE_GROUP, Windows, page_windows, pool_count, pool_page
from jaxserve.checkpoint.state_pages import state_pages
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.clock import VirtualClock
from jaxserve.costs.coefficients import Costs
from jaxserve.costs.ffn_lanes import ffn_seconds
from jaxserve.costs.heads import heads_of
from jaxserve.costs.profiles import costs, devices
from jaxserve.lab.quotients import quotient
from jaxserve.lab.simulate.arrival import Arrival, kind_of, to_request
from jaxserve.lab.simulate.guesses import Guesses
from jaxserve.lab.simulate.noise import NO_NOISE, Noise
from jaxserve.lab.simulate.recorder import Outcome, Recorder, RequestRecord, span_of
from jaxserve.lab.simulate.replica import SOME_RIGHT, UnwatchedReplica, VirtualReplica
from jaxserve.lab.simulate.tiers import TierSizes, VirtualTiers
from jaxserve.lanes.groups import group_sizes
from jaxserve.lanes.rates import LaneLinks, Link
from jaxserve.lanes.work import ITEM, Heads
from jaxserve.scheduling.assembly import (
    CachedModel,
    ReplicaProfile,
    ReplicaSizes,
    assemble,
)
from jaxserve.settings.schema import (
    CacheConfig,
    ConfigError,
    MeshConfig,
    SchedulerConfig,
    check_lanes,
)
from jaxserve.settings.schema.cache import memory_share

NODE_DEVICES = 8  # of a node, unless said otherwise
MEMORY_SHARE = 0.9  # of a device's memory, for weights and KV
UNLIMITED = 2**31 - 1  # tokens of a sequence, but for the pages
PLANNED_TOKENS = 2**19  # of the longest prompt that plans' latencies are fitted to
# bytes per second between a device and host memory, a node's 128 GB/s over its eight devices
# (Mooncake, Table 1); and of a node's disk
HOST_LINK = 16e9
DISK = 3e9
PERCENTILES = (50, 90, 99)


def shape_of(name: str) -> ModelConfig:
    """Returns a model of the zoo; punctuation does not count: llama-3-8b is llama3-8b. Errors:
    ConfigError."""
    plain = lambda text: re.sub(r"[-_. ]", "", text.lower())
    for measured, config in MODELS.items():
        if plain(measured) == plain(name):
            return config
    raise ConfigError("model", f"{name!r} is not one of {', '.join(MODELS)}")


@dataclass(frozen=True)
class System:
    """A simulated system: a model's shape on `mesh` of `device`s. A replica has no limit on a
    sequence but its pages. memory: share of a device's that weights and KV may fill. kv_gib: memory
    for KV per device, where it is given. kv_cache_dtype: see CacheConfig. node_devices: that one
    node has; all ranks of a lane are in one. expert_parallel: lanes share experts out;
    ffn_over_lanes: MLPs too.
    layer_groups: programs that run one after the other in each step, each with a launch.
    guesses: the proposed tokens, where the scheduler checks some."""

    shape: ModelConfig
    device: str
    mesh: MeshConfig
    memory: float = MEMORY_SHARE
    kv_gib: float | None = None
    kv_cache_dtype: str = "auto"
    node_devices: int = NODE_DEVICES
    expert_parallel: bool = False
    ffn_over_lanes: bool = False
    noise: Noise = NO_NOISE
    layer_groups: int = 1
    guesses: Guesses = SOME_RIGHT

    def with_cache(self, cache: CacheConfig) -> System:
        """The system with what these settings say of memory and KV. Errors: ConfigError for a store
        that replicas share, which is not simulated."""
        if cache.kv_store:
            raise ConfigError("kv_store", f"{cache.kv_store}: no shared store is simulated")
        return dataclasses.replace(
            self,
            memory=memory_share(cache.gpu_memory_utilization, self.mesh.devices),
            kv_gib=cache.kv_memory_gib,
            kv_cache_dtype=cache.kv_cache_dtype,
        )

    @property
    def model(self) -> ModelConfig:
        """The model as lanes share it."""
        return self.shape.over(*self.mesh.ffn_lanes(self.expert_parallel, self.ffn_over_lanes))

    @property
    def costs(self) -> Costs:
        """KV in another type is read in proportion to its bytes; steps were measured with that of
        bfloat16. Errors: ConfigError for an unknown device or a degree of tp that was not
        measured."""
        measured = costs(self.device, self.model, self.mesh.tp)
        once, token = ffn_seconds(self.model, self.link(self.mesh.kvp))
        bytes_ = self.heads.stored / (ITEM * self.heads.head_dim)
        return dataclasses.replace(
            measured,
            launch=measured.launch * self.layer_groups,
            experts_sent=once,
            experts_sent_token=token,
            read=measured.read * bytes_,
            decode_kv=max(measured.decode_kv * bytes_, measured.pair),
        )

    @property
    def heads(self) -> Heads:
        """Heads of one rank."""
        return heads_of(self.shape, self.mesh.tp, fp8=self.kv_cache_dtype == "fp8")

    def link(self, lanes: int) -> Link:
        """Returns the link from a lane to another of its group of `lanes` lanes, for one rank."""
        device = devices()[self.device]
        if lanes * self.mesh.tp <= self.node_devices:
            return device.ranks[min(device.ranks)]
        return device.node

    @property
    def profile(self) -> ReplicaProfile:
        """Costs of steps on the devices of this system."""
        sizes = group_sizes(self.mesh.kvp)[1:]
        links = {lanes: LaneLinks.alike(self.link(lanes)) for lanes in sizes}
        return ReplicaProfile(self.costs, links)

    def sizes(
        self,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        longest: int = PLANNED_TOKENS,
        windows: Windows = ONE_GROUP,
    ) -> ReplicaSizes:
        """Returns the sizes of a replica with these settings. cache: with its pages. longest:
        tokens of the longest prompt that plans are fitted to. windows: of the page groups."""
        return ReplicaSizes(
            self.mesh, cache, scheduler, self.heads, UNLIMITED, longest, self.layer_groups, windows
        )

    def check(self) -> None:
        """Checks the mesh. Errors: ConfigError if the model cannot run on it."""
        if reason := self.obstacle():
            raise ConfigError("mesh", f"{self.mesh}: {reason}")

    def obstacle(self) -> str:
        """Returns why the model cannot run on the mesh; '' if it can."""
        mesh, shape = self.mesh, self.shape
        if mesh.tp > self.node_devices:
            return f"more ranks than the {self.node_devices} devices of a node"
        if mesh.tp not in (1, *devices()[self.device].ranks):
            return f"sums over {mesh.tp} ranks were not measured on {self.device}"
        if shape.heads % mesh.tp:
            return f"{mesh.tp} ranks do not split {shape.heads} heads"
        if not all(spec.splits(shape, mesh.tp) for spec in self.model.mlps):
            return f"{mesh.tp} ranks of each lane do not split the MLP or {shape.experts} experts"
        if mesh.spp > shape.layers:
            return f"more stages than {shape.layers} layers"
        try:
            self.kv_tokens()
        except ConfigError as error:
            return error.message
        return ""

    @property
    def weights(self) -> int:
        """Bytes of weights on the device that has most. GPUs hold them in bfloat16, however a
        checkpoint does."""
        return self.model.weight_bytes(self.mesh.tp, self.mesh.spp)

    def kv_tokens(self, slots: int = 0, windows: Windows = ONE_GROUP) -> int:
        """Tokens whose KV of one page group fits on one lane, beside the states of as many
        sequences as there are slots. windows: of the page groups. Errors: ConfigError where not
        even the weights fit."""
        free = self.memory * devices()[self.device].memory_bytes - self.weights
        if free <= 0:
            raise ConfigError(
                "mesh",
                f"{self.weights / 2**30:.0f} GiB of weights per device leave no room for KV on "
                f"{self.device} with {self.mesh}",
            )
        if self.kv_gib is not None:
            free = self.kv_gib * 2**30
        rank = self.shape.share(self.mesh.tp)
        stages = layers_of(self.shape, self.mesh.spp)
        states = slots * max(map(rank.state_bytes, stages))
        counts = [pool_count(self.split, windows, stage, self.layer_groups) for stage in stages]
        return max(0, int((free - states) / (max(counts) * self.pool_bytes)))

    @property
    def split(self) -> ModelConfig:
        """The model with a kv head for each rank."""
        return self.shape.repeated(self.mesh.tp)

    @property
    def pool_bytes(self) -> float:
        """Bytes of a token on a page of one pool, on one rank."""
        heads = self.heads
        if not self.shape.layer_sizes:
            return heads.kv_bytes
        return pool_page(self.split).size / self.mesh.tp * ITEM

    def state_pages(self, block_size: int, windows: Windows) -> int:
        """Pages of a checkpoint of a sequence's states; 0 where no layer has some."""
        stages = layers_of(self.shape, self.mesh.spp)
        groups = [group for stage in stages for group in split(stage, self.layer_groups)]
        return state_pages(self.shape, groups, windows, block_size, ITEM, ITEM)

    def tiers(self, cache: CacheConfig, windows: Windows = ONE_GROUP) -> VirtualTiers | None:
        """Returns the tiers below the devices that these settings ask for; None without any. Of a
        disk only its size counts: nothing is written. windows: of the page groups, of which each
        block has a page in each. Errors: ConfigError where a page does not fit."""
        if not cache.host_cache_gib:
            return None
        stages = layers_of(self.shape, self.mesh.spp)
        pools = sum(pool_count(self.split, windows, stage, self.layer_groups) for stage in stages)
        token = self.pool_bytes * self.mesh.tp * pools
        block_bytes = int(token * cache.block_size)
        _, disk = cache.disk_folder or (None, 0.0)
        sizes = TierSizes(
            block_bytes,
            host=int(cache.host_cache_gib * 2**30 / block_bytes),
            disk=int(disk * 2**30 / block_bytes),
            # a block is on the devices of one lane
            host_bytes_per_s=HOST_LINK * self.mesh.spp * self.mesh.tp,
            disk_bytes_per_s=DISK,
        )
        if not sizes.host:
            raise ConfigError(
                "host_cache_gib", f"{cache.host_cache_gib:g} GiB: a block has {block_bytes} bytes"
            )
        return VirtualTiers(sizes, VirtualClock())

    def replica(
        self,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        lookahead: int = 1,
        observed: bool = True,
    ) -> VirtualReplica:
        """A virtual replica of this system; without `cache.pages`, as many as fit in memory.
        observed: whether views and metrics show what it does.
        Errors: ConfigError where the model cannot run on the mesh, or the settings
        cannot be."""
        system = self.with_cache(cache)
        system.check()
        check_lanes(self.mesh, cache, scheduler)
        if scheduler.drafts != "none" and self.shape.has_states:
            raise ConfigError("drafts", "the model keeps states, which cannot be taken back")
        windows = page_windows(self.split)
        pages = cache.pages or system.kv_tokens(scheduler.max_seqs, windows) // cache.block_size
        cache = dataclasses.replace(cache, pages=pages)
        kind = VirtualReplica if observed else UnwatchedReplica
        replica = kind(
            assemble(
                system.sizes(scheduler, cache, windows=windows),
                system.profile,
                CachedModel(
                    ascending=self.shape.has_windows,
                    states=self.shape.has_states,
                    state_pages=self.state_pages(cache.block_size, windows),
                ),
                system.tiers(cache, windows),
            ),
            cache,
            self.mesh,
            lookahead,
            shape=self.shape,
            platform=self.device,
            noise=self.noise,
        )
        replica.propose(self.guesses)
        return replica


def drive(
    replica: VirtualReplica,
    requests: Iterable[tuple[Request, str]],
    until: float = float("inf"),
    keep_steps: bool = False,
    deadline: Callable[[Request], float] | None = None,
) -> Recorder:
    """Submits (request, kind) pairs in the order of their arrival and runs the replica to the end,
    or to clock second `until`. What is due when a request arrives happens after it was submitted.
    deadline: clock second against which a first token is recorded; default: the scheduler's."""
    recorder = Recorder(keep_steps)
    replica.listeners.append(recorder)
    replica.start()
    for request, kind in requests:
        if request.arrival > until:
            break
        replica.advance(request.arrival, through=False)
        submit(replica, recorder, request, kind, deadline)
    replica.advance(until)
    return recorder


def submit(
    replica: VirtualReplica,
    recorder: Recorder,
    request: Request,
    kind: str,
    deadline: Callable[[Request], float] | None = None,
) -> None:
    """Submits a request, and records how it ends or why it was refused. deadline: see `drive`."""
    times = replica.scheduler.times
    deadline = deadline or times.deadline
    sink = recorder.sink(request, kind, deadline(request), times.promise(request))
    try:
        replica.submit_quiet(request, sink)
    except RequestError as error:
        recorder.refused(request, kind, error)


def execute(
    replica: VirtualReplica,
    arrivals: Iterable[Arrival],
    slo: Slo = Slo(),  # noqa: B008
    until: float = float("inf"),
    keep_steps: bool = False,
) -> Outcome:
    """Runs all arrivals; those that have not ended by clock second `until` have the reason
    'unfinished'."""
    coming = requests(arrivals, replica.info.max_model_len, slo, replica.info.class_names)
    recorder = drive(replica, coming, until, keep_steps)
    for request_id in list(recorder.pending):
        replica.cancel(request_id, "unfinished")
    return recorder.outcome()


def requests(
    arrivals: Iterable[Arrival], max_len: int, slo: Slo, classes: Collection[str] = ()
) -> Iterable[tuple[Request, str]]:
    """Makes the requests of arrivals with their kinds, each when it is needed; a kind that is one
    of `classes` is the request's class."""
    for number, arrival in enumerate(arrivals):
        kind = kind_of(arrival)
        objectives = dataclasses.replace(slo, class_name=kind) if kind in classes else slo
        yield to_request(arrival, number, max_len, objectives), kind


def check_classes(scheduler: SchedulerConfig, arrivals: Iterable[Arrival]) -> None:
    """Checks the classes. Errors: ConfigError for a class that is the kind of no request."""
    kinds = {kind_of(arrival) for arrival in arrivals}
    for name in scheduler.class_names:
        if name not in kinds:
            raise ConfigError(
                "classes",
                f"no request is of the class {name}; requests are {', '.join(sorted(kinds))}",
            )


def tpot_by_kind(scheduler: SchedulerConfig) -> Mapping[str, float]:
    """Objectives per output token of the kinds of requests that are classes, in seconds."""
    return {name: scheduler.objectives[name].tpot for name in scheduler.class_names}


def outcome_summary(
    outcome: Outcome, tpot: float, by_kind: Mapping[str, float] = {}
) -> dict[str, Any]:
    """Figures of a run: percentiles in seconds, overall and by kind; `ttft_met` and `tpot_met` are
    shares of all requests that met their objectives (`by_kind`, for others `tpot`), `in_time` of
    those that kept all of their own; TTFT is over those that had a first token (`begun`), TPOT over
    those that ended by themselves (`finished`). goodput_per_s, goodput_tokens_per_s: requests in
    time, and their output tokens, per second of the run. refused: how many, by reason.
    """
    records = outcome.records
    kinds = sorted({record.kind for record in records})
    span = span_of(records)
    tokens = sum(record.prompt + record.output for record in records if record.reason != "refused")
    good = [record.output for record in records if record.in_time]
    return {
        "span": span,
        "busy": outcome.busy,
        "tokens_per_s": quotient(tokens, span),
        "goodput_per_s": quotient(len(good), span),
        "goodput_tokens_per_s": quotient(sum(good), span),
        "token_gap": spread(outcome.gaps),
        "refused": dict(outcome.refusals),
        "all": _figures(records, tpot, by_kind),
        **{
            kind: _figures([record for record in records if record.kind == kind], tpot, by_kind)
            for kind in kinds
        },
    }


def _figures(
    records: Sequence[RequestRecord], tpot: float, by_kind: Mapping[str, float]
) -> dict[str, Any]:
    begun = [record for record in records if record.output]
    ended = [record for record in begun if record.reason in ("stop", "length")]
    count = max(1, len(records))
    return {
        "requests": len(records),
        "begun": len(begun),
        "finished": len(ended),
        "ttft": spread(np.array([record.ttft for record in begun])),
        "tpot": spread(np.array([r.tpot for r in ended if r.output > 1])),
        "ttft_met": sum(record.first <= record.due for record in begun) / count,
        "tpot_met": sum(record.tpot <= by_kind.get(record.kind, tpot) for record in ended) / count,
        "in_time": sum(record.in_time for record in records) / count,
    }


def spread(values: np.ndarray) -> dict[str, float]:
    if not len(values):
        return {}
    points = np.percentile(values, PERCENTILES).tolist()
    return {
        "mean": float(values.mean()),
        **{f"p{p}": value for p, value in zip(PERCENTILES, points)},
        "max": float(values.max()),
    }
