"""Flags of a command, made from `Option`s: parsed by absl, with help that fits a screen and errors that name the flag."""

from __future__ import annotations

import dataclasses
import difflib
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags

from jaxserve.config import MeshConfig
from jaxserve.options import Option

COLUMN = 30                                             # where the help text of a flag begins
_WORDS = {int: "N", float: "X", str: "TEXT", tuple: "TEXT", MeshConfig: "AXIS=N,..."}


class UsageError(ValueError):
    """A command line that cannot be understood. The message names the flag."""


@dataclasses.dataclass(frozen=True)
class Command:
    """What a file in `commands` is: groups of flags under their titles, and a function of the flags' values.

    argument: the name of the one argument that is no flag, '' for none; its value is under that name in lower case.
    """

    groups: Mapping[str, Sequence[Option]]
    run: Callable[[dict[str, Any]], int]
    about: str = ""
    argument: str = ""

    @property
    def options(self) -> dict[str, Option]:
        return {option.name: option for group in self.groups.values() for option in group}


def parse(command: Command, arguments: Sequence[str]) -> dict[str, Any]:
    """The values of all flags, by name. Errors: UsageError."""
    values = flags.FlagValues()
    values.set_gnu_getopt(True)
    for option in command.options.values():
        _define(option, values)
    try:
        rest = values(["", *arguments])[1:]
    except flags.UnrecognizedFlagError as error:
        near = difflib.get_close_matches(error.flagname, command.options, 1)
        raise UsageError(f"unknown flag --{error.flagname}" + (f"; did you mean --{near[0]}?" if near else "")) from None
    except flags.Error as error:
        raise UsageError(str(error).removeprefix("flag ").rstrip(".")) from None
    if command.argument and len(rest) != 1:
        raise UsageError(f"give one {command.argument}" + (f", not {len(rest)}" if rest else ""))
    if rest and not command.argument:
        raise UsageError(f"{rest[0]!r} is not a flag; flags begin with --")
    return values.flag_values_dict() | ({command.argument.lower(): rest[0]} if rest else {})


def help_of(name: str, summary: str, command: Command, width: int | None = None) -> str:
    """The help page of a command; name: as it is called, such as jaxserve serve."""
    width = min(width or shutil.get_terminal_size().columns, 110)
    usage = " ".join(["usage:", name, *filter(None, [command.argument, "[flags]" if command.groups else ""])])
    parts = [f"{name}: {summary}", usage]
    if command.about:
        parts += [block if block.startswith(" ") else textwrap.fill(block, width) for block in command.about.rstrip().split("\n\n")]
    for title, group in command.groups.items():
        parts.append("\n".join([f"{title}:", *(_line(option, width) for option in group)]))
    return "\n\n".join(parts)


def _define(option: Option, values: flags.FlagValues) -> None:
    name, default = option.name, option.default
    if option.choices:
        flags.DEFINE_enum(name, default, option.choices, option.help, flag_values=values)
    elif option.kind is bool:
        flags.DEFINE_boolean(name, default, option.help, flag_values=values)
    elif option.kind in (int, float):
        define = flags.DEFINE_integer if option.kind is int else flags.DEFINE_float
        define(name, default, option.help, option.low, option.high, flag_values=values)
    elif option.kind is tuple:
        flags.DEFINE_multi_string(name, list(default), option.help, flag_values=values)
    else:
        flags.DEFINE_string(name, None if default is None else str(default), option.help, flag_values=values)


def _line(option: Option, width: int) -> str:
    if option.kind is bool:
        left = f"  --[no]{option.name}"
    else:
        left = f"  --{option.name}={'|'.join(map(str, option.choices)) or _WORDS[option.kind]}"
    text = textwrap.wrap(f"{option.help} {_extra(option)}".strip(), width - COLUMN)
    if len(left) > COLUMN - 2:
        text.insert(0, "")
    return "\n".join([f"{left:{COLUMN}}{text[0]}".rstrip(), *(" " * COLUMN + line for line in text[1:])])


def _extra(option: Option) -> str:
    """'(default 16, 1 to 4096)'"""
    parts = []
    if option.default not in (None, "", ()):
        default = {True: "yes", False: "no"}[option.default] if option.kind is bool else option.default
        parts.append(f"default {default:g}" if isinstance(default, float) else f"default {default}")
    low, high = option.low, option.high
    if low is not None or high is not None:
        parts.append(f"{low:g} to {high:g}" if None not in (low, high) else f"at least {low:g}" if high is None else f"at most {high:g}")
    return f"({', '.join(parts)})" if parts else ""

