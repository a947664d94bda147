"""Flags for the engine and the server, made from their config classes, and configs made from
their values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxserve.settings.options import Option, make, options_of
from jaxserve.settings.schema import (
    AdapterConfig,
    CacheConfig,
    DraftConfig,
    EngineConfig,
    ModelSource,
    SchedulerConfig,
    ServerConfig,
)
from jaxserve.settings.schema.engine import AUTOMATIC
from jaxserve.settings.schema.mesh import degree_options

ALL = options_of(EngineConfig)


def _of(config: type, *others: str) -> list[Option]:
    return [*options_of(config).values(), *(ALL[name] for name in others)]


ENGINE = {
    "model": [*_of(ModelSource, "mesh"), *degree_options().values()],
    "cache": _of(CacheConfig),
    "scheduling": _of(
        SchedulerConfig,
        *("profile", "lookahead", "layer_groups", "attention", "hang_timeout", "replay", "role"),
        *("compile_cache", "compile_all"),
    ),
    "adapters": _of(AdapterConfig),
    "draft model": _of(DraftConfig),
}
CONFIG = {
    "settings": [
        Option(
            "config",
            str,
            None,
            "YAML file with settings, by the names of flags; flags go before variables "
            "JAXSERVE_NAME, and these before "
            "the file; default: JAXSERVE_CONFIG, if that is set",
        ),
        Option(
            "print_config",
            bool,
            False,
            "print all settings as such a file, with where each is from, and exit",
        ),
    ]
}
# settings by which a server promises latencies to requests that state none
PROMISES = frozenset({"ttft", "ttft_stretch", "tpot", "tbt", "classes"})
SERVER = {"server": list(options_of(ServerConfig).values())}


def engine_groups(**defaults: Any) -> dict[str, list[Option]]:
    """Returns the engine's flags and those about settings files, by group; defaults: those that
    differ from the config's."""
    return {
        title: [dataclasses.replace(o, default=defaults.get(o.name, o.default)) for o in group]
        for title, group in {**ENGINE, **CONFIG}.items()
    }


def engine_config(values: Mapping[str, Any], **instead: Any) -> EngineConfig:
    """The engine's settings among the values of a command; instead: other values of some. Settings
    that were not given, and whose defaults are the config's, are left to the machine. Objectives
    that were given are kept for all requests, unless it was said what to do with late ones."""
    origins = getattr(values, "origins", values)
    if values["admission"] == "stated" and "admission" not in origins:
        instead = {"admission": "stated" if PROMISES.isdisjoint(origins) else "predict"} | instead
    settings = {
        name
        for name in ALL
        if name not in instead
        and (
            name in origins or name not in AUTOMATIC or str(values[name]) != str(ALL[name].default)
        )
    }
    return make(EngineConfig, {name: values[name] for name in settings} | instead)


def server_config(values: Mapping[str, Any]) -> ServerConfig:
    return make(ServerConfig, {name: values[name] for name in options_of(ServerConfig)})
