"""Parses the options of a workload, `a=1,b=2`."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from typing import NoReturn

from jaxserve.settings.schema import ConfigError


def fault(message: str) -> NoReturn:
    """Raises ConfigError for the workload."""
    raise ConfigError("workload", message)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The most similar known name, as the end of an error text; '' where none is similar."""
    similar = difflib.get_close_matches(name, list(names), 1)
    return f"; did you mean {similar[0]}?" if similar else ""


def to_options(text: str | None, names: Sequence[str]) -> dict[str, str]:
    """Parses 'a=1,b=2' into a dict. Errors: ConfigError for an option that is not known."""
    options: dict[str, str] = {}
    for part in filter(None, (text or "").split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in names:
            fault(
                f"unknown option {key!r}; known are "
                f"{', '.join(names) or 'none'}{did_you_mean(key, names)}"
            )
        if not equals or not value or key in options:
            fault(f"{part!r} is not {key}=VALUE, given once")
        options[key] = value
    return options


def to_number(name: str, text: str, low: float, high: float = math.inf) -> float:
    """Parses a finite number from low to high. Errors: ConfigError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (low <= value <= high and math.isfinite(value)):
        limits = f"from {low:g} to {high:g}" if high < math.inf else f"of at least {low:g}"
        fault(f"{name} must be a number {limits}, not {text!r}")
    return value
