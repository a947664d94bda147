"""A node of a simulated cluster: a virtual replica and the work that was routed to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from experiments.virtual_cluster.admission import POLICIES, tbt
from experiments.virtual_cluster.routers import ROUTERS
from jaxserve.api.batch import Batch
from jaxserve.api.request import Slo
from jaxserve.cache import CacheManager
from jaxserve.cache.hashes import BlockHashes
from jaxserve.cluster.assignments import Assignments
from jaxserve.cluster.roles import RatioLimits, Role
from jaxserve.cluster.routing import BALANCING_THRESHOLD, ROUTING, DecodeView
from jaxserve.lab.simulate.replica import StagePassage
from jaxserve.lab.simulate.run import System
from jaxserve.settings.schema import CacheConfig, ConfigError, SchedulerConfig


@dataclass(frozen=True)
class ClusterSpec:
    """A simulated cluster.

    system: one replica of it. roles: of all replicas. cache, scheduler: settings of each replica;
    its pages are those that follow. routing: a row of `cluster.routing.ROUTING` or of `ROUTERS`.
    admission: a row of `admission.POLICIES`. ttft, tbt: objectives in seconds, which
    admission compares with. slo: objectives of a request by the tokens of its prompt, which its
    replica and routers go by; default: ttft and tbt. cache_tokens: of KV that a replica that
    prefills keeps, in whatever memory; None: what fits on the devices. decode_tokens: the same of
    one that only decodes, which caches prefixes where decode_caching says so. bytes_per_s: of each
    node's network, in either direction (default: 87 GB/s, measured over four 200 Gbps NICs,
    Mooncake 7.4.1). layer_groups: into which a replica's layers are cut: KV of a chunk leaves
    by group, as live (1: when the chunk ends). name_tokens: first tokens of a prompt, by which
    a router that hashes knows its prefix. completion: seconds that a sequence is taken to
    decode, for predictions. seen: replicas whose caches and queues routing looks at for a request,
    drawn anew for each; None: all. sample_every: seconds between samples of the loads; None: none
    are taken. count_every: seconds between counts of the copies of each block, which are settled
    from clock second `settles` on; None: one count, at the end. ratio: by which replicas that
    prefill and those that decode change sides (Mooncake, 5.1); all of these have caches of
    `cache_tokens` then; None: roles stay.
    """

    system: System
    roles: tuple[Role, ...]
    cache: CacheConfig = CacheConfig(block_size=512)  # noqa: RUF009 (frozen)
    scheduler: SchedulerConfig = SchedulerConfig(  # noqa: RUF009 (frozen)
        max_seqs=256, max_queue=10**6, chunk_tokens=8192
    )
    routing: str = "cache_aware"
    admission: str = "none"
    ttft: float = 30.0
    tbt: float = 0.1
    slo: Callable[[int], Slo] | None = None
    cache_tokens: int | None = 3_000_000
    decode_tokens: int | None = None
    decode_caching: bool = False
    bytes_per_s: float = 87e9
    layer_groups: int = 1
    threshold: float = BALANCING_THRESHOLD
    name_tokens: int = 2048
    completion: float = 20.0
    seen: int | None = None
    sample_every: float | None = None
    count_every: float | None = None
    settles: float = 0.0
    ratio: RatioLimits | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not any(role.prefills for role in self.roles):
            raise ConfigError("roles", "none of the replicas prefills")
        for name, value, table in (
            ("routing", self.routing, (*ROUTING, *ROUTERS)),
            ("admission", self.admission, POLICIES),
        ):
            if value not in table:
                raise ConfigError(name, f"must be one of {', '.join(table)}, not {value!r}")


@dataclass(eq=False)
class Node:
    """A replica of the cluster, and the work that was routed to it."""

    number: int
    role: Role
    spec: ClusterSpec
    work: Assignments = field(default_factory=Assignments)
    busy: float = 0.0

    def __post_init__(self) -> None:
        spec = self.spec
        caches = self.role.prefills or spec.ratio is not None
        tokens = spec.cache_tokens if caches else spec.decode_tokens
        size = spec.cache.block_size * spec.system.mesh.kvp
        cache = dataclasses.replace(
            spec.cache,
            pages=None if tokens is None else max(tokens // size, 2),
            prefix_caching=spec.cache.prefix_caching and (caches or spec.decode_caching),
        )
        noise = spec.system.noise.of(self.number)
        system = dataclasses.replace(spec.system, noise=noise)
        self.replica = system.replica(spec.scheduler, cache)
        self.replica.listeners.append(self)
        self.replica.start()
        self.predictor = self.replica.scheduler.predictor

    def step_issued(self, batch: Batch, passage: StagePassage) -> None:
        self.busy += passage.seconds

    def step_read(self, batch: Batch, now: float) -> None:
        """Nothing is to be noted."""

    @property
    def cache(self) -> CacheManager:
        return self.replica.scheduler.cache

    def prefill_seconds(self, cached: int, total: int) -> float:
        return self.predictor.prefill(cached, total, self.spec.scheduler.chunk_tokens)

    def prefix(self, chain: BlockHashes, blocks: int) -> int:
        """Blocks of a chain, at most `blocks`, that are cached here."""
        cached = self.cache.pages.with_key
        return next((block for block in range(blocks) if chain[block] not in cached), blocks)

    def receive(self, chain: BlockHashes, blocks: int) -> None:
        """Caches the first blocks of a chain, with what windows see behind them, as far as there is
        room."""
        pages = self.cache.pages
        cached: list[int] = []
        for block in range(blocks):
            copies = pages.with_key.get(chain[block])
            if copies is not None:
                page = copies[0]
                pages.ref(np.array([page]))
            elif any(available := pages.available()):
                page = pages.allocate(int(np.argmax(available)))
                pages.publish(page, chain[block])
            else:
                break
            cached.append(page)
        seen = self.cache.published.seen
        for part in seen.parts(len(cached)):
            beside = cached[part.block]
            lane = beside // pages.per_lane
            key = part.key(chain)
            if seen.page(key, beside) is None and pages.available()[lane]:
                page = pages.allocate(lane)
                pages.publish(page, key)
                cached.append(page)
        pages.unref(cached)

    @property
    def active(self) -> int:
        """Requests that have not ended, those that wait among them."""
        load = self.replica.load()
        return load.running + load.waiting

    @property
    def kept(self) -> int:
        """Tokens of KV that it has, in use or not."""
        load = self.replica.load()
        return (load.pages_total - load.pages_free) * self.spec.cache.block_size

    def load(self, now: float) -> float:
        """Load of what its role does: 1 where an objective is just met."""
        if self.role.prefills:
            return self.work.queue(now) / self.spec.ttft
        return self.decode_view(0).tbt / self.spec.tbt if self.active else 0.0

    def decode_view(self, tokens: int) -> DecodeView:
        """Describes this replica with one more sequence of `tokens` tokens."""
        load = self.replica.load()
        size = self.spec.cache.block_size
        free = (load.pages_free + load.pages_cached) * size
        context = load.pages_total * size - free
        seconds = tbt(self.predictor, load.running + load.waiting + 1, context + tokens)
        active = load.running + load.waiting
        return DecodeView(self.number, free, self.work.promised, active, seconds)
