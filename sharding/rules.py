"""The table from logical axes of arrays to mesh axes; None: replicated."""

from __future__ import annotations

import math
from collections.abc import Mapping

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.sharding.mesh import KVP, TP

RULES: dict[str, str | tuple[str, ...] | None] = {
    "vocab": TP,
    "kv_heads": TP,
    "ffn": TP,
    "ffn_over_lanes": (KVP, TP),
    "experts": TP,
    "experts_over_lanes": (KVP, TP),
    "embed": None,
    "lanes": KVP,
}


def devices(axis: str | None, degrees: Mapping[str, int]) -> int:
    """Number of devices over which a dimension with this logical axis is split. degrees: of the
    mesh, by its axes."""
    rule = None if axis is None else RULES[axis]
    over = rule if isinstance(rule, tuple) else (rule,)
    return math.prod(degrees.get(name or "", 1) for name in over)


def spec(*axes: str | None) -> PartitionSpec:
    """PartitionSpec of an array with these logical axes, one per dimension (None: not split).
    Errors: KeyError for a name without a rule."""
    return PartitionSpec(*(None if axis is None else RULES[axis] for axis in axes))


def sharding(mesh: Mesh, *axes: str | None) -> NamedSharding:
    """Sharding over `mesh` of an array with these logical axes."""
    return NamedSharding(mesh, spec(*axes))
