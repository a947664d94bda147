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
    """Refuses settings by which blocks of KV would have to bring a sequence back without its state,
    or by which several lanes would compute its tokens. Errors: ConfigError that names the
    setting."""
    cache = config.cache
    scheduler = config.scheduler
    blocks = f"{model.name} also keeps states, which do not come back with blocks of KV"
    tokens = f"{model.name} keeps states, so that one lane computes all tokens of a sequence"
    at_home = [row.name for row in EXCHANGES.values() if not row.settled]
    for name, refused, reason in (
        ("host_cache_gib", cache.host_cache_gib > 0, blocks),
        ("prefix_copies", cache.prefix_copies, blocks),
        ("role", config.role != "mixed", blocks),
        ("planner", scheduler.planner != "none", tokens),
        (
            "exchange",
            scheduler.exchange not in at_home,
            f"{tokens}; one of {', '.join(at_home)} does so",
        ),
    ):
        if refused:
            raise ConfigError(name, reason)


def note_uncached_prefixes(config: EngineConfig, plan: StagePlan) -> None:
    """Logs where prefixes are computed again although the settings want them cached, for states
    cannot be kept."""
    if config.cache.prefix_caching and plan.model.has_states and not plan.state_pages:
        notes.warning(
            "%s keeps states, and a stage or group of its layers has no pages to keep copies of "
            "them on: prefixes are computed again (no prefix caching)",
            plan.model.name,
        )
