"""Measures how fast the lanes of this mesh send to each other."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxserve.lanes.rates import Link
from jaxserve.sharding.lane_groups import LaneGroups
from jaxserve.sharding.mesh import KVP

SIZES = 2**14, 2**23  # bytes of the messages that are timed
REPEATS = 5
CALLS = 4  # in a row, each of which needs the one before


def measure_links(mesh: Mesh) -> dict[str, Link]:
    """Measures the links of `lanes.rates.ExchangeRates`. All ranks of a stage talk at once, as
    while serving."""
    return {name: _fitted(mesh, f) for name, f in _PROGRAMS.items()}


def _hop(x: jax.Array) -> jax.Array:
    return LaneGroups(lax.axis_size(KVP)).send_to_next(x)


def _all_gather(x: jax.Array) -> jax.Array:
    """A lane receives as much as x from the others."""
    lanes = lax.axis_size(KVP)
    return lax.all_gather(x[: len(x) // (lanes - 1)], KVP, tiled=True)[: len(x)]


def _all_to_all(x: jax.Array) -> jax.Array:
    """A lane sends as much as x to the others."""
    lanes = lax.axis_size(KVP)
    part = len(x) // (lanes - 1)
    return lax.all_to_all(jnp.resize(x, (lanes, part)), KVP, 0, 0).reshape(-1)[: len(x)]


_PROGRAMS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "hop": _hop,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
}


def _fitted(mesh: Mesh, f: Callable[[jax.Array], jax.Array]) -> Link:
    lanes = mesh.shape[KVP]
    # which all programs split without rest
    sizes = [size // (lanes * (lanes - 1)) * lanes * (lanes - 1) for size in SIZES]
    small, large = (_seconds(mesh, f, size) for size in sizes)
    rate = (sizes[1] - sizes[0]) / max(large - small, 1e-9)
    return Link(max(small - sizes[0] / rate, 0.0), rate)


def _seconds(mesh: Mesh, f: Callable[[jax.Array], jax.Array], size: int) -> float:
    """Seconds of one call with x of `size` bytes."""

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    def several(x: jax.Array) -> jax.Array:
        for _ in range(CALLS):
            x = jnp.resize(f(x), x.shape)
        return x

    x = jnp.zeros(size, jnp.int8)
    several(x).block_until_ready()

    def once() -> float:
        began = time.perf_counter()
        several(x).block_until_ready()
        return time.perf_counter() - began

    return statistics.median(once() for _ in range(REPEATS)) / CALLS
