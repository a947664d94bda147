"""From settings to a running replica: checkpoint, sizes, weights, programs."""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
from collections.abc import Callable

import jax
import ml_dtypes
import numpy as np

import jaxserve
from jaxserve.cache import CacheManager
from jaxserve.cache.hashes import root_key
from jaxserve.cache.tiers import LowerTiers
from jaxserve.checkpoint.fetch import local_files
from jaxserve.checkpoint.fingerprint import fingerprint
from jaxserve.checkpoint.model import ModelConfig, layers_of
from jaxserve.clock import WallClock
from jaxserve.costs.predictor import NOMINAL
from jaxserve.engine.engine import Engine
from jaxserve.engine.executor import CommandExecutor
from jaxserve.engine.machine import fitted, local_devices
from jaxserve.engine.memory import DeviceRoom, kv_bytes
from jaxserve.engine.profiling.profile_file import EngineProfile, profile_for
from jaxserve.engine.programs import keep_compiled
from jaxserve.engine.stage_plan import StagePlan
from jaxserve.engine.step_shapes import first_shapes, sample_sizes, shapes
from jaxserve.engine.worker import Worker
from jaxserve.engine.worker_group import WorkerGroup
from jaxserve.group.channel import free_port
from jaxserve.group.handshake import Certificate
from jaxserve.group.layout import check_processes, described
from jaxserve.group.member import LEADER, Member, Pulse, this_member
from jaxserve.group.messages import Hello, shared_settings
from jaxserve.kernels.kv_pages import FP8, pool_shapes
from jaxserve.progress import progress_bar
from jaxserve.scheduling import Scheduler
from jaxserve.scheduling.planning.lanes import LanePlanner, improvement_rates
from jaxserve.settings.options import values_of
from jaxserve.settings.schema import ConfigError, EngineConfig, SchedulerConfig
from jaxserve.sharding.mesh import ensure_devices
from jaxserve.store.disk import DiskBlocks
from jaxserve.store.mooncake import MooncakeBlocks, address_towards, load_client
from jaxserve.store.peers import PeerBlocks
from jaxserve.store.shared import SharedTier
from jaxserve.store.tiered import TieredBlocks
from jaxserve.weights import load, open_checkpoint
from jaxserve.weights.checkpoint import Checkpoint
from jaxserve.weights.store import OrbaxFolder

log = logging.getLogger(__name__)
LEAST_PAGES = 2
STORE_SECONDS = 2.0  # of a call of the shared store
DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def build(
    config: EngineConfig,
    progress: bool = True,
    warm_up: bool = True,
    profiled: bool = True,
    peers: PeerBlocks | None = None,
) -> Engine:
    """Makes an engine that is ready to start: worker, profile, costs, scheduler, engine, each whole
    when it is made. warm_up: with the programs that hold every batch; the others are compiled
    beside traffic. profiled: with the profile that its settings ask for. peers: other replicas,
    which are asked for blocks where requests name one.

    Errors: ConfigError for settings that cannot work, CheckpointError for a checkpoint that cannot
    be read.
    """
    config = for_this_machine(config)
    worker, model = open_executor(config, progress, warm_up, peers)
    profile = None
    if profiled:
        profile = profile_for(config, worker, max_length(config, worker.plan.model), progress)
    engine = make_engine(config, worker, model, profile)
    if config.compile_all:
        worker.compile_others()
    return engine


def for_this_machine(config: EngineConfig) -> EngineConfig:
    """The config with the settings chosen that nobody gave; the choices are logged. Errors:
    ConfigError, CheckpointError."""
    if this_member() is not None:
        return config
    ensure_devices(config.mesh.devices)  # before anything asks for them, which makes them
    room = DeviceRoom.here()
    if room.platform == "cpu":
        return config
    model = open_checkpoint(config.source.model, config.source.revision).config
    found, choices = fitted(config, model, room, local_devices(), kv_tokens(model, room))
    for choice in choices:
        log.info("chosen for %d x %s: %s", local_devices(), room.platform, choice)
    return found


def kv_tokens(model: ModelConfig, room: DeviceRoom) -> Callable[[EngineConfig], int]:
    """How many tokens all lanes of a replica have room for, by its config."""

    def count(config: EngineConfig) -> int:
        plan = make_plan(config, model.with_tp(config.mesh.tp), room)
        return plan.pages * plan.block_size * config.mesh.kvp

    return count


def open_executor(
    config: EngineConfig,
    progress: bool = True,
    warm_up: bool = True,
    peers: PeerBlocks | None = None,
) -> tuple[CommandExecutor, ModelConfig]:
    """The devices of a replica: those of this process, or of the workers that this process leads
    (see `jaxserve.group`). In a process that is a worker itself this does not return."""
    member = this_member()
    if member is None:
        return open_worker(config, progress, warm_up, peers, everything=False)
    if member.leads:
        return open_group(config, member, progress, warm_up)
    from jaxserve.engine.worker_process import work

    work(config, member)


