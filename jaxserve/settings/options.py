"""The nested settings of `config` under flat names, for keyword arguments and for flags."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from typing import Any

from jaxserve.settings.schema import ConfigError, MeshConfig


@dataclasses.dataclass(frozen=True)
class Option:
    """One setting. kind: int, float, bool, str or MeshConfig; limits are inclusive; None as default
    stands for 'not given'."""

    name: str
    kind: type
    default: Any
    help: str
    low: Any = None
    high: Any = None
    choices: tuple = ()


def options_of(config: type) -> dict[str, Option]:
    """Every setting of a config class and of those inside it, by name. A mesh is one setting."""
    found: dict[str, Option] = {}
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        kind = _plain(hints[field.name])
        if kind is MeshConfig:
            found[field.name] = Option(
                field.name, kind, field.default, "degrees of the mesh axes: stages, lanes, ranks"
            )
        elif dataclasses.is_dataclass(kind):
            found |= options_of(kind)
        else:
            found[field.name] = Option(field.name, kind, field.default, **field.metadata)
    return found


def make(config: type, values: Mapping[str, Any]) -> Any:
    """The config with these settings; those left out keep their defaults. Errors: ConfigError for
    an unknown name or a wrong value."""
    options = options_of(config)
    for name, value in values.items():
        if name not in options:
            near = difflib.get_close_matches(name, options, 1)
            raise ConfigError(
                name,
                f"unknown setting; {f'did you mean {near[0]}' if near else 'known are ' + ', '.join(options)}?",
            )
        _check_kind(options[name], value)
    return _made(config, values)


def _made(config: type, values: Mapping[str, Any]) -> Any:
    hints = typing.get_type_hints(config)
    given = {}
    for field in dataclasses.fields(config):
        kind = _plain(hints[field.name])
        if kind is MeshConfig:
            given[field.name] = _mesh(field.name, values.get(field.name, field.default))
        elif dataclasses.is_dataclass(kind):
            given[field.name] = _made(kind, values)
        elif field.name in values:
            given[field.name] = values[field.name]
    return config(**given)


def _mesh(name: str, value: str | MeshConfig) -> MeshConfig:
    if isinstance(value, MeshConfig):
        return value
    try:
        return MeshConfig.parse(value)
    except ConfigError as error:  # of an axis: name the setting too
        raise error if error.field == name else ConfigError(name, str(error)) from None


def _check_kind(option: Option, value: Any) -> None:
    allowed = {float: (int, float), MeshConfig: (str, MeshConfig)}.get(option.kind, (option.kind,))
    right = isinstance(value, allowed) and (option.kind is bool or not isinstance(value, bool))
    if not right and not (value is None and option.default is None):
        raise ConfigError(option.name, f"must be of type {option.kind.__name__}, not {value!r}")


def _plain(hint: Any) -> type:
    """`int` of `int | None`."""
    if isinstance(hint, types.UnionType):
        (hint,) = (arg for arg in typing.get_args(hint) if arg is not type(None))
    return hint
