"""Makes a worker: what reads its part of the weights, and the tiers below its pages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import jax

import jaxserve
from jaxserve.cache.hashes import CacheIdentity, root_key
from jaxserve.checkpoint.fetch import local_files
from jaxserve.checkpoint.fingerprint import fingerprint
from jaxserve.checkpoint.model import ModelConfig, layers_of, split
from jaxserve.checkpoint.page_groups import page_layout, page_windows
from jaxserve.clock import WallClock
from jaxserve.engine.attention_check import checked
from jaxserve.engine.block_layout import BlockLayout
from jaxserve.engine.memory import DeviceRoom
from jaxserve.engine.new_weights import open_new_weights
from jaxserve.engine.programs import keep_compiled
from jaxserve.engine.sizing import (
    kept_weights,
    make_plan,
    max_length,
    split_model,
    weights_dtype,
)
from jaxserve.engine.stages import Loader
from jaxserve.engine.worker import Worker
from jaxserve.group.channel import free_port
from jaxserve.group.member import this_member
from jaxserve.group.messages import Hello, shared_settings
from jaxserve.settings.schema import ConfigError, EngineConfig
from jaxserve.store.disk import DiskBlocks
from jaxserve.store.mooncake import MooncakeBlocks, address_towards, load_client
from jaxserve.store.peers import PeerBlocks
from jaxserve.store.shared import SharedTier
from jaxserve.store.tiered import TieredBlocks
from jaxserve.weights import load
from jaxserve.weights.adapters import AdapterFolder
from jaxserve.weights.checkpoint import Checkpoint
from jaxserve.weights.store import OrbaxFolder

STORE_SECONDS = 2.0  # of a call of the shared store


def make_worker(
    config: EngineConfig,
    checkpoint: Checkpoint | OrbaxFolder,
    progress: bool,
    peers: PeerBlocks | None = None,
) -> tuple[Worker, Loader]:
    """Makes a worker of the stages that have devices in this process, and what reads their weights
    when it starts. Attention is checked first on devices other than CPUs, whose kernel is tested
    where it is built, and where it was chosen by name. Errors: ConfigError."""
    if config.cache.kv_store_master is not None:
        load_client()  # refused before weights are read
    model = split_model(config, checkpoint.config)
    plan = make_plan(config, model, kept=kept_weights(config, checkpoint))
    keep_compiled(config.compile_cache)
    if plan.attention is not None or DeviceRoom.here().platform != "cpu":
        plan = checked(plan, fails_over=this_member() is None)
    tiers = _tiers(config, checkpoint.config) if config.cache.host_cache_gib else None
    open_adapter = None
    if plan.adapters is not None:
        open_adapter = functools.partial(
            AdapterFolder, model=checkpoint.config, max_rank=plan.adapters.rank
        )
    open_weights = functools.partial(open_new_weights, config, checkpoint.config, plan)
    kv_heads = checkpoint.config.kv_heads
    worker = Worker(plan, tiers, kv_heads, peers, open_adapter, open_weights)
    return worker, lambda declared, shardings: load(
        checkpoint, model, declared, shardings, plan.dtype, progress
    )


def _tiers(config: EngineConfig, model: ModelConfig) -> Callable[[BlockLayout], TieredBlocks]:
    """Returns what makes the tiers below the devices for blocks, or parts of them, which raises
    ConfigError where they cannot be."""

    def make(layout: BlockLayout) -> TieredBlocks:
        block_bytes = layout.bytes
        slots = int(config.cache.host_cache_gib * 2**30) // block_bytes
        if slots < 2:
            fault = f"{config.cache.host_cache_gib} GiB hold {slots} blocks of {block_bytes} bytes"
            raise ConfigError("host_cache_gib", f"{fault}; at least 2 are needed")
        root = root_key(cache_identity(config, model), config.cache.block_size, "")
        identity = root + layout.name.encode()
        shared = _shared(config, block_bytes, identity)  # refused before a folder is taken
        disk = _disk(config, block_bytes, identity)
        return TieredBlocks(slots, block_bytes, WallClock(), disk, shared)

    return make


def _shared(config: EngineConfig, block_bytes: int, identity: bytes) -> SharedTier | None:
    """Opens the store that replicas share, if the settings name one. Errors: ConfigError."""
    master = config.cache.kv_store_master
    if master is None:
        return None
    store = MooncakeBlocks(master, block_bytes, address_towards(master), identity, STORE_SECONDS)
    return SharedTier(store, block_bytes)


def _disk(config: EngineConfig, block_bytes: int, identity: bytes) -> DiskBlocks | None:
    """Opens the folder for blocks on disk, if the settings name one. Errors: ConfigError."""
    if config.cache.disk_folder is None:
        return None
    folder, gib = config.cache.disk_folder
    return DiskBlocks(folder, int(gib * 2**30), block_bytes, identity)


def cache_identity(config: EngineConfig, model: ModelConfig) -> CacheIdentity:
    """Names what a block depends on besides tokens: model and weights, the types of numbers, and
    its layout. model: the checkpoint's, whose longrope depends on the longest sequence that is
    served."""
    longest = max_length(config, model)
    model = replace(model, ropes=tuple(rope and rope.served(longest) for rope in model.ropes))
    types = (
        f"{weights_dtype(config, model)} {config.source.quantization} {config.cache.kv_cache_dtype}"
    )
    ranks = config.mesh.tp
    windows = page_windows(model.repeated(ranks))
    stages = layers_of(model, config.mesh.spp)
    parts = [part for stage in stages for part in split(stage, config.layer_groups)]
    layout = page_layout(windows, parts, ranks * model.has_states, ranks * bool(model.layer_sizes))
    return CacheIdentity(f"{model} {weights_id(config)}", types, layout)


def weights_id(config: EngineConfig) -> str:
    """Fingerprint of the weights; the name of random ones."""
    source = config.source.model
    if source.startswith("random:"):
        return source
    return fingerprint(local_files(source, progress=False, revision=config.source.revision))


def hello_of(config: EngineConfig, worker: int, host: str = "") -> Hello:
    """Makes the message with which a member with these settings joins. Errors: ConfigError."""
    weights = weights_id(config)
    versions = {"jaxserve": jaxserve.__version__, "jax": jax.__version__}
    return Hello(worker, versions, shared_settings(config), weights, free_port(host))