def open_group(
    config: EngineConfig, member: Member, progress: bool = True, warm_up: bool = True
) -> tuple[WorkerGroup, ModelConfig]:
    """Waits for the workers of this leader's group, and until they make tokens."""
    pulse = Pulse(member)
    check_processes(config, member.workers, member.ranks_across_hosts)
    for line in described(config.mesh, member.workers):
        print(line, file=sys.stderr)
    checkpoint = open_checkpoint(config.source.model, config.source.revision)
    plan = make_plan(config, checkpoint.config.with_tp(config.mesh.tp))
    with progress_bar("compiling programs", None, progress and warm_up) as step:
        group = WorkerGroup(
            plan,
            member,
            hello_of(config, LEADER),
            values_of(config),
            warm_up=warm_up,
            hang_timeout=config.hang_timeout,
            progress=step,
            tell_state=lambda state: pulse.tell(state=state),
            tls=Certificate.given(member.tls_cert, member.tls_key) if member.tls_cert else None,
        )
        group.formed()
    return group, checkpoint.config


def hello_of(config: EngineConfig, worker: int, host: str = "") -> Hello:
    """What a member with these settings says when it joins. Errors: ConfigError."""
    weights = weights_id(config)
    versions = {"jaxserve": jaxserve.__version__, "jax": jax.__version__}
    return Hello(worker, versions, shared_settings(config), weights, free_port(host))


def open_worker(
    config: EngineConfig,
    progress: bool = True,
    warm_up: bool = True,
    peers: PeerBlocks | None = None,
    everything: bool = True,
) -> tuple[Worker, ModelConfig]:
    """Loads the weights and compiles the programs of a replica, in this process. everything: all
    programs, not only those that hold every batch. Also returns what the checkpoint says of its
    model."""
    checkpoint = open_checkpoint(config.source.model, config.source.revision)
    ensure_devices(config.mesh.devices)
    worker = load_worker(config, checkpoint, progress, peers)
    if warm_up:
        shapes = None if everything else first_shapes(worker.plan.shapes)
        count = worker.program_count(shapes)
        with progress_bar("compiling programs", count, progress) as step:
            worker.warm_up(step, shapes=shapes)
    return worker, checkpoint.config


def load_worker(
    config: EngineConfig,
    checkpoint: Checkpoint | OrbaxFolder,
    progress: bool,
    peers: PeerBlocks | None = None,
) -> Worker:
    """Loads the weights of the stages that have devices in this process."""
    if config.cache.kv_store_master is not None:
        load_client()  # refused before weights are read
    model = checkpoint.config.with_tp(config.mesh.tp)
    plan = make_plan(config, model)
    keep_compiled(config.compile_cache)
    return Worker(
        plan,
        lambda declared, shardings: load(
            checkpoint, model, declared, shardings, plan.dtype, progress
        ),
        _tiers(config, checkpoint.config) if config.cache.host_cache_gib else None,
        checkpoint.config.kv_heads,
        peers,
    )


def _tiers(config: EngineConfig, model: ModelConfig) -> Callable[[int], TieredBlocks]:
    """Makes the tiers below the devices, for blocks of so many bytes. Errors: ConfigError."""

    def make(block_bytes: int) -> TieredBlocks:
        slots = int(config.cache.host_cache_gib * 2**30) // block_bytes
        if slots < 2:
            said = f"{config.cache.host_cache_gib} GiB hold {slots} blocks of {block_bytes} bytes"
            raise ConfigError("host_cache_gib", f"{said}; at least 2 are needed")
        identity = root_key(*cache_identity(config, model), config.cache.block_size, "")
        shared = _shared(config, block_bytes, identity)  # refused before a folder is taken
        disk = _disk(config, block_bytes, identity)
        return TieredBlocks(slots, block_bytes, WallClock(), disk, shared)

    return make


def make_engine(
    config: EngineConfig,
    worker: CommandExecutor,
    model: ModelConfig,
    profile: EngineProfile | None = None,
) -> Engine:
    """Makes the host's side of a replica: cache, scheduler, engine. model: as the checkpoint says.
    profile: what steps cost; None where nobody knows."""
    plan = worker.plan
    cache = make_cache(config, plan, model, worker.lower_tiers)
    scheduler = make_scheduler(config, plan, cache, profile)
    return Engine(config, worker, scheduler)


def make_scheduler(
    config: EngineConfig, plan: StagePlan, cache: CacheManager, profile: EngineProfile | None
) -> Scheduler:
    """The scheduler of an engine, or of a virtual replica that predicts it."""
    most = max_length(config, plan.model)
    return Scheduler(
        config.scheduler,
        cache,
        config.mesh,
        most,
        plan.model.eos_ids,
        costs=NOMINAL if profile is None else profile.costs,
        planner=None if profile is None else _planner(config.scheduler, plan, profile, most),
        exchange=None if profile is None else profile.chooser(plan, config.scheduler),
    )


