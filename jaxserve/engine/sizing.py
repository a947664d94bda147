"""Sizes of a replica's stages: pages, page tables and compiled shapes, from settings and model."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable

import jax
import ml_dtypes
import numpy as np

from jaxserve.checkpoint.model import ModelConfig, declare, layers_of
from jaxserve.checkpoint.page_groups import page_windows, pool_count, pool_page, share_pages
from jaxserve.engine.draft_sizing import draft_replica, draft_source
from jaxserve.engine.eagle_sizing import captured_layers, eagle_bytes, eagle_sizes, head_of
from jaxserve.engine.machine import fitted
from jaxserve.engine.memory import DeviceRoom, claim, kv_bytes, sizes, state_bytes
from jaxserve.engine.stage_plan import StagePlan
from jaxserve.engine.state_limits import check_checkpoints, check_states
from jaxserve.engine.step_shapes import sample_sizes, shapes
from jaxserve.group.member import this_member
from jaxserve.kernels import ops
from jaxserve.kernels.kv_pages import FP8, pool_shapes
from jaxserve.settings.schema import ConfigError, EngineConfig, MeshConfig
from jaxserve.sharding.mesh import KVP, TP, ensure_devices
from jaxserve.weights import open_checkpoint
from jaxserve.weights.checkpoint import Checkpoint
from jaxserve.weights.kept import Kept, KeptParameter
from jaxserve.weights.quantise import METHODS
from jaxserve.weights.store import OrbaxFolder

log = logging.getLogger(__name__)
LEAST_BLOCKS = 2
DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def for_this_machine(config: EngineConfig) -> EngineConfig:
    """Chooses the settings that were not given, and logs the choices. Workers of a group follow
    their leader. Errors: ConfigError, CheckpointError."""
    member = this_member()
    share = config.cache.gpu_memory_utilization
    if member is None:
        claim(share, config.mesh.devices)  # before anything asks for devices, which makes them
        ensure_devices(config.mesh.devices)
        room = DeviceRoom.here()
        devices = jax.local_device_count()
    elif member.leads:
        room = DeviceRoom.of_machine(share, config.mesh.devices)
        devices = config.mesh.devices
    else:
        return config
    if room.platform == "cpu":
        return config
    model = open_checkpoint(config.source.model, config.source.revision).config
    if member is not None:  # what launches a group goes by its mesh
        given = (name for name in config.automatic if name != "mesh")
        config = dataclasses.replace(config, automatic=tuple(given))
    complete, choices = fitted(config, model, room, devices, kv_tokens(model, room))
    for choice in choices:
        log.info("chosen for %d x %s: %s", devices, room.platform, choice)
    if member is None:
        return complete
    plan = make_plan(complete, split_model(complete, model), room)
    return dataclasses.replace(
        complete, cache=dataclasses.replace(complete.cache, pages=plan.pages)
    )


def kv_tokens(model: ModelConfig, room: DeviceRoom) -> Callable[[EngineConfig], int]:
    """Returns what counts the tokens that all lanes of a replica have room for, however short their
    sequences are, by its config."""

    def count(config: EngineConfig) -> int:
        plan = make_plan(config, split_model(config, model), room)
        return plan.pages // plan.page_groups * plan.block_size * config.mesh.kvp

    return count


def split_model(config: EngineConfig, model: ModelConfig) -> ModelConfig:
    """Returns the model as the mesh splits it. Errors: ConfigError for degrees that do not
    divide."""
    source = config.source
    lanes = config.mesh.ffn_lanes(source.enable_expert_parallel, source.ffn_over_lanes)
    return model.with_tp(config.mesh.tp, *lanes)


def kept_weights(
    config: EngineConfig, checkpoint: Checkpoint | OrbaxFolder, room: DeviceRoom | None = None
) -> Kept | None:
    """Returns the weights that stay quantised on devices, if any may. room: as of `make_plan`.
    Errors: ConfigError where weights should be quantised and cannot be."""
    quantization = config.source.quantization
    if quantization == "none":
        return None
    reason = ops.quantised_unavailable((room or DeviceRoom.here()).platform)
    if quantization in METHODS and reason is not None:
        raise ConfigError("quantization", f"{quantization} is not possible here: {reason}")
    if isinstance(checkpoint, OrbaxFolder):
        if quantization in METHODS:
            raise ConfigError("quantization", "give the original checkpoint, not a saved folder")
        return None
    if reason is not None:
        log.info("quantised weights are dequantised at load: %s", reason)
        return None
    return Kept(checkpoint, checkpoint.config, quantization if quantization in METHODS else "")


def make_plan(
    config: EngineConfig,
    model: ModelConfig,
    room: DeviceRoom | None = None,
    kept: Kept | None = None,
) -> StagePlan:
    """Plans the stages, from the settings and the model (after `with_tp`). room: that of each
    device; None: as this process has them. kept: weights that may stay quantised. Errors:
    ConfigError."""
    room = room or DeviceRoom.here()
    if config.draft.draft_model is not None and room.bytes is not None:
        taken = draft_bytes(config, room.platform)
        if taken >= room.bytes:
            reason = f"takes {taken / 2**30:.1f} GiB of a device's {room.bytes / 2**30:.1f}"
            raise ConfigError("draft_model", reason)
        room = room.without(taken)
    if model.has_states:
        check_states(config, model)
    check_layers(config, model)
    model = dataclasses.replace(model, max_len=max_length(config, model))
    dtype = DTYPES[weights_dtype(config, model, room.platform)]
    size = config.cache.block_size
    lanes = config.mesh.kvp
    blocks = -(-model.max_len // size)
    windows = page_windows(model)
    plan = StagePlan(
        model,
        config.mesh,
        dtype,
        FP8 if config.cache.kv_cache_dtype == "fp8" else dtype,
        config.cache.pages or LEAST_BLOCKS,
        size,
        config.scheduler.max_seqs,
        blocks,
        shapes(
            config.scheduler,
            lanes,
            size,
            config.cache.pool(lanes),
            config.cache.copies,
            config.timed,
            1 + len(windows),
        ),
        sample_sizes(config.scheduler),
        kept_parameters(kept, model, config.mesh),
        config.layer_groups,
        None if config.attention == "auto" else config.attention,
        windows,
        config.scheduler.drafts != "none",
        config.adapter_room,
        captured_layers(config, model),
    )
    if config.cache.pages is None:
        plan = dataclasses.replace(plan, pages=_pages(config, plan, blocks, room))
    least = LEAST_BLOCKS * plan.page_groups
    if plan.pages < least:
        raise ConfigError(
            "pages",
            f"{plan.pages} on a lane are too few: a block takes {plan.page_groups}, one of each "
            f"group of layers, and at least {least} are needed",
        )
    plan = dataclasses.replace(plan, width=min(blocks, plan.pages))
    check_checkpoints(config, plan)
    return plan


@functools.cache
def draft_bytes(config: EngineConfig, platform: str) -> int:
    """Bytes that the draft model or head takes of a device of this platform. Errors: ConfigError,
    CheckpointError."""
    head = head_of(config)
    if head is not None:
        model = open_checkpoint(config.source.model, config.source.revision).config
        dtype = DTYPES[weights_dtype(config, model, platform)]
        return eagle_bytes(head, eagle_sizes(config, head, max_length(config, model), dtype))
    source = draft_source(config)
    checkpoint = open_checkpoint(source.model, source.revision)
    replica = draft_replica(config, checkpoint.config)
    room = DeviceRoom(platform, None)
    kept = kept_weights(replica, checkpoint, room)
    return sizes(make_plan(replica, split_model(replica, checkpoint.config), room, kept)).total


def check_layers(config: EngineConfig, model: ModelConfig) -> None:
    """Refuses settings that do not go with layers that differ in size, that read the pages of
    others, or that have inputs of their own. Errors: ConfigError that names the setting."""
    mesh = config.mesh
    alone = "which are made of tokens, in the first stage alone"
    reads = any(spec.has_pages and not spec.stores for spec in model.mixers)
    for field, refused, reason in (
        (
            "kv_cache_dtype",
            share_pages(model) and config.cache.kv_cache_dtype == "fp8",
            "fp8 is not possible where layers with heads of several sizes share pages",
        ),
        (
            "mesh",
            model.layer_input is not None and (mesh.spp > 1 or config.layer_groups > 1),
            f"layers of {model.name} have inputs of their own, {alone}: spp=1 and layer_groups=1",
        ),
        (
            "mesh",
            reads and mesh.kvp > 1,
            f"layers of {model.name} read the keys and values of others, which are on one lane "
            "only: kvp=1",
        ),
    ):
        if refused:
            raise ConfigError(field, reason)


def kept_parameters(
    kept: Kept | None, model: ModelConfig, mesh: MeshConfig
) -> dict[str, KeptParameter]:
    """Returns the parameters of all layers that stay quantised, by path."""
    if kept is None:
        return {}
    declared = declare(model, range(model.layers), mesh.tp)
    return kept.parameters(declared, model, {KVP: mesh.kvp, TP: mesh.tp})


def _pages(config: EngineConfig, plan: StagePlan, blocks: int, room: DeviceRoom) -> int:
    """Counts the pages of a lane, for sequences of at most `blocks` blocks. Errors: ConfigError
    where a device holds too few."""
    model = plan.model
    whole = pool_page(model)
    heads = whole.heads // plan.mesh.tp
    one = pool_shapes((whole.vectors, heads, plan.block_size, whole.numbers), plan.kv_dtype)
    page = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(one))
    given = config.cache.kv_memory_gib
    total = kv_bytes(plan, given, config.cache.gpu_memory_utilization, room)
    stages = layers_of(model, plan.mesh.spp)
    pools = [pool_count(model, plan.windows, stage, plan.layer_groups) for stage in stages]
    pages = min(
        (total - state_bytes(plan, stage)) // (page * max(count, 1))
        for stage, count in zip(stages, pools)
    )
    if room.bytes is None or given is not None:  # more than all sequences can fill is for prefixes
        pages = min(pages, blocks * plan.slots * plan.page_groups)
    least = LEAST_BLOCKS * plan.page_groups
    if pages < least:
        states = max(state_bytes(plan, stage) for stage in stages)
        beside = f" beside {states} bytes of states of {plan.slots} sequences" if states else ""
        fault = (
            f"{total / 2**30:g} GiB hold {max(pages, 0)} pages of {max(pools) * page} bytes"
            f"{beside}; at least {least} are needed"
        )
        raise ConfigError("kv_memory_gib", fault)
    return pages


def max_length(config: EngineConfig, model: ModelConfig) -> int:
    """Most tokens of a sequence. Errors: ConfigError for more than the model can have."""
    length = config.source.max_model_len
    limit = max(rope.longest(model.max_len) if rope else model.max_len for rope in model.ropes)
    if length is not None and length > limit:
        raise ConfigError("max_model_len", f"{length} is above the model's limit {limit}")
    return length or model.max_len


def weights_dtype(config: EngineConfig, model: ModelConfig, platform: str | None = None) -> str:
    """The type of weights: where the settings leave it open, that of the checkpoint, but float32 on
    CPUs, where tokens are then the same for every mesh and batch, and bfloat16 in place of float32
    on GPUs, whose kernels have no float32. platform: None for that of this process."""
    if config.source.dtype != "auto":
        return config.source.dtype
    if (platform or DeviceRoom.here().platform) == "cpu":
        return "float32"
    return "bfloat16" if model.stored == "float32" else model.stored
