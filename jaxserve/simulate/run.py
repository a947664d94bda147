"""Puts a simulated system together from a model's shape, a kind of device and a mesh, drives
requests through it, and sums up what came of them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.api.errors import RequestError
from jaxserve.api.request import Request, Slo
from jaxserve.cache import CacheManager
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.costs.predictor import Costs
from jaxserve.costs.profiles import ModelShape, costs, devices
from jaxserve.scheduling import Scheduler
from jaxserve.settings.schema import CacheConfig, ConfigError, MeshConfig, SchedulerConfig
from jaxserve.simulate.arrival import Arrival, class_of, to_request
from jaxserve.simulate.recorder import Outcome, Recorder, RequestRecord, span_of
from jaxserve.simulate.replica import VirtualReplica

NODE_DEVICES = 8  # ranks of tp stay within a node
MEMORY_SHARE = 0.9  # of a device's memory, for weights and KV
PERCENTILES = (50, 90, 99)


def shape_of(name: str) -> ModelShape:
    """Returns the shape of a model of the zoo; punctuation does not count: llama-3-8b is llama3-8b.
    Errors: ConfigError."""
    plain = lambda text: re.sub(r"[-_. ]", "", text.lower())
    for known, config in MODELS.items():
        if plain(known) == plain(name):
            return ModelShape(
                config.layers,
                config.d_model,
                config.heads,
                config.kv_heads,
                config.head_dim,
                config.d_ff,
                config.vocab,
            )
    raise ConfigError("model", f"{name!r} is not one of {', '.join(MODELS)}")


@dataclass(frozen=True)
class System:
    """A simulated system: a model's shape on `mesh` of `device`s. A replica has no limit on a
    sequence but its pages."""

    shape: ModelShape
    device: str
    mesh: MeshConfig

    @property
    def costs(self) -> Costs:
        """Errors: ConfigError for an unknown device or a degree of tp that was not measured."""
        return costs(self.device, self.shape, self.mesh.tp)

    def check(self) -> None:
        """Errors: ConfigError where the model cannot run on the mesh."""
        if reason := self.obstacle():
            raise ConfigError("mesh", f"{self.mesh}: {reason}")

    def obstacle(self) -> str:
        """Why the model cannot run on the mesh; '' where it can."""
        mesh, shape = self.mesh, self.shape
        if mesh.tp > NODE_DEVICES:
            return f"more ranks than the {NODE_DEVICES} devices of a node"
        if mesh.tp not in (1, *devices()[self.device].ranks):
            return f"sums over {mesh.tp} ranks were not measured on {self.device}"
        if shape.heads % mesh.tp:
            return f"{mesh.tp} ranks do not split {shape.heads} heads"
        if mesh.spp > shape.layers:
            return f"more stages than {shape.layers} layers"
        try:
            self.kv_tokens()
        except ConfigError as error:
            return error.message
        return ""

    def kv_tokens(self) -> int:
        """Tokens whose KV fits on one lane. Errors: ConfigError where not even the weights fit."""
        ranks = self.mesh.spp * self.mesh.tp
        free = (
            MEMORY_SHARE * devices()[self.device].memory_bytes - self.shape.weight_bytes() / ranks
        )
        if free <= 0:
            need = self.shape.weight_bytes() / ranks / 2**30
            raise ConfigError(
                "mesh",
                f"{need:.0f} GiB of weights per device leave no room for KV on {self.device} "
                f"with {self.mesh}",
            )
        heads = self.shape.rank_heads(self.mesh.tp)[1]
        layers = -(-self.shape.layers // self.mesh.spp)
        return int(free / (layers * 2 * 2 * heads * self.shape.head_dim))

    def replica(
        self,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        lookahead: int = 1,
    ) -> VirtualReplica:
        """A virtual replica of this system; without `cache.pages`, as many as fit in memory.
        Errors: ConfigError where the model cannot run on the mesh."""
        self.check()
        pages = cache.pages or self.kv_tokens() // cache.block_size
        if cache.kv_cache_dtype != "auto":
            raise ConfigError(
                "kv_cache_dtype",
                f"{cache.kv_cache_dtype}: steps were measured with KV of bfloat16; only auto is "
                "known",
            )
        for name, idle in (("exchange", "gather"), ("planner", "none")):
            if getattr(scheduler, name) != idle:
                raise ConfigError(
                    name, f"{getattr(scheduler, name)}: replicas are simulated with {idle} only"
                )
        stripe = scheduler.stripe(cache.block_size)
        cache = dataclasses.replace(cache, pages=pages)
        manager = CacheManager(cache, self.mesh.kvp, scheduler.max_seqs, stripe=stripe)
        return VirtualReplica(
            Scheduler(scheduler, manager, self.mesh, 2**31 - 1, costs=self.costs),
            cache,
            self.mesh,
            lookahead,
            shape=self.shape,
            platform=self.device,
        )


def drive(
    replica: VirtualReplica,
    requests: Iterable[tuple[Request, str]],
    until: float = float("inf"),
    keep_steps: bool = False,
) -> Recorder:
    """Submits (request, kind) pairs in the order of their arrival and runs the replica to the end,
    or to clock second `until`. What is due when a request arrives happens after it was
    submitted."""
    recorder = Recorder(keep_steps)
    replica.listeners.append(recorder)
    replica.start()
    for request, kind in requests:
        if request.arrival > until:
            break
        replica.advance(request.arrival, through=False)
        submit(replica, recorder, request, kind)
    replica.advance(until)
    return recorder


def submit(replica: VirtualReplica, recorder: Recorder, request: Request, kind: str) -> None:
    """Submits a request, and records how it ends or why it was refused."""
    due = request.arrival + replica.scheduler.ttft_objective(request)
    sink = recorder.sink(request, kind, due)
    try:
        replica.submit(request, sink)
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
    coming = requests(arrivals, replica.info.max_model_len, slo)
    recorder = drive(replica, coming, until, keep_steps)
    for request_id in list(recorder.pending):
        replica.cancel(request_id, "unfinished")
    return recorder.outcome()


def requests(arrivals: Iterable[Arrival], max_len: int, slo: Slo) -> Iterable[tuple[Request, str]]:
    """Makes the requests of arrivals with their kinds, each when it is needed."""
    for number, arrival in enumerate(arrivals):
        yield to_request(arrival, number, max_len, slo), arrival.kind or class_of(arrival.prompt)


def outcome_summary(outcome: Outcome, tpot: float) -> dict[str, Any]:
    """Figures of a run: percentiles in seconds, overall and by kind; `ttft_met` and `tpot_met` are
    shares of all requests that met their objectives; TTFT is over those that had a first token
    (`begun`), TPOT over those that ended by themselves (`finished`). refused: how many, by reason.
    """
    records = outcome.records
    kinds = sorted({record.kind for record in records})
    span = span_of(records)
    tokens = sum(record.prompt + record.output for record in records if record.reason != "refused")
    return {
        "span": span,
        "busy": outcome.busy,
        "tokens_per_s": tokens / span if span else 0.0,
        "token_gap": spread(outcome.gaps),
        "refused": dict(outcome.refusals),
        "all": _figures(records, tpot),
        **{
            kind: _figures([record for record in records if record.kind == kind], tpot)
            for kind in kinds
        },
    }


def _figures(records: Sequence[RequestRecord], tpot: float) -> dict[str, Any]:
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
        "tpot_met": sum(record.tpot <= tpot for record in ended) / count,
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
