"""Flags of a command, made from `Option`s: parsed by absl, with help that fits a screen and errors
that name the flag.

What no flag gives, a variable of the environment may, then a file (`sources`), in commands that
have --config.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import shutil
import textwrap
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from absl import flags

from jaxserve.settings import foreign, renamed, sources
from jaxserve.settings.fields import Option
from jaxserve.settings.options import near
from jaxserve.settings.schema.mesh import DEGREES, with_mesh

COLUMN = 30  # where the help text of a flag begins
PLACEHOLDERS: dict[type, str] = {int: "N", float: "X", str: "TEXT", tuple: "TEXT"}
FLAG = re.compile(r"--?([a-zA-Z][\w-]*)(=.*)?", re.DOTALL)
log = logging.getLogger(__name__)


class UsageError(ValueError):
    """A command line that cannot be understood. The message names the flag."""


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of the command line.

    groups: its flags by title of their section in the help page. run: gets the flags' values,
    returns an exit code. about: further paragraphs of the help page. argument: the name of its one
    argument that is not a flag, '' for none; its value is under that name in lower case. One that
    ends in '...' is all that stands behind '--', as a list; one in brackets is a flag's value that
    may stand there without the flag, and `[NAME ...]` takes several, all of which are under its
    name with an s. worker_port: opens the port of a worker of the command, given
    the values, the member of the group and this machine's address there; None: workers have none.
    """

    groups: Mapping[str, Sequence[Option]]
    run: Callable[[Values], int]
    about: str = ""
    argument: str = ""
    worker_port: Callable[[dict[str, Any], Any, str], Any] | None = None

    @property
    def options(self) -> dict[str, Option]:
        return {option.name: option for group in self.groups.values() for option in group}


class Values(dict[str, Any]):
    """The values of all settings of a command, by name. origins: where values come from that are
    not defaults, by name, such as '--port' or 'JAXSERVE_PORT'."""

    def __init__(self, values: Mapping[str, Any], origins: Mapping[str, str]):
        super().__init__(values)
        self.origins = dict(origins)


