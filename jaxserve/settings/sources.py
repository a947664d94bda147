"""Settings from a YAML file and from the environment, which lie between the defaults and the flags.

A file is one mapping from names of flags to plain values (lists where a flag may be given several
times); it is read with the safe loader only. Nothing in it is ignored: an unknown name, a value of
another type and a name that is given more than once are refused, with the line. One file serves all
commands: each takes what it knows of the engine's and the server's settings. The variable of a flag
is JAXSERVE_NAME, in capitals.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from jaxserve.settings import renamed
from jaxserve.settings.fields import COUNT, Option, count
from jaxserve.settings.options import near, options_of
from jaxserve.settings.schema import ConfigError, EngineConfig, MeshConfig, ServerConfig
from jaxserve.settings.schema.mesh import DEGREES, degree_options

log = logging.getLogger(__name__)
PREFIX = "JAXSERVE_"
FILE_ENDS = (".yaml", ".yml")
MAX_FILE_BYTES = 64 * 1024
SECRET = ("api_key",)
OWN = ("config", "print_config")  # flags that are about settings, and none themselves
# variables that are no settings
OTHER_VARIABLES = {
    "JAXSERVE_CACHE",
    "JAXSERVE_DATA",
    "JAXSERVE_CONFIG",
    "JAXSERVE_GROUP",
    "JAXSERVE_GROUP_SECRET",
    "JAXSERVE_CLUSTER_SECRET",
    "JAXSERVE_CPU_KERNELS",
    "JAXSERVE_BUILD_NATIVE",
}
# what Kubernetes sets beside a service called jaxserve
SERVICE_LINKS = re.compile(r"JAXSERVE_(\w+_)?(SERVICE_HOST|(SERVICE_)?PORT)(_\w+)?")
SCIENTIFIC = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")  # YAML reads 1e-3 as a text

Layer = dict[str, tuple[Any, str]]  # by setting: value, and where it is from


def from_file(name: str, options: Mapping[str, Option]) -> Layer:
    """Reads these options from a file. Errors: ConfigError of `config` that names file, line and
    setting."""
    text = _text(name)
    try:
        lines = dict(_entries(text))
        values = (yaml.safe_load(text) or {}) if _known(lines, options) else {}
    except yaml.MarkedYAMLError as error:
        place = "" if error.problem_mark is None else f" line {error.problem_mark.line + 1}"
        raise ConfigError("config", f"{name}{place}: not YAML: {error.problem}") from None
    except _Refused as error:
        raise ConfigError("config", f"{name}{error}") from None
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError("config", f"{name}: not YAML: {reason}") from None
    layer: Layer = {}
    for key, line in lines.items():
        today = renamed.current_name(key)
        if today in options:
            where = f"{name} line {line}"
            try:
                layer[today] = options[today].check(_plain(options[today], values[key])), where
            except ValueError as error:
                raise ConfigError("config", f"{where}: {key}: {error}") from None
    return layer


def from_environment(options: Mapping[str, Option], environment: Mapping[str, str]) -> Layer:
    """Reads these options from variables JAXSERVE_NAME; warns of variables that are no setting at
    all. Errors: ConfigError of the variable."""
    layer: Layer = {}
    names = {*options, *_engine_and_server()} - set(OWN)
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES:
            continue
        name = variable.removeprefix(PREFIX).lower()
        if SERVICE_LINKS.fullmatch(variable) and (name not in names or "://" in text):
            continue
        today = renamed.current_name(name)
        if today not in names or variable != PREFIX + name.upper():
            hint = near(name, _engine_and_server())
            log.warning("%a is not a setting%s", variable[:100], hint)
        elif today in options:
            try:
                layer[today] = options[today].parse(text), variable
            except ValueError as error:
                raise ConfigError(variable, str(error)) from None
    return layer


def printed(
    options: Mapping[str, Option], values: Mapping[str, Any], origins: Mapping[str, str]
) -> str:
    """A settings file with these values; those that are not the defaults have a comment that says
    where they are from. `from_file` reads it."""
    lines = []
    for name in options:
        if name in OWN or name in DEGREES:
            continue
        if name in SECRET and values[name]:
            lines.append(f"# {name}: not shown")
            continue
        value = values[name]
        if isinstance(value, MeshConfig):
            value = str(value)
        if isinstance(value, tuple):
            value = list(value)
        flow = None if isinstance(value, list) else False
        shown = yaml.safe_dump({name: value}, default_flow_style=flow, width=math.inf)
        origin = f"  # {ascii(origins[name])[1:-1]}" if name in origins else ""
        lines.append(shown.rstrip("\n") + origin)
    return "\n".join(lines)


class _Refused(ValueError):
    """A mistake in a file; the message begins with ' line N: '."""


def _text(name: str) -> str:
    try:
        with open(name, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError("config", f"{name}: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError("config", f"{name}: is larger than the limit, {MAX_FILE_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ConfigError("config", f"{name}: is not a text in UTF-8") from None


def _entries(text: str) -> Iterator[tuple[str, int]]:
    """Yields the names in a file with their lines. Reads events, so that nothing nested, shared or
    tagged is ever built."""
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
    keys: set[str] = set()
    while not nothing and not isinstance(key := next(events), yaml.MappingEndEvent):
        if not isinstance(key, yaml.ScalarEvent):
            raise _Refused(_at(key) + "a name must be a plain text")
        if key.value in keys:
            raise _Refused(_at(key) + f"{key.value} is given more than once")
        keys.add(key.value)
        _skip_value(key.value, next(events), events)
        yield key.value, key.start_mark.line + 1
    if not isinstance(next(events), yaml.DocumentEndEvent) or not isinstance(
        last := next(events), yaml.StreamEndEvent
    ):
        raise _Refused(_at(last) + "a second document begins; one is enough")


def _skip_value(name: str, event: Any, events: Iterator[Any]) -> None:
    """Reads past a plain value or a list of them. Errors: _Refused for anything else."""
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
    """Returns whether a file has settings at all. Errors: _Refused for a name that is none."""
    names = (options.keys() | _engine_and_server().keys()) - set(OWN)
    for name, line in lines.items():
        if not {name, renamed.spelt(name)} & names and name not in renamed.FLAGS:
            raise _Refused(f" line {line}: unknown setting {name!a:.100}{near(name, names)}")
    return bool(lines)


def _engine_and_server() -> dict[str, Option]:
    return {**options_of(EngineConfig), **options_of(ServerConfig), **degree_options()}


def _plain(option: Option, value: Any) -> Any:
    """A value of YAML as one of the option's kind, where it can stand for one."""
    if option.kind is int and isinstance(value, str) and COUNT.fullmatch(value):
        return count(value)
    if option.kind is float and isinstance(value, str) and SCIENTIFIC.fullmatch(value):
        return float(value)
    if option.kind is float and type(value) is int:
        return float(value)
    if option.kind is tuple and isinstance(value, list):
        return tuple(value)
    return value
