"""Measures how fast the lanes of this mesh send to each other, in groups of every size."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxserve.lanes.groups import group_sizes
from jaxserve.lanes.rates import LaneLinks, Link
from jaxserve.sharding.lane_groups import LaneGroups
from jaxserve.sharding.mesh import KVP

SIZES = 2**14, 2**23  # bytes of the messages that are timed
REPEATS = 5
CALLS = 4  # in a row, each of which needs the one before


Program = Callable[[LaneGroups, jax.Array], jax.Array]


def measure_links(mesh: Mesh) -> dict[int, LaneLinks]:
    """Measures the links in groups of each size that the lanes of the mesh form; none for one lane.
    All groups of a size, and all ranks of a stage, talk at once, as while serving."""
    return {
        size: LaneLinks(
            hop=_fitted(mesh, size, LaneGroups.send_to_next),
            all_gather=_fitted(mesh, size, _all_gather),
            all_to_all=_fitted(mesh, size, _all_to_all),
        )
        for size in group_sizes(mesh.shape[KVP])[1:]
    }


def _all_gather(groups: LaneGroups, x: jax.Array) -> jax.Array:
    """A lane receives as much as x from the others."""
    return groups.gather_rows(x[: len(x) // (groups.size - 1)])[: len(x)]


def _all_to_all(groups: LaneGroups, x: jax.Array) -> jax.Array:
    """A lane sends as much as x to the others."""
    part = len(x) // (groups.size - 1)
    return groups.all_to_all(jnp.resize(x, (groups.size, part))).reshape(-1)[: len(x)]


def _fitted(mesh: Mesh, lanes: int, program: Program) -> Link:
    f = functools.partial(program, LaneGroups(lanes))
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