def parse(
    command: Command, arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> Values:
    """Reads flags, then variables of the environment, then the file that --config names; the first
    that gives a setting wins, and a mesh is one of all degrees. environment: in place of that of
    this process.

    Errors: UsageError for the flags, ConfigError for the other places.
    """
    if environment is None:
        environment = os.environ
    return _whole(_layered(command, _parsed(command, arguments), environment))


def _layered(command: Command, flagged: Values, environment: Mapping[str, str]) -> Values:
    """Returns the values of flags, else of the environment, else of the file. Errors:
    ConfigError."""
    if "config" not in command.options:
        return flagged
    flagged["config"] = flagged["config"] or environment.get("JAXSERVE_CONFIG") or None
    of_file = sources.from_file(flagged["config"], command.options) if flagged["config"] else {}
    variables = sources.from_environment(command.options, environment)
    below = _below(flagged.origins, {**_below(variables, of_file), **variables})
    return Values(
        {**flagged, **{name: value for name, (value, _) in below.items()}},
        {**flagged.origins, **{name: where for name, (_, where) in below.items()}},
    )


def _below(above: Collection[str], layer: sources.Layer) -> sources.Layer:
    """Returns what a layer gives that is not given above it: a mesh has all degrees."""
    given = set(above)
    if "mesh" in above:
        given |= DEGREES.keys()
    return {name: value for name, value in layer.items() if name not in given}


def _whole(values: Values) -> Values:
    """Settings with one mesh, however it was given. Errors: ConfigError."""
    if not DEGREES.keys() & values.keys():
        return values
    origins = dict(values.origins)
    for name in DEGREES:
        if name in origins:
            origins.setdefault("mesh", origins[name])
    return Values(with_mesh(values, values.origins), origins)


def _parsed(command: Command, arguments: Sequence[str]) -> Values:
    """Returns the values of the flags, and the defaults. Errors: UsageError."""
    values = flags.FlagValues()
    values.set_gnu_getopt(True)
    for option in command.options.values():
        _define(option, values)
    try:
        positional = values(["", *_current(command.options, arguments)])[1:]
    except flags.UnrecognizedFlagError as error:
        instead = foreign.INSTEAD.get(renamed.spelt(error.flagname))
        if instead and "model" in command.options:
            raise UsageError(f"--{error.flagname} is not a flag here: {instead}") from None
        names = {*command.options, *renamed.ALIASES} if "model" in command.options else ()
        hint = near(error.flagname, names or command.options).replace("mean ", "mean --")
        raise UsageError(f"unknown flag --{error.flagname}{hint}") from None
    except flags.Error as error:
        raise UsageError(str(error).removeprefix("flag ").rstrip(".")) from None
    origins = {name: f"--{name}" for name in command.options if values[name].present}
    if command.argument.endswith("..."):
        if not positional or "--" not in arguments:
            raise UsageError("give a command behind --")
        name = command.argument.removesuffix("...").lower()
        return Values(values.flag_values_dict() | {name: positional}, origins)
    if command.argument.startswith("["):
        return _with_argument(command, values.flag_values_dict(), origins, positional)
    if command.argument and len(positional) != 1:
        raise UsageError(
            f"give one {command.argument}" + (f", not {len(positional)}" if positional else "")
        )
    if positional and not command.argument:
        raise UsageError(f"{positional[0]!r} is not a flag; flags begin with --")
    return Values(
        values.flag_values_dict()
        | ({command.argument.lower(): positional[0]} if positional else {}),
        origins,
    )


def _with_argument(
    command: Command, values: dict[str, Any], origins: dict[str, str], arguments: list[str]
) -> Values:
    """The values with that of a flag which may be given without its name. Errors: UsageError."""
    upper = command.argument.strip("[ .]")
    name = upper.lower()
    several = command.argument.endswith("...]")
    for argument in arguments[1:]:
        if not several or argument.partition("=")[0] in command.options:
            raise UsageError(f"{argument!r} is not a flag; flags begin with --")
    if arguments and name in origins:
        raise UsageError(f"give {upper} or --{name}, not both")
    if several:
        values[f"{name}s"] = tuple(arguments)
    if not arguments:
        return Values(values, origins)
    return Values({**values, name: arguments[0]}, {**origins, name: f"--{name}"})


def help_of(name: str, summary: str, command: Command, width: int | None = None) -> str:
    """The help page of a command; name: as it is called, such as jaxserve serve."""
    width = min(width or shutil.get_terminal_size().columns, 110)
    usage = " ".join(["usage:", name, *_arguments(command)])
    parts = [f"{name}: {summary}", usage]
    if command.about:
        parts += [
            block if block.startswith(" ") else textwrap.fill(block, width)
            for block in command.about.rstrip().split("\n\n")
        ]
    for title, group in command.groups.items():
        parts.append("\n".join([f"{title}:", *(_line(option, width) for option in group)]))
    return "\n\n".join(parts)


def _arguments(command: Command) -> list[str]:
    flags = ["[flags]"] if command.groups else []
    if command.argument.endswith("..."):
        return [*flags, "--", command.argument]
    return [*([command.argument] if command.argument else []), *flags]


def _current(options: Mapping[str, Option], arguments: Sequence[str]) -> list[str]:
    """Arguments with our names of their flags, and without those flags of other engines that ask
    for what is so anyway, or stand for settings, which come first: of several values the last one
    counts."""
    implied: list[str] = []
    given = list(_renamed(options, arguments, implied))
    return implied + given


def _renamed(
    options: Mapping[str, Option], arguments: Sequence[str], implied: list[str]
) -> Iterator[str]:
    """See `_current`. implied: gets the settings that flags stand for."""
    coming = deque(arguments)
    while coming:
        argument = coming.popleft()
        if argument == "--":
            yield from [argument, *coming]
            return
        match = FLAG.fullmatch(argument)
        if match is None:
            yield argument
            continue
        typed, value = match[1], match[2] or ""
        name, no = _known(options, typed)
        why = foreign.no_effect(renamed.spelt(typed)) if "model" in options else None
        if name in options:
            yield f"--{no}{name}{value}"
            if options[name].kind is not bool and not value and coming:
                yield coming.popleft()
            while name in renamed.SEVERAL and coming and not coming[0].startswith("-"):
                yield f"--{name}={coming.popleft()}"
        elif renamed.spelt(typed) in foreign.STANDS_FOR and "model" in options:
            setting, stands_for = foreign.STANDS_FOR[renamed.spelt(typed)]
            implied.append(f"--{setting}={stands_for}")
        elif why is not None:
            log.warning("--%s has no effect: %s", typed, why)
            if renamed.spelt(typed) in foreign.NO_EFFECT_VALUES and not value and coming:
                coming.popleft()
        else:
            yield argument


def _known(options: Mapping[str, Option], typed: str) -> tuple[str, str]:
    """The setting that a flag names, or what it might be, and 'no' for one that is switched off."""
    if typed in options:
        return typed, ""
    for no in ("", "no-", "no_", "no"):
        if typed.startswith(no):
            bare = typed.removeprefix(no)
            name = bare if bare in options else renamed.current_name(bare)
            if name in options and (not no or options[name].kind is bool):
                return name, "no" if no else ""
    return typed, ""


def _define(option: Option, values: flags.FlagValues) -> None:
    name = option.name
    default = option.default
    if option.kind is bool:
        flags.DEFINE_boolean(name, default, option.help, flag_values=values)
    elif option.kind is tuple:
        flags.DEFINE_multi_string(name, list(default), option.help, flag_values=values)
    elif dataclasses.is_dataclass(option.kind):  # checked where the config is made
        text = None if default is None else str(default)
        flags.DEFINE_string(name, text, option.help, flag_values=values)
    else:
        flags.DEFINE(
            _Parser(option),
            name,
            default,
            option.help,
            flag_values=values,
            serializer=flags.ArgumentSerializer(),
        )


class _Parser(flags.ArgumentParser):
    """Parses and checks a flag by its option."""

    def __init__(self, option: Option):
        self._option = option

    def parse(self, argument: Any) -> Any:
        if isinstance(argument, str):
            return self._option.parse(argument)
        return self._option.check(argument)


def _line(option: Option, width: int) -> str:
    """The flag and its help. Choices that do not fit beside the flag are listed in the help."""
    head, choices = f"  {spelling(option)}", ""
    if len(head) > width:
        head, choices = f"  --{option.name}=NAME", f": {', '.join(option.choices)}"
    text = textwrap.wrap(f"{option.help}{choices} {limits(option)}".strip(), width - COLUMN)
    if len(head) > COLUMN - 2:
        text.insert(0, "")
    first, *others = text
    return "\n".join(
        [f"{head:{COLUMN}}{first}".rstrip(), *(" " * COLUMN + line for line in others)]
    )


def spelling(option: Option) -> str:
    """Returns the spelling of a flag: --[no]name, --name=one|other, --name=N."""
    if option.kind is bool:
        return f"--[no]{option.name}"
    kind: Any = option.kind
    value = PLACEHOLDERS.get(kind) or kind.PLACEHOLDER
    return f"--{option.name}={'|'.join(option.choices) or value}"


def limits(option: Option) -> str:
    """Tells default and limits of a flag, such as '(default 16, 1 to 4096)'; '' for neither."""
    parts = []
    default = option.default
    if isinstance(default, bool):
        parts.append(f"default {'yes' if default else 'no'}")
    elif isinstance(default, float):
        parts.append(f"default {default:g}")
    elif default not in (None, "", ()):
        parts.append(f"default {default}")
    if option.low is not None and option.high is not None:
        parts.append(f"{option.low:g} to {option.high:g}")
    elif option.low is not None:
        parts.append(f"at least {option.low:g}")
    elif option.high is not None:
        parts.append(f"at most {option.high:g}")
    return f"({', '.join(parts)})" if parts else ""
