"""The points of a sweep: settings of a replica and the load that it is measured under.

A point is flat: names of flags (`mesh`, `policy`, `chunk_tokens`, ...) beside those of `Load`. What
a grid leaves out has the default of a server.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from jaxserve.lab.research.load import LOAD, Load
from jaxserve.settings.fields import Option
from jaxserve.settings.options import make, near, options_of
from jaxserve.settings.schema import ConfigError, EngineConfig
from jaxserve.settings.schema.engine import SERVED

MAX_POINTS = 10_000
Values = Mapping[str, Any]
ALL = options_of(EngineConfig)


@dataclasses.dataclass(frozen=True)
class Point:
    """A replica's settings, by the names of flags, and its load."""

    settings: Values
    load: Load

    @classmethod
    def of(cls, given: Values) -> Point:
        """Makes a point of settings and load. Errors: ConfigError for a name that is no setting, or
        an impossible load."""
        options = {**ALL, **LOAD}
        values = {}
        for name, value in given.items():
            if name not in options:
                raise ConfigError(name, f"unknown setting{near(name, options)}")
            try:
                values[name] = _checked(options[name], value)
            except ValueError as error:
                raise ConfigError(name, str(error)) from None
        load = {name: value for name, value in values.items() if name in LOAD}
        return cls({name: values[name] for name in values if name not in LOAD}, Load(**load))

    @property
    def given(self) -> dict[str, Any]:
        """All that tells this point from others, flat."""
        return {**self.settings, **dataclasses.asdict(self.load)}

    @property
    def key(self) -> str:
        """A name that equal points share, whichever sweep they are of."""
        text = json.dumps(self.given, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def config(self) -> EngineConfig:
        """The replica's settings, with the defaults of servers; all requests queue. Errors:
        ConfigError."""
        return make(EngineConfig, {**SERVED, "admission": "queue", **self.settings})


def _checked(option: Option, value: Any) -> Any:
    """The value, of one type however it was written. Errors: ValueError."""
    if option.kind is str and isinstance(value, (int, float)):
        value = str(value)  # YAML's number, for a text such as that of a length
    if isinstance(value, str):
        value = option.parse(value)
    else:
        value = option.check(value)
    if option.kind is float and value is not None:
        return float(value)
    return value


def grid(base: Values, axes: Mapping[str, Sequence[Any]]) -> list[Point]:
    """The points of all combinations of the axes' values. Errors: ConfigError."""
    count = 1
    for name, values in axes.items():
        if not values:
            raise ConfigError(name, "an axis needs at least one value")
        count *= len(values)
    if count > MAX_POINTS:
        raise ConfigError("axes", f"make {count} points; the limit is {MAX_POINTS}")
    return [
        Point.of({**base, **dict(zip(axes, values))})
        for values in itertools.product(*axes.values())
    ]


def parsed_axes(text: str) -> dict[str, list[str]]:
    """Reads 'mesh=tp=1|kvp=2;policy=fcfs|slack'. Errors: ConfigError."""
    return {name: values.split("|") for name, values in _pairs("axes", text)}


def parsed_base(text: str) -> dict[str, str]:
    """Reads 'model=smollm2-135m;pages=512'. Errors: ConfigError."""
    return dict(_pairs("base", text))


def _pairs(field: str, text: str) -> Iterator[tuple[str, str]]:
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, equal, value = part.partition("=")
        if not equal or not value:
            raise ConfigError(field, f"{part!r} is not NAME=VALUE")
        yield name.strip().replace("-", "_"), value


def read_grid(file: str) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Reads `base` and `axes` of a YAML file. Errors: ConfigError."""
    try:
        read = yaml.safe_load(Path(file).read_text())
    except OSError as error:
        raise ConfigError("grid", f"{file}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("grid", f"{file}: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(read, dict) or not set(read) <= {"base", "axes"}:
        raise ConfigError("grid", f"{file}: must have base and axes, and nothing else")
    base, axes = read.get("base") or {}, read.get("axes") or {}
    if not isinstance(base, dict) or not isinstance(axes, dict):
        raise ConfigError("grid", f"{file}: base and axes must be mappings of names")
    return base, {name: each if isinstance(each, list) else [each] for name, each in axes.items()}
