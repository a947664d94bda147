"""The settings of config classes under flat names, for keyword arguments and for flags."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from jaxserve.api.errors import ConfigError
from jaxserve.settings import renamed
from jaxserve.settings.fields import Option, kinds_of, own_options, parsed
from jaxserve.settings.schema import EngineConfig, MeshConfig
from jaxserve.settings.schema.engine import AUTOMATIC
from jaxserve.settings.schema.mesh import degree_options, with_mesh

__all__ = ["Option", "make", "near", "options_of", "values_of"]

Config = TypeVar("Config")


def options_of(config: type) -> dict[str, Option]:
    """Every setting of a config class and of those inside it, by name. A mesh is one setting."""
    options = {option.name: option for option in own_options(config)}
    made_options: dict[str, Option] = {}
    for field in dataclasses.fields(config):
        kind = kinds_of(config)[field.name]
        if field.name in options:
            made_options[field.name] = options[field.name]
        elif kind is MeshConfig:
            made_options[field.name] = Option(field.name, kind, field.default, MeshConfig.HELP)
        elif dataclasses.is_dataclass(kind):
            made_options |= options_of(kind)
    return made_options


def make(config: type[Config], values: Mapping[str, Any]) -> Config:
    """The config with these settings; those left out keep their defaults, and are `automatic` where
    the config has such.

    Errors: ConfigError for an unknown name or a value that cannot be used.
    """
    options = options_of(config)
    if "mesh" in options:
        options |= degree_options()
    given: dict[str, Any] = {}
    for name, value in values.items():
        today = renamed.current_name(name)
        if today not in options:
            raise ConfigError(name, f"unknown setting{near(name, options)}")
        try:
            given[today] = options[today].check(value)
        except ValueError as error:
            raise ConfigError(today, str(error)) from None
    if "mesh" in options:
        given = with_mesh(given, given)
    instance = _made(config, given)
    if isinstance(instance, EngineConfig):
        return dataclasses.replace(instance, automatic=tuple(sorted(AUTOMATIC - given.keys())))
    return instance


def values_of(config: Any) -> dict[str, Any]:
    """The inverse of `make`: all settings by name, a mesh as text."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, MeshConfig):
            values[field.name] = str(value)
        elif dataclasses.is_dataclass(value):
            values |= values_of(value)
        elif field.metadata:
            values[field.name] = value
    return values


def _made(config: type[Config], values: Mapping[str, Any]) -> Config:
    given = {}
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        kind = kinds_of(config)[field.name]  # type: ignore[arg-type]
        if field.name in values:
            given[field.name] = parsed(kind, values[field.name])
        elif dataclasses.is_dataclass(kind) and kind is not MeshConfig:
            given[field.name] = _made(kind, values)
    return config(**given)


def near(name: str, known: Collection[str]) -> str:
    """'; did you mean NAME?' where a known name is much like this one, else ''."""
    matches = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {matches[0]}?" if matches else ""
