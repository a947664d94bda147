"""Settings of a draft model as a replica of its own, and what it takes of a device."""

from __future__ import annotations

import dataclasses

from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.page_groups import page_windows
from jaxserve.settings.schema import (
    CacheConfig,
    ConfigError,
    EngineConfig,
    MeshConfig,
    ModelSource,
    SchedulerConfig,
)

MOST_CHUNK = 512  # tokens of a step in which it catches up with a text


def draft_source(config: EngineConfig) -> ModelSource:
    """Returns the model that the settings name. Errors: ConfigError where none is named."""
    name = config.draft.draft_model
    if name is None:
        raise ConfigError("draft_model", "is not given")
    dtype = config.source.dtype
    return ModelSource(
        model=name,
        revision=config.draft.draft_revision,
        dtype=dtype,
        quantization=config.draft.draft_quantization,
    )


def draft_replica(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """Returns the settings of a draft model on one device, with pages for `draft_context` tokens of
    `draft_seqs` sequences. model: as its checkpoint says. Errors: ConfigError for one that cannot
    propose."""
    draft = config.draft
    if model.has_states:
        raise ConfigError(
            "draft_model",
            f"{model.name} keeps states, which cannot be taken back with wrong tokens",
        )
    places = min(draft.draft_seqs, config.scheduler.max_seqs)
    longest = config.source.max_model_len or draft.draft_context
    capacity = min(draft.draft_context, model.max_len, longest)
    least = 2 * (config.scheduler.draft_tokens + 1)
    if capacity < least:
        reason = f"sees {capacity} tokens; with these draft_tokens at least {least} are needed"
        raise ConfigError("draft_model", reason)
    size = config.cache.block_size
    pages = places * -(-capacity // size) * (1 + len(page_windows(model)))
    chunk = min(MOST_CHUNK, capacity)
    source = draft_source(config)
    return EngineConfig(
        source=dataclasses.replace(source, max_model_len=capacity),
        mesh=MeshConfig(),
        cache=CacheConfig(block_size=size, pages=pages, prefix_caching=False),
        # a policy by which its steps are timed, where the replica's are
        scheduler=SchedulerConfig(max_seqs=places, chunk_tokens=chunk, policy="slack"),
        profile="auto" if config.timed else "none",
        attention=config.attention,
        compile_cache=config.compile_cache,
    )
