"""Typed access to the fields of a config.json or of a GGUF file's metadata."""

from __future__ import annotations

import math
from typing import Any

from jaxserve.checkpoint.model_paths import CheckpointError

_LIMIT = 2**31 - 1


class Fields:
    """The fields of a config. Defaults replace null and missing values; a value of another type or
    range than asked for is a CheckpointError that names the field."""

    def __init__(self, fields: dict, prefix: str = ""):
        self.fields = fields
        self.prefix = prefix

    def count(self, key: str, default: int | None = None, low: int = 1, high: int = _LIMIT) -> int:
        """Reads a whole number from `low` to `high`."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise CheckpointError(
                f"{self.prefix}{key}: must be a whole number from {low} to {high}, "
                f"not {str(value)[:100]!r}"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Reads a positive number."""
        value = self._get(key, default)
        if not _is_positive(value):
            raise CheckpointError(f"{self.prefix}{key}: must be a positive number, not {value!r}")
        return float(value)

    def optional(self, key: str) -> float | None:
        """Reads a positive number, or None where the field is missing."""
        if self.fields.get(self.prefix + key) is None:
            return None
        return self.number(key)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Reads a list of positive numbers."""
        value = self._get(key, None)
        if not isinstance(value, list) or not all(map(_is_positive, value)):
            raise CheckpointError(f"{self.prefix}{key}: must be a list of positive numbers")
        return tuple(map(float, value))

    def _get(self, key: str, default: Any) -> Any:
        value = self.fields.get(self.prefix + key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.prefix}{key}: is missing")
        return value


def token_ids(*values: Any) -> tuple[int, ...]:
    """Joins fields that hold a token id, a list of ids, or none: in order, without repeats."""
    flat: list[Any] = []
    for value in values:
        if isinstance(value, (list, tuple)):
            flat += value
        elif value is not None:
            flat.append(value)
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in flat):
        raise CheckpointError(f"eos_token_id, bos_token_id: must be token ids, not {flat!r}")
    return tuple(dict.fromkeys(flat))


def _is_positive(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value) and value > 0
