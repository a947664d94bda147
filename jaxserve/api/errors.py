"""Errors of requests and of settings, and checks of a request's fields."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np


class RequestError(ValueError):
    """A request that is refused or has failed.

    field: the request's field at fault, '' where none is. message: what is wrong, without the
    field. status: name of a gRPC status. Of an overloaded server, reason: one word, a label of its
    metrics; retry_after: seconds after which another try may succeed, None where unknown.
    """

    def __init__(
        self,
        field: str,
        message: str,
        status: str = "INVALID_ARGUMENT",
        retry_after: float | None = None,
        reason: str = "",
    ):
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field
        self.message = message
        self.status = status
        self.retry_after = retry_after
        self.reason = reason

    @property
    def retry_seconds(self) -> float:
        """Seconds after which to try again: `retry_after`, or 1 where it is unknown."""
        return 1.0 if self.retry_after is None else self.retry_after


class ConfigError(ValueError):
    """A setting that cannot be used.

    field: its name, which is also the flag's. message: what is wrong, without the name.
    """

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, str]]:
        """Lets it come back from another process."""
        return type(self), (self.field, self.message)


def internal_error() -> RequestError:
    """The error that callers get for a fault of the server, without its details."""
    return RequestError("", "internal error; the server's log tells more", "INTERNAL")


def check_number(name: str, value: Any, low: float, high: float) -> None:
    """Refuses a value that is not a finite number from low to high. Errors: RequestError."""
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
        or not low <= value <= high
    ):
        raise RequestError(name, f"must be a number from {low} to {high}, not {value!r}")


def check_integer(name: str, value: Any, low: float, high: float) -> None:
    """Refuses a value that is not a whole number from low to high. Errors: RequestError."""
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, np.integer))
        or not low <= value <= high
    ):
        raise RequestError(name, f"must be a whole number from {low} to {high}, not {value!r}")


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """Numbers that a field may have, checked and described to clients alike.

    whole: integers only. above: without `low` itself.
    """

    low: float
    high: float
    whole: bool = False
    above: bool = False

    def check(self, name: str, value: Any) -> None:
        """Refuses a value of the field `name` out of range. Errors: RequestError."""
        if self.whole:
            check_integer(name, value, self.low, self.high)
        else:
            check_number(name, value, self.low, self.high)
        if self.above and value == self.low:
            raise RequestError(name, f"must be above {self.low}")

    def json_schema(self) -> dict[str, Any]:
        """Returns the bounds as keywords of a JSON schema, which writes them as floats."""
        high = float(self.high)
        if high > self.high:  # rounded up
            high = math.nextafter(high, 0)
        return {"exclusiveMinimum" if self.above else "minimum": self.low, "maximum": high}


def check_length(name: str, value: tuple, most: int) -> None:
    """Refuses a value of more than `most` entries. Errors: RequestError."""
    if len(value) > most:
        raise RequestError(name, f"has {len(value)} entries; the limit is {most}")
