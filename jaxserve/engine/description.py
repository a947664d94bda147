"""Description of a live replica: its model and sizes, and the readings of its tiers."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxserve.cache.tiers import LowerTiers, TierCounts
from jaxserve.checkpoint.generation_config import sampling_defaults
from jaxserve.engine.executor import CommandExecutor
from jaxserve.replica.info import ReplicaInfo
from jaxserve.scheduling import Scheduler
from jaxserve.scheduling.prefill_facts import prefill_facts
from jaxserve.settings.schema import EngineConfig


def replica_info(
    config: EngineConfig, worker: CommandExecutor, scheduler: Scheduler
) -> ReplicaInfo:
    """Describes a live replica with these settings and devices."""
    plan = worker.plan
    model = plan.model
    return ReplicaInfo(
        served_name=(config.source.served_model_name or (config.source.model,))[0],
        other_names=config.source.served_model_name[1:],
        model=model.name,
        vocab=model.vocab,
        layers=model.layers,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        d_model=model.d_model,
        kv_bytes_per_token=model.kv_bytes_per_token(np.dtype(plan.kv_dtype).itemsize),
        bos_id=model.bos_id,
        eos_ids=model.eos_ids,
        max_model_len=scheduler.max_len,
        mesh=plan.mesh,
        dtype=str(np.dtype(plan.dtype)),
        kv_dtype=str(np.dtype(plan.kv_dtype)),
        platform=worker.platform,
        block_size=plan.block_size,
        pages_per_lane=plan.pages // plan.page_groups,
        max_seqs=plan.slots,
        max_queue=config.scheduler.max_queue,
        chunk_tokens=config.scheduler.chunk_tokens,
        class_names=tuple(config.scheduler.class_names),
        settings=dataclasses.asdict(config),
        role=config.role,
        cache_fingerprint=scheduler.cache.identity.fingerprint,
        cache_dtype=scheduler.cache.identity.dtype,
        cache_layout=scheduler.cache.identity.layout,
        page_windows=tuple(plan.windows),
        sampling_defaults=sampling_defaults(config.source, model.sampling),
        prefill=prefill_facts(scheduler),
    )


def tier_readings(tiers: LowerTiers | None) -> dict[str, float]:
    """Returns the values of `metric_rows.READ` that the tiers below the devices know."""
    counts = TierCounts()
    if tiers is not None:
        counts = tiers.counts()
    return {
        "kv_blocks_stored": counts.stored,
        "kv_blocks_from_host": counts.host_reads,
        "kv_blocks_from_disk": counts.disk_reads,
        "kv_blocks_from_peers": counts.peer_reads,
        "kv_blocks_from_store": counts.shared_reads,
        "kv_blocks_to_store": counts.to_shared,
        "kv_blocks_not_put": counts.shared_dropped,
        "kv_blocks_prefetched": counts.prefetched,
        "kv_blocks_wrong": counts.wrong,
        "kv_blocks_in_host": counts.host_blocks,
        "kv_blocks_on_disk": counts.disk_blocks,
    }


def transfer_readings(tiers: LowerTiers | None) -> dict[tuple[str, str], dict[str, float]]:
    """Returns the values of `metric_rows.OF_TRANSFERS` by the replica that KV was asked of and by
    plane."""
    if tiers is None:
        return {}
    return {
        (one.source, one.plane): {
            "kv_transfer_blocks": one.blocks,
            "kv_transfer_missed": one.missed,
            "kv_transfer_bytes": one.blocks * tiers.block_bytes,
            "kv_transfer_seconds": one.seconds,
            "kv_transfer_bytes_per_second": one.bytes_per_s,
        }
        for one in tiers.fetched()
    }
