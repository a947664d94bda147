"""Sizes of an EAGLE-3 draft head, and the layers of its model before which it takes states."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxserve.checkpoint.eagle import EagleConfig
from jaxserve.checkpoint.fetch import local_files
from jaxserve.checkpoint.model import ModelConfig
from jaxserve.engine.eagle_programs import EagleSizes
from jaxserve.settings.schema import ConfigError, EngineConfig
from jaxserve.weights.eagle import eagle_elements, read_eagle_config

MOST_CHUNK = 512  # rows of a launch that catches up with a text


def head_of(config: EngineConfig) -> EagleConfig | None:
    """Reads what the draft head of the settings says of itself; None where they name none. Errors:
    CheckpointError."""
    draft = config.draft
    if config.scheduler.drafts != "eagle3" or draft.draft_model is None:
        return None
    folder = local_files(draft.draft_model, progress=False, revision=draft.draft_revision)
    return read_eagle_config(folder)


def captured_layers(config: EngineConfig, model: ModelConfig) -> tuple[int, ...]:
    """Returns the layers before which steps keep hidden states, if settings name a draft head.
    Errors: CheckpointError."""
    head = head_of(config)
    return () if head is None else head.layers_of(model)


def eagle_sizes(config: EngineConfig, head: EagleConfig, longest: int, dtype: Any) -> EagleSizes:
    """Returns the sizes of a head's places. longest: tokens of a sequence. Errors: ConfigError for
    places that are too small."""
    draft = config.draft
    tokens = config.scheduler.draft_tokens
    capacity = min(draft.draft_context, longest, head.max_len)
    least = 4 * (tokens + 1)
    if capacity < least:
        reason = f"sees {capacity} tokens; with these draft_tokens at least {least} are needed"
        raise ConfigError("draft_model", reason)
    return EagleSizes(
        places=min(draft.draft_seqs, config.scheduler.max_seqs),
        capacity=capacity,
        most=tokens,
        chunk=min(MOST_CHUNK, capacity),
        dtype=dtype,
    )


def eagle_bytes(head: EagleConfig, sizes: EagleSizes) -> int:
    """Bytes that a head takes of its device."""
    row = head.d_model + 2 * head.kv_heads * head.head_dim
    elements = eagle_elements(head) + sizes.places * sizes.capacity * row
    return np.dtype(sizes.dtype).itemsize * elements
