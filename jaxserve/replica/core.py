"""The part that live and virtual replicas share: requests and sinks, metrics, journal,
questions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Event
from jaxserve.api.request import Request, adapter_name
from jaxserve.cache.block_events import BlockEvents
from jaxserve.clock import Clock
from jaxserve.observe.adapter_metrics import AdapterMetrics
from jaxserve.observe.attained import Attained
from jaxserve.observe.journal import Journal
from jaxserve.observe.metrics import Metrics
from jaxserve.observe.tenant_metrics import TenantMetrics
from jaxserve.observe.view import Snapshot
from jaxserve.replica.adapters import AdapterSource, LocalAdapters, NoAdapters
from jaxserve.replica.info import ReplicaInfo
from jaxserve.replica.kv_pool import KvPool, LocalKvPool
from jaxserve.replica.protocol import Sink
from jaxserve.replica.registry import Registry
from jaxserve.replica.weights import LocalWeights, NoWeights
from jaxserve.scheduling import Load, Scheduler
from jaxserve.scheduling.events import Rejected
from jaxserve.scheduling.sequence import NO_SLOT
from jaxserve.settings.schema import AdapterConfig, CacheConfig

T = TypeVar("T")


class ReplicaCore:
    """Base of replicas with a scheduler; see `Replica` for what its methods promise.

    It takes no lock: a replica with a thread overrides what other threads call. cache: settings of
    the scheduler's cache. workers: readings of the processes that have devices, see `Metrics`.
    `observed`: whether steps and requests are kept for `view` and counted in the metrics.
    """

    observed = True

    def __init__(
        self,
        scheduler: Scheduler,
        info: ReplicaInfo,
        cache: CacheConfig,
        clock: Clock,
        workers: Callable[[], Sequence[Mapping[str, Any]]] = lambda: (),
    ):
        self.scheduler = scheduler
        self.info = info
        self.clock = clock
        self.bus = scheduler.bus
        self.alive = True
        self.available = True
        self.draining = False
        self.registry = Registry()
        self.journal = Journal(info.mesh.spp, clock.now())
        self.metrics = Metrics(
            info.max_seqs, info.class_names, self._readings, workers, self._transfers
        )
        self.metrics.configured(
            block_size=info.block_size,
            num_gpu_blocks=scheduler.cache.total,
            cache_dtype=info.kv_dtype,
            enable_prefix_caching=cache.prefix_caching,
            placement=cache.placement,
        )
        if self.observed:
            self.journal.listen(self.bus)
            self.metrics.listen(self.bus, cache.prefix_caching)
        self.metrics_registry.register(TenantMetrics(self._tenants))
        self.adapters: LocalAdapters | NoAdapters = NoAdapters()
        self.weights: LocalWeights | NoWeights = NoWeights()

    @functools.cached_property
    def kv_pool(self) -> KvPool:
        """The cached blocks, as operators ask for them."""
        return LocalKvPool(self.scheduler.cache, self._exclusively, self.now)

    def _exclusively(self, work: Callable[[], T]) -> T:
        """Runs what reads or changes the scheduler while nothing else does; returns its result."""
        return work()

    def now(self) -> float:
        """Returns seconds on the replica's clock."""
        return self.clock.now()

    def _serve_adapters(self, source: AdapterSource, config: AdapterConfig) -> None:
        """Serves adapters from now on, if the scheduler has places for some. source, config: see
        `LocalAdapters`."""
        if self.scheduler.config.max_loras:
            names = self.info.names
            self.adapters = LocalAdapters(self.scheduler, source, self._exclusively, names, config)
            shown = AdapterMetrics(self._adapters_in_use, self.scheduler.config.max_loras)
            self.metrics_registry.register(shown)

    def _tenants(self) -> tuple[dict[str, float], dict[str, float], dict[str, Attained]]:
        """Returns by tenant the seconds that it has used, its credit, and what was in time."""
        shares = self.scheduler.shares
        return self._exclusively(
            lambda: (dict(shares.used), shares.credits(), dict(self.metrics.attained))
        )

    def _adapters_in_use(self) -> tuple[list[str], list[str]]:
        """Names of the adapters of running requests, and of waiting ones."""
        sequences = self._exclusively(lambda: list(self.scheduler.sequences.values()))
        names: tuple[list[str], list[str]] = ([], [])
        for sequence in sequences:
            if sequence.request.adapter:
                names[sequence.slot == NO_SLOT].append(adapter_name(sequence.request.adapter))
        return names

    # --- requests

    def _enter(
        self, request: Request, sink: Sink, seed: int, received: int = 0, quiet: bool = False
    ) -> None:
        """Adds a request, with the KV of its first `received` tokens. quiet: its sink gets neither
        progress nor tokens. Errors: RequestError."""
        request = self.adapters.current(request)
        events = self.scheduler.add(request, self.now(), received, quiet)
        self.registry.add(request, sink, seed)
        self._notify((request.id, event) for event in events)

    def cancel(self, request_id: str, reason: str = "cancelled") -> bool:
        """Ends a request. Returns whether it was live."""
        return self._end(request_id, reason, None)

    def stop(self, request_id: str, index: int) -> bool:
        """Ends one completion of a request with the reason 'stop'. Returns whether it was live."""
        return self._end(request_id, "stop", index)

    def _end(self, request_id: str, reason: str, index: int | None) -> bool:
        if request_id not in self.registry:
            return False
        events = self.scheduler.cancel(request_id, self.now(), reason, index)
        self._notify(events)
        return bool(events)

    def _notify(self, events: Iterable[tuple[str, Event]]) -> None:
        """Hands events to the sinks of their requests; requests whose sinks raise are cancelled."""
        for request_id in self.registry.notify(events):
            self._end(request_id, "cancelled", None)

    def fail(self, error: RequestError) -> None:
        """Ends all requests with an error."""
        for request_id in self.registry.ids():
            self._notify(self.scheduler.cancel(request_id, self.now(), "error", error=error))

    def drain(self) -> None:
        """Takes no new requests from now on; those that it has go on."""
        self.draining = True

    # --- questions

    def load(self) -> Load:
        """Returns how busy the replica is."""
        return self.scheduler.load()

    def snapshot(self, since: int) -> Snapshot:
        """Returns what runs and what ran lately, steps from number `since` on."""
        return Snapshot.take(self.journal, self.scheduler, self.now(), since)

    def view(self, since: int = 0) -> dict[str, Any]:
        """Returns the snapshot as plain data for the dashboard."""
        return {
            "model": self.info.model,
            "mesh": str(self.info.mesh),
            "alive": self.alive,
            "timed": self.scheduler.predictor.calibrated,
            **self.snapshot(since).shown(),
        }

    def count_rejected(self, reason: str) -> None:
        """Counts a request that was refused before it got to the replica."""
        self.bus.publish(Rejected(reason))

    @property
    def metrics_registry(self) -> CollectorRegistry:
        """The metrics, for Prometheus."""
        return self.metrics.registry

    @property
    def block_events(self) -> BlockEvents:
        """The blocks of KV that the cache stores and loses."""
        return self.scheduler.cache.events

    def flush_cache(self) -> int:
        """Forgets the prefixes that no request uses; returns how many pages that frees."""
        return self.scheduler.cache.flush()

    def _transfers(self) -> Mapping[tuple[str, str], Mapping[str, float]]:
        """Returns the values of `metric_rows.OF_TRANSFERS` by source and plane."""
        return {}

    def _readings(self) -> dict[str, float]:
        """Returns the values of `metric_rows.READ` that the scheduler knows."""
        load = self.load()
        in_use = load.pages_total - load.pages_free - load.pages_cached
        return {
            "num_requests_running": load.running,
            "num_requests_waiting": load.waiting,
            "kv_cache_usage_perc": in_use / load.pages_total,
            "queued_prefill_seconds": load.queued_prefill_seconds,
            "predictor_scale": self.scheduler.predictor.scale,
            "num_preemptions": self.scheduler.slots.preemptions,
            "num_step_interruptions": self.scheduler.interruptions,
            "lora_adapters_loaded": len(self.adapters.by_name),
            "lora_adapters_on_devices": len(self.scheduler.slots.adapters.resident),
            "lora_device_loads": self.scheduler.slots.adapters.loaded,
            "kv_blocks_promised": len(self.scheduler.cache.promises),
            "kv_blocks_leased": len(self.scheduler.cache.leases),
            "kv_blocks_of_sessions": len(self.scheduler.cache.sessions),
            "kv_promises_given_up": self.scheduler.cache.promises.given_up,
        }
