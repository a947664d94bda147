"""Flags of the engine and of the server, from their config classes, and the way back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxserve.config import CacheConfig, EngineConfig, ModelSource, SchedulerConfig, ServerConfig
from jaxserve.options import Option, make, options_of

ALL = options_of(EngineConfig)


def _of(config: type, *others: str) -> list[Option]:
    return [*options_of(config).values(), *(ALL[name] for name in others)]


ENGINE = {
    "model": _of(ModelSource, "mesh"),
    "cache": _of(CacheConfig),
    "scheduling": _of(SchedulerConfig, "profile", "lookahead", "hang_timeout", "compile_cache"),
}
SERVER = {"server": list(options_of(ServerConfig).values())}


def engine_groups(**defaults: Any) -> dict[str, list[Option]]:
    """The engine's flags, some of them with other defaults."""
    return {title: [dataclasses.replace(o, default=defaults.get(o.name, o.default)) for o in group] for title, group in ENGINE.items()}


def engine_config(values: Mapping[str, Any]) -> EngineConfig:
    return make(EngineConfig, {name: values[name] for name in ALL})


def server_config(values: Mapping[str, Any]) -> ServerConfig:
    return make(ServerConfig, {name: values[name] for name in options_of(ServerConfig)})
