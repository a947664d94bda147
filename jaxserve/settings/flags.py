"""Flags of a command, made from `Option`s: parsed by absl, with help that fits a screen and errors
that name the flag.

What no flag gives, a variable of the environment may, then a file (`config_file`), in commands that
have --config.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags

from jaxserve.settings import sources as config_file
from jaxserve.settings.options import Option
from jaxserve.settings.schema import MeshConfig

COLUMN = 30  # where the help text of a flag begins
_WORDS = {int: "N", float: "X", str: "TEXT", tuple: "TEXT", MeshConfig: "AXIS=N,..."}


class UsageError(ValueError):
    """A command line that cannot be understood. The message names the flag."""


@dataclasses.dataclass(frozen=True)
class Command:
    """What a file in `commands` is: groups of flags under their titles, and a function of the
    flags' values.

    argument: the name of the one argument that is no flag, '' for none; its value is under that
    name in lower case.
    """

    groups: Mapping[str, Sequence[Option]]
    run: Callable[[dict[str, Any]], int]
    about: str = ""
    argument: str = ""

    @property
    def options(self) -> dict[str, Option]:
        return {option.name: option for group in self.groups.values() for option in group}


class Values(dict[str, Any]):
    """The values of all settings of a command, by name. `origins`: where those are from that are
    not the defaults."""

    def __init__(self, values: Mapping[str, Any], origins: Mapping[str, str]):
        super().__init__(values)
        self.origins = dict(origins)


def parse(command: Command, arguments: Sequence[str]) -> Values:
    """What flags say, else variables of the environment, else the file that --config names, else
    the defaults.

    Errors: UsageError for the flags, ConfigError for the other places.
    """
    flagged = _parsed(command, arguments)
    if "config" not in command.options:
        return flagged
    flagged["config"] = flagged["config"] or os.environ.get("JAXSERVE_CONFIG") or None
    layers = config_file.from_file(flagged["config"], command.options) if flagged["config"] else {}
    layers |= config_file.from_environment(command.options, os.environ)
    below = {name: layer for name, layer in layers.items() if name not in flagged.origins}
    return Values(
        {**flagged, **{name: value for name, (value, _) in below.items()}},
        {**flagged.origins, **{name: where for name, (_, where) in below.items()}},
    )


def _parsed(command: Command, arguments: Sequence[str]) -> Values:
    """What the flags say, and the defaults. Errors: UsageError."""
    values = flags.FlagValues()
    values.set_gnu_getopt(True)
    for option in command.options.values():
        _define(option, values)
    try:
        rest = values(["", *arguments])[1:]
    except flags.UnrecognizedFlagError as error:
        near = difflib.get_close_matches(error.flagname, command.options, 1)
        raise UsageError(
            f"unknown flag --{error.flagname}" + (f"; did you mean --{near[0]}?" if near else "")
        ) from None
    except flags.Error as error:
        raise UsageError(str(error).removeprefix("flag ").rstrip(".")) from None
    if command.argument and len(rest) != 1:
        raise UsageError(f"give one {command.argument}" + (f", not {len(rest)}" if rest else ""))
    if rest and not command.argument:
        raise UsageError(f"{rest[0]!r} is not a flag; flags begin with --")
    origins = {name: f"--{name}" for name in command.options if values[name].present}
    return Values(
        values.flag_values_dict() | ({command.argument.lower(): rest[0]} if rest else {}), origins
    )


def help_of(name: str, summary: str, command: Command, width: int | None = None) -> str:
    """The help page of a command; name: as it is called, such as jaxserve serve."""
    width = min(width or shutil.get_terminal_size().columns, 110)
    usage = " ".join(
        ["usage:", name, *filter(None, [command.argument, "[flags]" if command.groups else ""])]
    )
    parts = [f"{name}: {summary}", usage]
    if command.about:
        parts += [
            block if block.startswith(" ") else textwrap.fill(block, width)
            for block in command.about.rstrip().split("\n\n")
        ]
    for title, group in command.groups.items():
        parts.append("\n".join([f"{title}:", *(_line(option, width) for option in group)]))
    return "\n\n".join(parts)


def _define(option: Option, values: flags.FlagValues) -> None:
    name = option.name
    default = option.default
    if option.choices:
        flags.DEFINE_enum(name, default, option.choices, option.help, flag_values=values)
    elif option.kind is bool:
        flags.DEFINE_boolean(name, default, option.help, flag_values=values)
    elif option.kind in (int, float):
        kind = _Count if option.kind is int else flags.FloatParser
        parser = kind(option.low, option.high)
        flags.DEFINE(
            parser,
            name,
            default,
            option.help,
            flag_values=values,
            serializer=flags.ArgumentSerializer(),
        )
    elif option.kind is tuple:
        flags.DEFINE_multi_string(name, list(default), option.help, flag_values=values)
    else:
        flags.DEFINE_string(
            name, None if default is None else str(default), option.help, flag_values=values
        )


class _Count(flags.IntegerParser):
    """Takes 128K too."""

    def convert(self, argument: Any) -> int:
        united = isinstance(argument, str) and argument[-1:] in config_file.UNITS
        return config_file.count(argument) if united else super().convert(argument)


def _line(option: Option, width: int) -> str:
    if option.kind is bool:
        left = f"  --[no]{option.name}"
    else:
        left = f"  --{option.name}={'|'.join(map(str, option.choices)) or _WORDS[option.kind]}"
    text = textwrap.wrap(f"{option.help} {_extra(option)}".strip(), width - COLUMN)
    if len(left) > COLUMN - 2:
        text.insert(0, "")
    return "\n".join(
        [f"{left:{COLUMN}}{text[0]}".rstrip(), *(" " * COLUMN + line for line in text[1:])]
    )


def _extra(option: Option) -> str:
    """'(default 16, 1 to 4096)'"""
    parts = []
    if option.default not in (None, "", ()):
        default = (
            {True: "yes", False: "no"}[option.default] if option.kind is bool else option.default
        )
        parts.append(f"default {default:g}" if isinstance(default, float) else f"default {default}")
    low = option.low
    high = option.high
    if low is not None or high is not None:
        parts.append(
            f"{low:g} to {high:g}"
            if None not in (low, high)
            else f"at least {low:g}"
            if high is None
            else f"at most {high:g}"
        )
    return f"({', '.join(parts)})" if parts else ""
