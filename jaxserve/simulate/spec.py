"""Options of a workload as text, `a=1,b=2`, and the faults in them."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from typing import NoReturn

from jaxserve.settings.schema import ConfigError


def fault(message: str) -> NoReturn:
    raise ConfigError("workload", message)


def near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


def to_options(text: str | None, known: Sequence[str]) -> dict[str, str]:
    """'a=1,b=2' as a dict."""
    options: dict[str, str] = {}
    for part in filter(None, (text or "").split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in known:
            fault(
                f"unknown option {key!r}; known are {', '.join(known) or 'none'}{near(key, known)}"
            )
        if not equals or not value or key in options:
            fault(f"{part!r} is not {key}=VALUE, given once")
        options[key] = value
    return options


def to_number(name: str, text: str, low: float, high: float = math.inf) -> float:
    """The finite number that an option gives, from low to high."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (low <= value <= high and math.isfinite(value)):
        limits = f"from {low:g} to {high:g}" if high < math.inf else f"of at least {low:g}"
        fault(f"{name} must be a number {limits}, not {text!r}")
    return value
