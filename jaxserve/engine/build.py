"""From settings to a running replica: checkpoint, sizes, weights, programs."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable

from jaxserve.api.errors import RequestError
from jaxserve.cache.tiers import LowerTiers
from jaxserve.checkpoint.model import ModelConfig
from jaxserve.engine.block_layout import BlockLayout
from jaxserve.engine.device_drafter import DeviceDrafter
from jaxserve.engine.draft_loading import open_draft_model
from jaxserve.engine.eagle_loading import open_eagle_head
from jaxserve.engine.engine import Engine
from jaxserve.engine.executor import CommandExecutor
from jaxserve.engine.loading import cache_identity, hello_of, make_worker
from jaxserve.engine.profiling.profile_file import profile_for, replica_sizes
from jaxserve.engine.profiling.repair import trust_of
from jaxserve.engine.sampling_rows import VARIANTS
from jaxserve.engine.sizing import (
    for_this_machine,
    kept_weights,
    make_plan,
    max_length,
    split_model,
)
from jaxserve.engine.stage_plan import StagePlan
from jaxserve.engine.step_shapes import StepShape, first_shapes
from jaxserve.engine.worker import Worker
from jaxserve.engine.worker_group import AskForBlocks, GroupTerms, WorkerGroup
from jaxserve.engine.worker_process import work
from jaxserve.group.handshake import Certificate
from jaxserve.group.layout import check_processes, described
from jaxserve.group.member import LEADER, Member, Pulse, this_member
from jaxserve.progress import progress_bar
from jaxserve.scheduling import Scheduler
from jaxserve.scheduling.assembly import CachedModel, ReplicaProfile, assemble
from jaxserve.settings.options import values_of
from jaxserve.settings.schema import ConfigError, EngineConfig
from jaxserve.sharding.mesh import ensure_devices
from jaxserve.store.parts import PartIndex
from jaxserve.store.peers import PeerBlocks
from jaxserve.weights import open_checkpoint

# what opens the drafters that have weights, by the choice of the setting `drafts`
DRAFT_WEIGHTS: dict[str, Callable[[EngineConfig, bool, bool, bool], DeviceDrafter]] = {
    "model": open_draft_model,
    "eagle3": open_eagle_head,
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
    draft_model = None
    if config.draft.draft_model is not None:
        ensure_devices(config.mesh.devices)
        draft_model = DRAFT_WEIGHTS[config.scheduler.drafts](config, progress, warm_up, profiled)
    worker, model = open_executor(config, progress, warm_up, peers)
    profile = None
    if profiled:
        profile = profile_for(config, worker, max_length(config, worker.plan.model), progress)
    engine = make_engine(config, worker, model, profile, draft_model)
    if profile is not None:
        sampled = engine.steps.sampled_elsewhere
        engine.trust = trust_of(config, worker, engine.scheduler, profile, sampled)
    if config.compile_all:
        worker.compile_others()
    return engine


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
    kept = kept_weights(config, checkpoint)
    plan = make_plan(config, split_model(config, checkpoint.config), kept=kept)
    with progress_bar("compiling programs", None, progress and warm_up) as step:
        group = WorkerGroup(
            plan,
            member,
            GroupTerms(hello_of(config, LEADER), values_of(config), warm_up, config.hang_timeout),
            progress=step,
            tell_state=lambda state: pulse.tell(state=state),
            tls=Certificate.given(member.tls_cert, member.tls_key) if member.tls_cert else None,
            tiers=_part_index(config, member, plan, checkpoint.config),
        )
        group.formed()
    return group, checkpoint.config


def _part_index(
    config: EngineConfig, member: Member, plan: StagePlan, model: ModelConfig
) -> Callable[[AskForBlocks], PartIndex] | None:
    """Returns what makes the leader's index of the blocks below the devices; None without any."""
    if not config.cache.host_cache_gib:
        return None
    layout = BlockLayout(plan, model.kv_heads).by_part
    slots = int(config.cache.host_cache_gib * 2**30) // layout.bytes
    outlasts = config.cache.disk_cache is not None
    return lambda ask: PartIndex(member.workers, layout, slots, outlasts, ask)


def open_worker(
    config: EngineConfig,
    progress: bool = True,
    warm_up: bool = True,
    peers: PeerBlocks | None = None,
    everything: bool = True,
    variants: tuple[str, ...] = VARIANTS,
) -> tuple[Worker, ModelConfig]:
    """Loads the weights and compiles the programs of a replica, in this process. everything: all
    programs, not only those that hold every batch. variants: of sampling, those that are compiled.
    Also returns what the checkpoint says of its model."""
    checkpoint = open_checkpoint(config.source.model, config.source.revision)
    ensure_devices(config.mesh.devices)
    worker, load = make_worker(config, checkpoint, progress, peers)
    shapes: list[StepShape] = []
    if warm_up:
        shapes = worker.plan.shapes if everything else first_shapes(worker.plan.shapes)
    count = len(worker.programs(shapes, variants))
    with progress_bar("compiling programs", count, progress and warm_up) as step:
        worker.start(load, shapes, step, variants)
    return worker, checkpoint.config


def make_engine(
    config: EngineConfig,
    worker: CommandExecutor,
    model: ModelConfig,
    profile: ReplicaProfile | None = None,
    draft_model: DeviceDrafter | None = None,
) -> Engine:
    """Makes the host's side of a replica: cache, scheduler, engine. model: as the checkpoint says.
    profile: what steps cost; None for nominal costs. draft_model: proposes tokens, where settings
    ask for one. Errors: ConfigError for adapters that cannot be served."""
    plan = worker.plan
    if not worker.goes_by_groups:
        plan = dataclasses.replace(plan, layer_groups=1)
    scheduler = make_scheduler(config, plan, model, profile, worker.lower_tiers)
    engine = Engine(config, worker, scheduler, draft_model=draft_model)
    for name, folder in config.adapters.named:
        try:
            engine.adapters.load_given(name, folder)
        except RequestError as error:
            raise ConfigError("lora_modules", f"{name}: {error}") from None
    return engine


def make_scheduler(
    config: EngineConfig,
    plan: StagePlan,
    model: ModelConfig,
    profile: ReplicaProfile | None,
    lower: LowerTiers | None = None,
) -> Scheduler:
    """Makes the scheduler of an engine, or of a virtual replica that predicts it, with its cache.
    model: as the checkpoint says. lower: tiers below the devices."""
    known = CachedModel(
        cache_identity(config, model),
        model.has_windows,
        plan.model.eos_ids,
        model.has_states,
        plan.state_pages,
    )
    sizes = replica_sizes(plan, config.cache, config.scheduler, max_length(config, plan.model))
    return assemble(sizes, profile, known, lower)
