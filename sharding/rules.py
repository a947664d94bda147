"""Where every kind of array lies: one table from logical to mesh axes. Axes not named here are not
split."""

from __future__ import annotations

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.sharding.mesh import KVP, TP

RULES: dict[str, str | None] = {"vocab": TP, "kv_heads": TP, "ffn": TP, "embed": None, "lanes": KVP}


def spec(*axes: str | None) -> PartitionSpec:
    """Logical axis names, one per dimension (None: not split) -> mesh axes. Errors: KeyError for a
    name that has no rule."""
    return PartitionSpec(*(None if axis is None else RULES[axis] for axis in axes))


def sharding(mesh: Mesh, *axes: str | None) -> NamedSharding:
    return NamedSharding(mesh, spec(*axes))
