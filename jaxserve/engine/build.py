"""From settings to a running replica: checkpoint, sizes, weights, programs."""

from __future__ import annotations

import dataclasses
import math

import jax
import ml_dtypes
import numpy as np

from jaxserve.cache import CacheManager
from jaxserve.checkpoint.zoo import ModelConfig, layers_of
from jaxserve.engine.arrays import sample_sizes, shapes
from jaxserve.engine.engine import Engine
from jaxserve.engine.profiling.profile_file import EngineProfile, profile_for
from jaxserve.engine.programs import keep_compiled
from jaxserve.engine.stages import StagePlan, Stages
from jaxserve.kernels.kv_pages import FP8, pool_shapes
from jaxserve.progress import progress_bar
from jaxserve.scheduling import Scheduler
from jaxserve.scheduling.planning.lanes import LanePlanner
from jaxserve.settings.schema import ConfigError, EngineConfig
from jaxserve.sharding.exchange import EXCHANGES
from jaxserve.sharding.mesh import ensure_devices
from jaxserve.weights import load, open_checkpoint

IMPROVEMENT = 0.1  # share of a prompt's time that more lanes must save, where nobody knows better
DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def build(
    config: EngineConfig, progress: bool = True, warm_up: bool = True, profiled: bool = True
) -> Engine:
    """An engine that is ready to start. profiled: with the profile that its settings ask for.

    Errors: ConfigError for settings that cannot work, CheckpointError for a checkpoint that cannot
    be read.
    """
    checkpoint = open_checkpoint(config.source.model)
    model = checkpoint.config.with_tp(config.mesh.tp)
    plan = make_plan(config, model)
    ensure_devices(config.mesh.devices)
    keep_compiled(config.compile_cache)
    stages = Stages(
        plan,
        lambda declared, shardings: load(
            checkpoint, model, declared, shardings, plan.dtype, progress
        ),
    )
    if warm_up:
        with progress_bar("compiling", len(dict(stages.all_programs())), progress) as step:
            stages.warm_up(step)
    sized = dataclasses.replace(config.cache, pages=plan.pages)
    stored = f"{config.source.dtype} {plan.kv_dtype}"
    cache = CacheManager(
        sized,
        config.mesh.kvp,
        plan.slots,
        str(checkpoint.config),
        stored,
        stripe=config.scheduler.stripe(config.cache.block_size),
    )
    scheduler = Scheduler(
        config.scheduler, cache, config.mesh, max_length(config, model), model.eos_ids
    )
    engine = Engine(config, stages, scheduler, model.eos_ids)
    if profiled and (profile := profile_for(engine, progress)):
        _use(engine, profile)
    return engine


def _use(engine: Engine, profile: EngineProfile) -> None:
    """What the engine decides by what steps cost."""
    config = engine.config.scheduler
    engine.scheduler.use(profile.costs)
    if config.exchange not in EXCHANGES and engine.config.mesh.kvp > 1:
        engine.exchange = profile.exchange(engine)
    if engine.stages.plan.moves:
        rates = profile.improvement.get(config.planner) or {0.0: IMPROVEMENT}
        rates = rates if config.improvement is None else {0.0: config.improvement}
        engine.scheduler.packer.planner = LanePlanner(
            config.planner, profile.instances(engine), rates
        )


def make_plan(config: EngineConfig, model: ModelConfig) -> StagePlan:
    """What the stages need, from the settings and the model (after `with_tp`)."""
    dtype = DTYPES[config.source.dtype]
    size = config.cache.block_size
    length = max_length(config, model)
    layers = max(map(len, layers_of(model, config.mesh.spp)))
    blocks = -(-length // size)
    kv_dtype = FP8 if config.cache.kv_cache_dtype == "fp8" else dtype
    pages = config.cache.pages
    if pages is None:
        one = pool_shapes((2, model.kv_heads // config.mesh.tp, size, model.head_dim), kv_dtype)
        page = layers * sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(one))
        pages = min(
            int(config.cache.kv_memory_gib * 2**30) // page, blocks * config.scheduler.max_seqs
        )
        if pages < 2:
            said = f"{config.cache.kv_memory_gib} GiB hold {pages} pages of {page} bytes; at least 2 are needed"
            raise ConfigError("kv_memory_gib", said)
    return StagePlan(
        model,
        config.mesh,
        dtype,
        kv_dtype,
        pages,
        size,
        config.scheduler.max_seqs,
        min(blocks, pages),
        shapes(config.scheduler, config.mesh.kvp),
        sample_sizes(config.scheduler),
        moves=config.scheduler.planner != "none" and config.mesh.kvp > 1,
    )


def max_length(config: EngineConfig, model: ModelConfig) -> int:
    """Most tokens of a sequence. Errors: ConfigError where the model cannot have so many."""
    length = config.source.max_model_len
    if length is not None and length > model.max_len:
        raise ConfigError("max_model_len", f"{length} is above the model's limit {model.max_len}")
    return length or model.max_len
