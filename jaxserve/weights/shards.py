"""Slices of a parameter, as its devices need them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxserve.weights.sources import Index


class Shards:
    """The slices of a parameter of some shape. Each is built once, however many devices hold
    it."""

    def __init__(self, shape: tuple[int, ...], build: Callable[[Index], Any]):
        self._shape = shape
        self._build = build
        self._built: dict[tuple, Any] = {}

    def __call__(self, index: Index | None) -> Any:
        """Returns a slice; index: as JAX gives it, with open ends."""
        key = tuple(some.indices(size)[:2] for some, size in zip(index or (), self._shape))
        if key not in self._built:
            self._built[key] = self._build(tuple(slice(*ends) for ends in key))
        return self._built[key]
