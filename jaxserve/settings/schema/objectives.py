"""Latency objectives, and the classes of requests that have their own."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from jaxserve.api.errors import ConfigError
from jaxserve.settings.fields import Settings, option

CLASS_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
DEFAULT_CLASS = "default"  # label in metrics of requests that name no class
CLASS_FIELDS = {"ttft": "ttft", "stretch": "ttft_stretch", "tpot": "tpot"}  # in text -> setting


@dataclass(frozen=True)
class Objectives(Settings):
    """Latencies that requests of one class are promised, in seconds."""

    ttft: float = option(
        2.0, "objective for the time to first token (s) of requests that name none", low=0.001
    )
    ttft_stretch: float = option(
        3.0,
        "objective of long prompts, where it is above --ttft: this many times what the prompt's "
        "prefill takes alone",
        low=1,
    )
    tpot: float = option(
        0.1, "objective for the time per output token (s) of requests that name none", low=0.0001
    )


def objectives_by_class(text: str, default: Objectives) -> dict[str | None, Objectives]:
    """The objectives of each class in 'chat:ttft=0.5,tpot=0.05;batch:stretch=20'.

    None stands for requests without a class: they have `default`, which also gives what a class
    leaves out. Errors: ConfigError.
    """
    found: dict[str | None, Objectives] = {None: default}
    for part in filter(None, map(str.strip, text.split(";"))):
        name, _, fields = map(str.strip, part.partition(":"))
        if not CLASS_NAME.fullmatch(name):
            raise ConfigError(
                "classes",
                f"{name!r} is not a name of 1 to 64 letters, digits, - and _, as in "
                "chat:ttft=0.5,tpot=0.05",
            )
        if name == DEFAULT_CLASS:
            raise ConfigError("classes", f"{name} stands for requests that name no class")
        if name in found:
            raise ConfigError("classes", f"{name} is given more than once")
        found[name] = _objectives_of_class(name, fields, default)
    return found


def _objectives_of_class(name: str, text: str, default: Objectives) -> Objectives:
    """The objectives in 'ttft=0.5,tpot=0.05'. Errors: ConfigError that names the class."""
    given: dict[str, float] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        field, _, value = map(str.strip, part.partition("="))
        if field not in CLASS_FIELDS or CLASS_FIELDS[field] in given:
            raise ConfigError(
                "classes",
                f"{name}: {part!r} is not FIELD=NUMBER, each of {', '.join(CLASS_FIELDS)} at most "
                "once",
            )
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ConfigError("classes", f"{name}: {field}: {value!r} is not a number")
        given[CLASS_FIELDS[field]] = number
    try:
        return Objectives(
            **{own: given.get(own, getattr(default, own)) for own in CLASS_FIELDS.values()}
        )
    except ConfigError as error:
        raise ConfigError("classes", f"{name}: {error}") from None
