"""Settings from a YAML file and from the environment, which lie between the defaults and the flags.

A file is one mapping from names of flags to plain values (lists where a flag may be given several
times); it is read with the safe loader only. Nothing in it is ignored: a name that is no setting, a
value of another type, a name that is there twice are refused, with the line. One file serves all
commands: what another one's engine or server is told is known, and left to it. The variable of a
flag is JAXSERVE_NAME, in capitals.
"""

from __future__ import annotations

import difflib
import itertools
import logging
import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import yaml

from jaxserve.settings.options import Option, options_of
from jaxserve.settings.schema import ConfigError, EngineConfig, MeshConfig, ServerConfig

log = logging.getLogger(__name__)
PREFIX = "JAXSERVE_"
LARGEST = 64 * 1024  # bytes of a file
OWN = ("config", "print_config")  # flags about the settings, which are none
OTHERS = {"JAXSERVE_CACHE", "JAXSERVE_DATA", "JAXSERVE_CONFIG"}  # variables that are no settings
# what Kubernetes sets beside a service called jaxserve
LINKS = re.compile(r"JAXSERVE_(\w+_)?(SERVICE_HOST|(SERVICE_)?PORT)(_\w+)?")
UNITS = {"K": 2**10, "M": 2**20}
COUNT = re.compile(r"([0-9]+)([KM])")
REAL = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")  # YAML takes 1e-3 for a text
WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    tuple: "a list of texts",
    MeshConfig: "a text such as spp=2,kvp=2,tp=3",
}

Layer = dict[str, tuple[Any, str]]  # by setting: value, and where it is from


def count(text: str) -> int:
    """'128K' -> 131072: K stands for 1024 and M for its square. Errors: ValueError."""
    match = COUNT.fullmatch(text.strip())
    return int(match[1]) * UNITS[match[2]] if match else int(text)


def from_file(name: str, options: Mapping[str, Option]) -> Layer:
    """What a file says about these options. Errors: ConfigError of `config` that names the file,
    the line and the setting."""
    text = _text(name)
    try:
        lines = dict(_entries(text))
        values = (yaml.safe_load(text) or {}) if _known(lines, options) else {}
    except yaml.MarkedYAMLError as error:
        place = "" if error.problem_mark is None else f" line {error.problem_mark.line + 1}"
        raise ConfigError("config", f"{name}{place}: not YAML: {error.problem}") from None
    except (ValueError, yaml.YAMLError) as error:
        reason = (
            error.args[0]
            if isinstance(error, _Refused)
            else f"not YAML: {' '.join(str(error).split())}"
        )
        raise ConfigError(
            "config", f"{name}{reason if reason.startswith(' line') else f': {reason}'}"
        ) from None
    found: Layer = {}
    for key, line in lines.items():
        if key in options:
            where = f"{name} line {line}"
            try:
                found[key] = _checked(options[key], _plain(options[key], values[key])), where
            except ValueError as error:
                raise ConfigError("config", f"{where}: {key}: {error}") from None
    return found


def from_environment(options: Mapping[str, Option], environment: Mapping[str, str]) -> Layer:
    """What variables say about these options; one that is no setting at all is warned of. Errors:
    ConfigError of the variable."""
    found: Layer = {}
    names = {PREFIX + name.upper(): name for name in options if name not in OWN}
    known = names.keys() | {PREFIX + name.upper() for name in _ours()} | OTHERS
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or (
            LINKS.fullmatch(variable) and (variable not in known or "://" in text)
        ):
            continue
        if variable in names:
            option = options[names[variable]]
            try:
                found[option.name] = _checked(option, _parsed(option, text)), variable
            except ValueError as error:
                raise ConfigError(variable, str(error)) from None
        elif variable not in known:
            log.warning(
                "%a is no setting%s",
                variable[:100],
                _near(variable.removeprefix(PREFIX).lower(), _ours()),
            )
    return found


def printed(
    options: Mapping[str, Option], values: Mapping[str, Any], origins: Mapping[str, str]
) -> str:
    """A file with these values, each that is no default with a comment that says where it is from.
    `from_file` reads it."""
    lines = []
    for name in options:
        if name not in OWN:
            value = str(values[name]) if isinstance(values[name], MeshConfig) else values[name]
            value = list(value) if isinstance(value, tuple) else value
            shown = yaml.safe_dump(
                {name: value},
                default_flow_style=None if isinstance(value, list) else False,
                width=math.inf,
            )
            lines.append(
                shown.rstrip("\n")
                + (f"  # {ascii(origins[name])[1:-1]}" if name in origins else "")
            )
    return "\n".join(lines)


class _Refused(ValueError):
    """What a file may not hold, told from ' line N' on."""


