"""Parameters of Tunix's models as arrays by their Hugging Face names: the inverse of what its
loaders of safetensors do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

# pattern of Hugging Face names -> (path in the model, (order of axes, shape after that), or None)
KeyMapping = Mapping[str, tuple[str, tuple[Sequence[int] | None, Sequence[int] | None] | None]]


def hugging_face_arrays(
    params: Any, mapping: KeyMapping, shapes: Mapping[str, Sequence[int]]
) -> dict[str, np.ndarray]:
    """Returns the arrays of a model with these shapes, by Hugging Face names. params: a tree, such
    as a state of Flax. mapping: as Tunix's loader of the model has it. Errors: ValueError for a
    name that the mapping or the tree does not have."""
    flat = dict(_flat(params))
    arrays = {}
    for name, shape in shapes.items():
        path, transform = _place(name, mapping)
        if path not in flat:
            raise ValueError(f"the parameters have no {path} for {name}")
        value = np.asarray(flat[path])
        axes, _ = transform or (None, None)
        if axes is None:
            arrays[name] = value.reshape(tuple(shape))
        else:
            moved = [shape[axis] for axis in axes]
            arrays[name] = value.reshape(moved).transpose(np.argsort(axes))
    return arrays


def _place(name: str, mapping: KeyMapping) -> tuple[str, Any]:
    """Returns the path of a tensor in the model, and how it was transformed."""
    for pattern, (path, transform) in mapping.items():
        found = re.fullmatch(pattern, name)
        if found is not None:
            return found.expand(path), transform
    raise ValueError(f"Tunix's loader does not know {name}")


def _flat(params: Any) -> Iterator[tuple[str, Any]]:
    """Yields the arrays of a tree by their paths, joined by dots."""
    for path, value in jax.tree_util.tree_flatten_with_path(params)[0]:
        parts = [str(_key(entry)) for entry in path]
        if parts and parts[-1] in ("value", "raw_value"):  # of a variable
            parts.pop()
        yield ".".join(parts), value


def _key(entry: Any) -> Any:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return entry
