"""Latency objectives, and the classes of requests that have their own."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from jaxserve.api.errors import ConfigError
from jaxserve.api.request import Request
from jaxserve.settings.fields import Settings, option

CLASS_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
DEFAULT_CLASS = "default"  # label in metrics of requests that name no class
CLASS_FIELDS = {
    "ttft": "ttft",
    "stretch": "ttft_stretch",
    "tpot": "tpot",
    "tbt": "tbt",
}  # in text -> setting


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
        0.1,
        "objective for the mean time per output token (s) of requests that name none",
        low=0.0001,
    )
    tbt: float | None = option(
        None,
        "objective for the time between two output tokens (s), which 99 of 100 are to keep, of "
        "requests that name none; default: none, the mean is what counts",
        low=0.0001,
    )

    def ttft_by_length(self, prefill: float) -> float:
        """Returns the TTFT objective (s) of a prompt that is prefilled in `prefill` seconds alone,
        where its request states neither objective nor priority."""
        return max(self.ttft, self.ttft_stretch * prefill)

    def ttft_of(self, request: Request, prefill: float) -> float:
        """Returns the TTFT objective (s) of a request: its own, else by length and priority."""
        if request.slo.ttft is not None:
            return request.slo.ttft
        return self.ttft_by_length(prefill) * 2.0**request.priority

    def ttft_budget(self, request: Request, prefill: float) -> float:
        """Returns seconds from a request's arrival until its first token is due: no prompt has less
        than it takes alone."""
        return max(self.ttft_of(request, prefill), prefill)

    def deadline(self, request: Request, prefill: float) -> float:
        """Returns the clock second at which a request's first token is due."""
        return request.arrival + self.ttft_budget(request, prefill)

    def tpot_of(self, request: Request) -> float:
        """Returns the objective (s) per output token of a request: its own, else the class's."""
        return self.tpot if request.slo.tpot is None else request.slo.tpot

    def tbt_of(self, request: Request) -> float | None:
        """Returns the objective (s) for the gaps between a request's tokens: its own, else the
        class's; None without one."""
        return self.tbt if request.slo.tbt is None else request.slo.tbt


def objectives_by_class(text: str, default: Objectives) -> dict[str | None, Objectives]:
    """Reads the objectives of each class in 'chat:ttft=0.5,tpot=0.05;batch:stretch=20'.

    None stands for requests without a class: they have `default`, which also gives what a class
    leaves out. Errors: ConfigError.
    """
    classes: dict[str | None, Objectives] = {None: default}
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
        if name in classes:
            raise ConfigError("classes", f"{name} is given more than once")
        classes[name] = _objectives_of_class(name, fields, default)
    return classes


def _objectives_of_class(name: str, text: str, default: Objectives) -> Objectives:
    """Reads the objectives in 'ttft=0.5,tpot=0.05'. Errors: ConfigError that names the class."""
    values: dict[str, float] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        field, _, value = map(str.strip, part.partition("="))
        if field not in CLASS_FIELDS or CLASS_FIELDS[field] in values:
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
        values[CLASS_FIELDS[field]] = number
    try:
        return Objectives(
            **{own: values.get(own, getattr(default, own)) for own in CLASS_FIELDS.values()}
        )
    except ConfigError as error:
        raise ConfigError("classes", f"{name}: {error}") from None
