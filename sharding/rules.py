"""The table from logical axes of arrays to mesh axes; None: replicated."""

from __future__ import annotations

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.sharding.mesh import KVP, TP

RULES: dict[str, str | tuple[str, ...] | None] = {
    "vocab": TP,
    "kv_heads": TP,
    "ffn": TP,
    "experts": TP,
    "experts_over_lanes": (KVP, TP),
    "embed": None,
    "lanes": KVP,
}


def spec(*axes: str | None) -> PartitionSpec:
    """PartitionSpec of an array with these logical axes, one per dimension (None: not split).
    Errors: KeyError for a name without a rule."""
    return PartitionSpec(*(None if axis is None else RULES[axis] for axis in axes))


def sharding(mesh: Mesh, *axes: str | None) -> NamedSharding:
    """Sharding over `mesh` of an array with these logical axes."""
    return NamedSharding(mesh, spec(*axes))
