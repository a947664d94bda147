"""Refuses settings that a model with states does not go with, and says what it goes without."""

from __future__ import annotations

import logging

from jaxserve.api.log_once import LogOnce
from jaxserve.checkpoint.model import ModelConfig
from jaxserve.engine.stage_plan import StagePlan
from jaxserve.lanes.exchange import EXCHANGES
from jaxserve.settings.schema import ConfigError, EngineConfig

notes = LogOnce(logging.getLogger(__name__))


def check_states(config: EngineConfig, model: ModelConfig) -> None:
    """Refuses settings by which blocks of KV would have to bring a sequence to a lane without its
    state, or by which several lanes would compute its tokens. Errors: ConfigError that names the
    setting."""
    cache = config.cache
    scheduler = config.scheduler
    blocks = f"{model.name} also keeps states, which are not copied with blocks of KV"
    tokens = f"{model.name} keeps states, so that one lane computes all tokens of a sequence"
    at_home = [row.name for row in EXCHANGES.values() if not row.settled]
    for name, refused, reason in (
        ("prefix_copies", cache.prefix_copies, blocks),
        ("planner", scheduler.planner != "none", tokens),
        (
            "exchange",
            scheduler.exchange not in at_home,
            f"{tokens}; one of {', '.join(at_home)} does so",
        ),
    ):
        if refused:
            raise ConfigError(name, reason)


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
