"""Refuses settings that a model with states does not go with, and says what it goes without."""

from __future__ import annotations

import logging

from jaxserve.api.log_once import LogOnce
from jaxserve.checkpoint.model import ModelConfig
from jaxserve.engine.stage_plan import StagePlan
from jaxserve.lanes.planner import ELASTIC
from jaxserve.settings.schema import ConfigError, EngineConfig

notes = LogOnce(logging.getLogger(__name__))


def check_states(config: EngineConfig, model: ModelConfig) -> None:
    """Refuses settings by which blocks of KV would bring a sequence to a lane without its state, or
    its state would go on with tokens that do not count. Errors: ConfigError that names the
    setting."""
    keeps = f"{model.name} also keeps states"
    if config.cache.prefix_copies:
        raise ConfigError("prefix_copies", f"{keeps}, which are not copied with blocks of KV")
    if config.scheduler.drafts != "none":
        raise ConfigError("drafts", f"{keeps}, which cannot be taken back with wrong tokens")
    if config.scheduler.planner == ELASTIC:
        reason = f"{keeps}, and {ELASTIC} chooses lanes by the blocks of a prefix alone"
        raise ConfigError("planner", reason)


def check_checkpoints(config: EngineConfig, plan: StagePlan) -> None:
    """Checks what needs copies of states where these cannot be kept, and logs that prefixes are
    computed again. Errors: ConfigError that names the setting."""
    if not plan.model.has_states or plan.state_pages:
        return
    reason = (
        f"{plan.model.name} keeps states, and a stage or group of its layers has no pages to keep "
        "copies of them on"
    )
    for name, refused in (
        ("host_cache_gib", config.cache.host_cache_gib > 0),
        ("role", config.role != "mixed"),
    ):
        if refused:
            raise ConfigError(name, f"{reason}, which would have to come with blocks of KV")
    if config.cache.prefix_caching:
        notes.warning("%s: prefixes are computed again (no prefix caching)", reason)
