"""Typed access to the fields of a config.json or of a GGUF file's metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxserve.checkpoint.model_files import notes
from jaxserve.checkpoint.model_paths import CheckpointError

SLIDING = "sliding_attention"  # in `layer_types`
FULL = "full_attention"
LINEAR = "linear_attention"  # Gated DeltaNet
LAYER_TYPES = frozenset({SLIDING, FULL})
HYBRID_TYPES = frozenset({LINEAR, FULL})
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

    def layer_types(self, layers: int, kinds: frozenset[str] = LAYER_TYPES) -> list[str] | None:
        """Reads `layer_types`, one of some kinds for each layer; None where it is missing."""
        types = self.fields.get("layer_types")
        if types is None:
            return None
        if isinstance(types, list) and len(types) == layers and set(types) <= kinds:
            return types
        raise CheckpointError(
            f"layer_types: must be {' or '.join(sorted(kinds, reverse=True))} for each of "
            f"{layers} layers"
        )

    def _get(self, key: str, default: Any) -> Any:
        value = self.fields.get(self.prefix + key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.prefix}{key}: is missing")
        return value


def token_ids(vocab: int, values: Mapping[str, Any]) -> tuple[int, ...]:
    """Joins fields that hold a token id, a list of ids, or none: in order, without repeats. Others
    than ids below `vocab` are left out, and said. values: by the name of their field."""
    ids: dict[int, None] = {}
    for name, value in values.items():
        for entry in value if isinstance(value, (list, tuple)) else (value,):
            if entry is None:
                continue
            if isinstance(entry, int) and not isinstance(entry, bool) and 0 <= entry < vocab:
                ids[entry] = None
            else:
                notes.warning(f"{name}: left out {str(entry)[:40]!r}, which is no id below {vocab}")
    return tuple(ids)


def _is_positive(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value) and value > 0
