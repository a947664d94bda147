"""The places for adapters on a stage's devices, beside the weights that these change."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.checkpoint.adapters import Factors
from jaxserve.checkpoint.specs import Declared
from jaxserve.engine.stage_plan import StagePlan
from jaxserve.models.adapters import Adapted, Pools
from jaxserve.sharding.rules import sharding


def pool_shapes(plan: StagePlan, mesh: Mesh, layers: range, paths: list[str]) -> list[Pools]:
    """Shapes of the factors of the adapters in all places on a stage, of those of its parameters
    that have some, in the order of `paths`; [] where steps have no adapters."""
    return _shapes(plan, mesh, _of(plan, layers, paths), plan.adapters and plan.adapters.places)


def factor_shapes(plan: StagePlan, mesh: Mesh, layers: range, paths: list[str]) -> list[Pools]:
    """Shapes of the factors of one adapter; see `pool_shapes`."""
    return _shapes(plan, mesh, _of(plan, layers, paths), None)


def _of(plan: StagePlan, layers: range, paths: list[str]) -> list[Factors]:
    changed = plan.factors(layers)
    return [changed[path] for path in paths if path in changed]


def _shapes(plan: StagePlan, mesh: Mesh, factors: list[Factors], places: int | None) -> list[Pools]:
    leading = () if places is None else (places,)

    def shape(d: Declared) -> jax.ShapeDtypeStruct:
        where = sharding(mesh, *[None for _ in leading], *d.axes)
        return jax.ShapeDtypeStruct((*leading, *d.shape), np.dtype(plan.dtype), sharding=where)

    return [(shape(each.down), shape(each.up)) for each in factors]


def pools_of(values: list[Any]) -> list[Pools]:
    """The pools beside a stage's weights."""
    return [(value.down, value.up) for value in values if isinstance(value, Adapted)]


def with_pools(values: list[Any], paths: list[str], changed: Any, pools: list[Pools]) -> list[Any]:
    """Returns a stage's weights with pools, or their shapes, beside those whose paths are among the
    changed ones, in their order; in place of others that were there."""
    left = iter(pools)
    given = []
    for path, value in zip(paths, values):
        if path in changed:
            value = Adapted(value.weight if isinstance(value, Adapted) else value, *next(left))
        given.append(value)
    return given
