"""One setting: its type, limits, choices and help, and the only place where a value is checked.

Config classes declare their fields with `option`; flags, variables of the environment and settings
files are read and checked by the `Option`s made from them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import types
import typing
from collections.abc import Collection
from typing import Any

from jaxserve.api.errors import ConfigError
from jaxserve.settings import renamed

UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "k": 10**3, "m": 10**6, "g": 10**9}
COUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMGkmg])")
TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
QUOTED = 100  # characters of a wrong value that an error repeats
KIND_NAMES: dict[type, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    tuple: "a list of texts",
}


@dataclasses.dataclass(frozen=True)
class Option:
    """A setting.

    kind: int, float, bool, str, tuple (of texts; the flag may be repeated, or have a list in JSON),
    or a config class with `parse(text)`. default: None stands for 'not given'. low, high: limits,
    inclusive. optional: whether None may be given, in Python.
    """

    name: str
    kind: type
    default: Any
    help: str
    low: float | None = None
    high: float | None = None
    choices: Collection[str] = ()
    optional: bool = False

    def parse(self, text: str) -> Any:
        """The value that a text stands for, checked. Errors: ValueError that says what is wrong."""
        value: Any = text
        try:
            if self.kind is bool:
                value = TRUTH.get(text.lower(), text)
            elif self.kind is int:
                value = count(text)
            elif self.kind is float:
                value = float(text)
            elif self.kind is tuple:
                value = tuple(json.loads(text)) if text.startswith("[") else (text,)
        except ValueError:
            pass  # the text itself is of the wrong type
        return self.check(value)

    def check(self, value: Any) -> Any:
        """The value, an old spelling replaced by today's.

        Errors: ValueError that says what is wrong, for a value of another type, beyond a limit or
        none of the choices.
        """
        if value is None and (self.optional or self.default is None):
            return None
        if not self._is_of_kind(value):
            raise ValueError(f"must be {self._kind_name()}, not {value!a:.{QUOTED}}")
        if dataclasses.is_dataclass(self.kind):
            self._check_parsed(value)
            return value
        if self.kind is tuple:
            value = tuple(value)
        value = renamed.current_value(self.name, value)
        if self.choices and value not in self.choices:
            raise ValueError(f"{value!a:.{QUOTED}} is not one of {', '.join(self.choices)}")
        if self.low is not None and value < self.low:
            raise ValueError(f"{value} is below the limit {self.low}")
        if self.high is not None and value > self.high:
            raise ValueError(f"{value} is above the limit {self.high}")
        return value

    def _is_of_kind(self, value: Any) -> bool:
        if self.kind is float:
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            return number and not math.isnan(value)
        if self.kind is int:
            return isinstance(value, int) and not isinstance(value, bool)
        if self.kind is tuple:
            return isinstance(value, (tuple, list)) and all(isinstance(part, str) for part in value)
        return isinstance(value, self.kind) or (
            dataclasses.is_dataclass(self.kind) and isinstance(value, str)
        )

    def _check_parsed(self, value: Any) -> None:
        try:
            parsed(self.kind, value)
        except ConfigError as error:  # a field of its own is named, the setting is not repeated
            raise ValueError(error.message if error.field == self.name else str(error)) from None

    def _kind_name(self) -> str:
        if self.kind in KIND_NAMES:
            return KIND_NAMES[self.kind]
        return f"a text such as {self.kind.EXAMPLE}"  # type: ignore[attr-defined]


def option(
    default: Any,
    help: str,
    low: float | None = None,
    high: float | None = None,
    choices: Collection[str] = (),
) -> Any:
    """A field of a config class, with help, limits (inclusive) and choices."""
    return dataclasses.field(
        default=default, metadata={"help": help, "low": low, "high": high, "choices": choices}
    )


class Settings:
    """Base of the config classes, which are frozen dataclasses: checks every field that `option`
    declared when an object is made. Errors: ConfigError."""

    def __post_init__(self) -> None:
        for declared in own_options(type(self)):  # type: ignore[arg-type]
            given = getattr(self, declared.name)
            try:
                value = declared.check(given)
            except ValueError as error:
                raise ConfigError(declared.name, str(error)) from None
            if value is not given:
                object.__setattr__(self, declared.name, value)


@functools.cache
def own_options(config: type) -> tuple[Option, ...]:
    """The settings that a config class declares itself, without those of configs inside it."""
    kinds = kinds_of(config)
    hints = typing.get_type_hints(config)
    return tuple(
        Option(
            field.name,
            kinds[field.name],
            field.default,
            **field.metadata,
            optional=isinstance(hints[field.name], types.UnionType),
        )
        for field in dataclasses.fields(config)
        if field.metadata
    )


@functools.cache
def kinds_of(config: type) -> dict[str, type]:
    """The type of each field of a config class: `int` of `int | None`."""
    return {name: _required(hint) for name, hint in typing.get_type_hints(config).items()}


def _required(hint: Any) -> Any:
    if isinstance(hint, types.UnionType):
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    return typing.get_origin(hint) or hint


def parsed(kind: Any, value: Any) -> Any:
    """A config that may be given as a text, such as a mesh. Errors: ConfigError."""
    text = dataclasses.is_dataclass(kind) and isinstance(value, str)
    return kind.parse(value) if text else value


def count(text: str) -> int:
    """'128K' -> 131072, '128k' -> 128000: capitals stand for powers of 1024, small letters for
    those of 1000. Errors: ValueError."""
    match = COUNT.fullmatch(text.strip())
    if match is None:
        return int(text)
    number = float(match[1]) * UNITS[match[2]]
    if not number.is_integer():
        raise ValueError(f"{text} is not a whole number")
    return int(number)