def make_cache(
    config: EngineConfig, plan: StagePlan, model: ModelConfig, lower: LowerTiers | None = None
) -> CacheManager:
    """An empty cache for the pages of a plan. model: as the checkpoint says; what block keys cover.
    lower: the tiers below the devices."""
    return CacheManager(
        dataclasses.replace(config.cache, pages=plan.pages),
        config.mesh.kvp,
        plan.slots,
        *cache_identity(config, model),
        stripe=config.scheduler.stripe(config.cache.block_size),
        lower=lower,
        most_moves=plan.moves,
        ascending=model.has_windows,
    )


def _shared(config: EngineConfig, block_bytes: int, identity: bytes) -> SharedTier | None:
    """The store that replicas share, where one is given. Errors: ConfigError."""
    master = config.cache.kv_store_master
    if master is None:
        return None
    store = MooncakeBlocks(master, block_bytes, address_towards(master), identity, STORE_SECONDS)
    return SharedTier(store, block_bytes)


def _disk(config: EngineConfig, block_bytes: int, identity: bytes) -> DiskBlocks | None:
    """The blocks on disk, where a folder is given. Errors: ConfigError."""
    if config.cache.disk_folder is None:
        return None
    folder, gib = config.cache.disk_folder
    return DiskBlocks(folder, int(gib * 2**30), block_bytes, identity)


def cache_identity(config: EngineConfig, model: ModelConfig) -> tuple[str, str]:
    """What tells the blocks of one replica from another's besides tokens: weights and model, and
    the types of numbers. model: as the checkpoint says."""
    types = f"{weights_dtype(config, model)} {config.cache.kv_cache_dtype}"
    return f"{model} {weights_id(config)}", types


def weights_dtype(config: EngineConfig, model: ModelConfig, platform: str | None = None) -> str:
    """The type of weights: where the settings leave it open, that of the checkpoint, but float32 on
    CPUs, where tokens are then the same for every mesh and batch. platform: None for that of this
    process."""
    if config.source.dtype != "auto":
        return config.source.dtype
    return "float32" if (platform or DeviceRoom.here().platform) == "cpu" else model.stored


def weights_id(config: EngineConfig) -> str:
    """A fingerprint of the weights; where they are random, what they are made of."""
    source = config.source.model
    if source.startswith("random:"):
        return source
    return fingerprint(local_files(source, progress=False, revision=config.source.revision))


def _planner(
    config: SchedulerConfig, plan: StagePlan, profile: EngineProfile, max_len: int
) -> LanePlanner | None:
    """Plans which lanes compute which part of a prompt, where that is asked for."""
    if not plan.moves:
        return None
    rates = improvement_rates(config, profile.improvement.get(config.planner, {}))
    return LanePlanner(config.planner, profile.instances(plan, config, max_len), rates)


def make_plan(
    config: EngineConfig, model: ModelConfig, room: DeviceRoom | None = None
) -> StagePlan:
    """What the stages need, from the settings and the model (after `with_tp`). room: that of each
    device; None: as this process has them. Errors: ConfigError."""
    room = room or DeviceRoom.here()
    model = dataclasses.replace(model, max_len=max_length(config, model))
    dtype = DTYPES[weights_dtype(config, model, room.platform)]
    size = config.cache.block_size
    blocks = -(-model.max_len // size)
    plan = StagePlan(
        model,
        config.mesh,
        dtype,
        FP8 if config.cache.kv_cache_dtype == "fp8" else dtype,
        config.cache.pages or LEAST_PAGES,
        size,
        config.scheduler.max_seqs,
        blocks,
        shapes(config.scheduler, config.mesh.kvp, size),
        sample_sizes(config.scheduler),
    )
    if config.cache.pages is None:
        plan = dataclasses.replace(plan, pages=_pages(config, plan, blocks, room))
    return dataclasses.replace(plan, width=min(blocks, plan.pages))


def _pages(config: EngineConfig, plan: StagePlan, blocks: int, room: DeviceRoom) -> int:
    """Pages of a lane, for sequences of so many blocks at most. Errors: ConfigError where a device
    holds too few."""
    model = plan.model
    layers = max(map(len, layers_of(model, plan.mesh.spp)))
    heads = model.kv_heads // plan.mesh.tp
    one = pool_shapes((2, heads, plan.block_size, model.head_dim), plan.kv_dtype)
    page = layers * sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(one))
    given = config.cache.kv_memory_gib
    total = kv_bytes(plan, given, config.cache.gpu_memory_utilization, room)
    pages = total // page
    if room.bytes is None or given is not None:  # more than all sequences can fill is for prefixes
        pages = min(pages, blocks * plan.slots)
    if pages < LEAST_PAGES:
        said = (
            f"{total / 2**30:g} GiB hold {pages} pages of {page} bytes; "
            f"at least {LEAST_PAGES} are needed"
        )
        raise ConfigError("kv_memory_gib", said)
    return pages


def max_length(config: EngineConfig, model: ModelConfig) -> int:
    """Most tokens of a sequence. Errors: ConfigError where the model cannot have so many."""
    length = config.source.max_model_len
    if length is not None and length > model.max_len:
        raise ConfigError("max_model_len", f"{length} is above the model's limit {model.max_len}")
    return length or model.max_len