def _text(name: str) -> str:
    try:
        with open(name, "rb") as file:
            data = file.read(LARGEST + 1)
    except OSError as error:
        raise ConfigError("config", f"{name}: {error.strerror}") from None
    if len(data) > LARGEST:
        raise ConfigError("config", f"{name}: is larger than the limit, {LARGEST} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ConfigError("config", f"{name}: is not a text in UTF-8") from None


def _entries(text: str) -> Iterator[tuple[str, int]]:
    """The names in a file and their lines. Read as events, so that nothing nested, shared or tagged
    is ever built."""
    events = (
        event
        for event in yaml.parse(text, Loader=yaml.SafeLoader)
        if not isinstance(event, yaml.StreamStartEvent)
    )
    if isinstance(next(events), yaml.StreamEndEvent):
        return  # nothing but comments
    first = next(events)
    nothing = isinstance(first, yaml.ScalarEvent) and not first.value
    if not nothing and not isinstance(first, yaml.MappingStartEvent):
        raise _Refused(_at(first) + "must be lines of `name: value`")
    seen: set[str] = set()
    while not nothing and not isinstance(key := next(events), yaml.MappingEndEvent):
        if not isinstance(key, yaml.ScalarEvent):
            raise _Refused(_at(key) + "a name must be a plain text")
        if key.value in seen:
            raise _Refused(_at(key) + f"{key.value} is there twice")
        seen.add(key.value)
        _skip_value(key.value, next(events), events)
        yield key.value, key.start_mark.line + 1
    if not isinstance(next(events), yaml.DocumentEndEvent) or not isinstance(
        last := next(events), yaml.StreamEndEvent
    ):
        raise _Refused(_at(last) + "a second document begins; one is enough")


def _skip_value(name: str, event: Any, events: Iterator[Any]) -> None:
    """A plain value, or a list of them."""
    listed = isinstance(event, yaml.SequenceStartEvent)
    for part in itertools.chain([event], events if listed else ()):
        if isinstance(part, yaml.SequenceEndEvent):
            return
        if isinstance(part, yaml.AliasEvent) or part.anchor is not None or part.tag is not None:
            raise _Refused(_at(part) + f"{name}: anchors, aliases and tags have no meaning here")
        if not isinstance(part, yaml.ScalarEvent) and not (listed and part is event):
            raise _Refused(_at(part) + f"{name}: has values inside; settings are flat: NAME: VALUE")


def _at(event: Any) -> str:
    return f" line {event.start_mark.line + 1}: "


def _known(lines: Mapping[str, int], options: Mapping[str, Option]) -> bool:
    known = (options.keys() | _ours().keys()) - set(OWN)
    for name, line in lines.items():
        if name not in known:
            raise _Refused(f" line {line}: unknown setting {name!a:.100}{_near(name, known)}")
    return bool(lines)


def _ours() -> dict[str, Option]:
    return {**options_of(EngineConfig), **options_of(ServerConfig)}


def _near(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]}?" if near else ""


def _plain(option: Option, value: Any) -> Any:
    """A value of YAML as one of the option's kind, where it can stand for one."""
    if option.kind is int and isinstance(value, str) and COUNT.fullmatch(value):
        return count(value)
    if option.kind is float and isinstance(value, str) and REAL.fullmatch(value):
        return float(value)
    if option.kind is tuple and isinstance(value, list):
        return tuple(value)
    return float(value) if option.kind is float and type(value) is int else value


def _parsed(option: Option, text: str) -> Any:
    """The value that a text stands for; the text itself where it stands for none."""
    if option.kind is bool:
        return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(
            text.lower(), text
        )
    try:
        return (
            count(text)
            if option.kind is int
            else float(text)
            if option.kind is float
            else (text,)
            if option.kind is tuple
            else text
        )
    except ValueError:
        return text


def _checked(option: Option, value: Any) -> Any:
    """The value, if a flag could have it. Errors: ValueError that says what is wrong with it."""
    if value is None and option.default is None:
        return None
    kind: type = str if option.kind is MeshConfig else option.kind
    parts = value if isinstance(value, tuple) else ()
    right = type(value) is kind and all(isinstance(part, str) for part in parts)
    if not right:
        raise ValueError(f"must be {WORDS[option.kind]}, not {value!a:.100}")
    if option.choices and value not in option.choices:
        raise ValueError(f"{value!a:.100} is not one of {', '.join(map(str, option.choices))}")
    if kind is float and not math.isfinite(value):
        raise ValueError("must be a finite number")
    if option.low is not None and value < option.low:
        raise ValueError(f"{value} is below the limit {option.low}")
    if option.high is not None and value > option.high:
        raise ValueError(f"{value} is above the limit {option.high}")
    if option.kind is MeshConfig:
        MeshConfig.parse(value)
    return value
